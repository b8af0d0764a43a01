"""What `deterministic=True` promises, op by op: a row of many is the same row alone, bit for bit.

Whether the row is right is decided by the cases beside this module; here a device is compared with itself.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.conformance.case import PRECISIONS, ConformanceError
from deepinfer.accelerator.conformance.inputs import ALL_SHAPES, Shapes, distinct
from deepinfer.accelerator.conformance.row_steps import STEP_OPS
from deepinfer.accelerator.conformance.rows import ROW_OPS, ROWS
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision


@dataclass(frozen=True)
class Proof:
    """What a case of determinism showed: a digest of its result, and in how many rows another run differed."""

    case: str
    digest: str
    fault: str | None


@dataclass(frozen=True)
class InvarianceCase:
    """One op on one set of inputs; `run` returns the rows of each way to compute them, which must not matter."""

    op: Callable[..., object]
    name: str
    precision: Precision
    run: Callable[[Ops], dict[str, list[Tensor]]]

    @override
    def __str__(self) -> str:
        return f"{self.op.__name__}-{self.name}"

    def judge(self, accelerator: Accelerator) -> Proof:
        """Run the case on the deterministic ops of `accelerator`; raises AcceleratorError where it has none."""
        (_, first), *others = self.run(accelerator.deterministic_ops(self.precision)).items()
        faults = []
        for way, rows in others:
            wrong = sum(_bytes(a) != _bytes(b) for a, b in zip(first, rows, strict=True))
            faults += [f"{wrong} of {len(first)} rows differ {way}"] if wrong else []
        return Proof(str(self), digest_of(first), "; ".join(faults) or None)

    def check(self, accelerator: Accelerator) -> None:
        """Raise `ConformanceError` when a row depends on what else is in the step."""
        proof = self.judge(accelerator)
        if proof.fault is not None:
            raise ConformanceError(f"accelerator {accelerator.name!r}, case {self}: {proof.fault}, none may")


def digest_of(tensors: Sequence[Tensor]) -> str:
    """Return 16 hexadecimal digits of what the tensors hold, bit for bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def invariance_cases(shapes: Sequence[Shapes] = ALL_SHAPES) -> list[InvarianceCase]:
    """Return cases for every op in both precisions, at `shapes`; `TINY` alone takes seconds on a CPU."""
    cases = []
    for label, precision in PRECISIONS.items():
        for sizes in distinct(shapes):
            for name, (op, make) in ROW_OPS.items():
                run = functools.partial(_by_rows, functools.partial(make, sizes))
                cases.append(InvarianceCase(op, f"{name}-{sizes.name}-{label}", precision, run))
            for name, (op, steps) in STEP_OPS.items():
                run = functools.partial(steps, sizes)
                cases.append(InvarianceCase(op, f"{name}-{sizes.name}-{label}", precision, run))
    return cases


def _by_rows(make: Callable[[Ops], Callable[[Tensor], tuple[Tensor, ...]]], ops: Ops) -> dict[str, list[Tensor]]:
    """All rows at once, each alone, and most of them from back to front."""
    run, count = make(ops), ROWS

    def rows_of(order: Sequence[int]) -> dict[int, Tensor]:
        results = run(torch.tensor(order, device=ops.device))
        return {row: torch.cat([_flat(part[place]) for part in results]) for place, row in enumerate(order)}

    alone = {row: rows_of([row])[row] for row in range(count)}
    whole, turned = rows_of(range(count)), rows_of(range(count - 1, count // 3, -1))
    return {
        "together": [whole[row] for row in range(count)],
        "alone": [alone[row] for row in range(count)],
        "in another order": [turned.get(row, whole[row]) for row in range(count)],
    }


def _flat(row: Tensor) -> Tensor:
    """A row's bytes, on the host."""
    return torch.frombuffer(bytearray(_bytes(row)), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
