"""One case of the conformance suite, and the bound that a device's result must keep.

Which ops are run on which inputs is decided by the modules beside this one.

The bound. Reference and device start from the same numbers, so they differ by roundings alone: one of the result to the
activation dtype in each, and those on the way there.  A sum of n products accumulated in the wide dtype is off by at
most c sqrt(n) eps times the sum of the magnitudes of its terms (Higham and Mary, "A new approach to probabilistic
rounding error analysis", 2019; c = 4 holds but for one element in thousands).  A device may also round one operand of
an inner product to the activation dtype, as tensor cores need it; a case says where by `operands`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision

AUTO = Precision(torch.bfloat16, round_inputs=True, cache="records")
FLOAT32 = Precision(torch.float32, round_inputs=False, cache="model")
PRECISIONS = {"bfloat16": AUTO, "float32": FLOAT32}


class ConformanceError(AssertionError):
    """An op of a device is further from the reference than its number formats explain; names op, case and result."""


@dataclass(frozen=True)
class Outcome:
    """One tensor that an op returned or wrote, and how far a device may be from it.

    accumulated  float64: sum over the roundings in the wide dtype of the magnitude that each one rounds; None = exact
    operands     float64: the same for roundings of operands to the activation dtype
    slack        float64: an absolute allowance, such as one step of a quantised format
    rounded      the values are rounded to the activation dtype at the end
    flips        share of elements that may be off by more, because a rounding to few bits fell to the other side
    """

    name: str
    values: Tensor
    accumulated: Tensor | float | None = None
    operands: Tensor | float = 0.0
    slack: Tensor | float = 0.0
    rounded: bool = True
    flips: float = 0.0


@dataclass(frozen=True)
class Finding:
    """What a case showed: its largest error as a share of what is allowed (0: exact), and what is wrong."""

    case: str
    op: str
    used: float
    fault: str | None


@dataclass(frozen=True)
class Case:
    """One op on one set of inputs; `run` makes the inputs on the device of the ops that it is given."""

    op: Callable[..., object]
    name: str
    precision: Precision
    run: Callable[[Ops], Sequence[Outcome]]

    @override
    def __str__(self) -> str:
        return f"{self.op.__name__}-{self.name}"

    def judge(self, accelerator: Accelerator) -> Finding:
        """Run the case on `accelerator` and on the reference, and compare."""
        expected = self.run(Ops(torch.device("cpu"), self.precision))
        results = self.run(accelerator.ops(self.precision))
        used, faults = 0.0, []
        for want, got in zip(expected, results, strict=True):
            share, fault = _compare(want, got.values.detach().cpu(), self.precision)
            used = max(used, share)
            faults += [fault] if fault else []
        return Finding(self.name, self.op.__name__, used, "; ".join(faults) or None)

    def check(self, accelerator: Accelerator) -> None:
        """Raise `ConformanceError` when `accelerator` is outside the bound."""
        finding = self.judge(accelerator)
        if finding.fault is not None:
            raise ConformanceError(f"accelerator {accelerator.name!r}, op {finding.op}, case {self}: {finding.fault}")


def roundings(terms: int) -> float:
    """Units of eps by which a sum of `terms` products may be off, per sum of the terms' magnitudes."""
    return 4 * math.sqrt(max(terms, 1))


def _compare(want: Outcome, got: Tensor, precision: Precision) -> tuple[float, str | None]:
    """Return the largest share of the bound that is used, and the fault if there is one."""
    if got.shape != want.values.shape or got.dtype != want.values.dtype:
        expected = f"{want.values.dtype} {list(want.values.shape)}"
        return torch.inf, f"{want.name} is expected to be {expected}, is {got.dtype} {list(got.shape)}"
    if want.accumulated is None:
        wrong = int((_bits(got) != _bits(want.values)).sum())
        return (
            (torch.inf, f"{want.name} differs in {wrong} of {got.numel()} elements, none may") if wrong else (0.0, None)
        )
    exact = want.values.to(torch.float64)
    error = (got.to(torch.float64) - exact).abs()
    share = torch.where(error == 0, 0.0, error / _allowed(want, exact, precision))
    share = share.nan_to_num(nan=torch.inf).flatten()
    passed = int((share > 1).sum())
    if passed <= want.flips * share.numel():
        return float(share[share <= 1].max()) if share.numel() > passed else 0.0, None
    worst = int(share.argmax())
    return float(share[worst]), (
        f"{want.name} is out of bounds in {passed} of {share.numel()} elements: {got.flatten()[worst].item():.6g} "
        f"where the reference has {exact.flatten()[worst].item():.6g}, {share[worst].item():.3g} times what is allowed"
    )


def _allowed(want: Outcome, exact: Tensor, precision: Precision) -> Tensor:
    """What two correct results may differ by: each has its own roundings, hence the factor 2."""
    wide, activation = torch.finfo(precision.wide).eps, torch.finfo(precision.dtype).eps
    accumulated = torch.as_tensor(want.accumulated, dtype=torch.float64).cpu()
    operands, slack = (torch.as_tensor(part, dtype=torch.float64).cpu() for part in (want.operands, want.slack))
    final = exact.abs() * (activation if want.rounded else 0.0)
    smallest = torch.finfo(torch.float32).tiny
    return final + 2 * (wide * accumulated + activation * operands) + slack + smallest


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers, so that equal NaNs are equal and zeros of different sign are not."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype != torch.bool else tensor.to(torch.uint8)
