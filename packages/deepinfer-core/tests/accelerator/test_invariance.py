"""Deterministic ops: on the CPU a row is the same bits whatever else is in the step, and a dependence is found."""

from collections.abc import Callable
from typing import Any, override

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.conformance import TINY, Case, ConformanceError, InvarianceCase, cases, invariance_cases
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.cpu_ops.tiled import TiledCpuOps
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.stream_mixing import Mix
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.report import OPS

SMALL = invariance_cases([TINY])


class Deterministic(CpuAccelerator):
    """The CPU with nothing but its deterministic ops."""

    @override
    def ops(self, precision: Precision) -> Ops:
        return self.deterministic_ops(precision)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_row_is_the_same_alone_and_among_others(case: InvarianceCase) -> None:
    case.check(CpuAccelerator())


@pytest.mark.parametrize("case", cases([TINY]), ids=str)
def test_the_deterministic_ops_conform(case: Case) -> None:
    case.check(Deterministic())


def test_every_op_has_cases_in_both_precisions() -> None:
    covered = {(case.op.__name__, case.precision.dtype) for case in SMALL}
    assert covered >= {(op.__name__, dtype) for op in OPS for dtype in (torch.bfloat16, torch.float32)}
    assert len({str(case) for case in invariance_cases()}) == len(invariance_cases())


def test_threads_that_share_a_tile_change_nothing_within_a_run() -> None:
    torch.set_num_threads(3)
    try:
        assert [proof for proof in (case.judge(CpuAccelerator()) for case in SMALL) if proof.fault] == []
    finally:
        torch.set_num_threads(1)


def test_a_digest_is_the_same_in_two_runs() -> None:
    some = SMALL[::17]
    first, second = ([case.judge(CpuAccelerator()).digest for case in some] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)


def shifted(result: Any, rows: int) -> Any:
    """A result that depends on how many rows the step has, by one unit in the last place or one choice."""
    if isinstance(result, Tensor):
        if rows < 2:
            return result
        return torch.nextafter(result, result + 1) if result.is_floating_point() else result + 1
    if isinstance(result, Mix):
        return Mix(*(shifted(part, rows) for part in (result.pre, result.post, result.comb)))
    if isinstance(result, tuple):
        return (shifted(result[0], rows), *result[1:])
    return type(result)(shifted(result.entries, rows), result.slots, result.bias)


WRITERS = ("write_window", "write_entries")
"""Ops that return nothing: their first argument depends on the rows of the step."""


def faulty(op: str) -> CpuAccelerator:
    """The CPU with one deterministic op that is none."""
    original: Callable[..., Any] = getattr(TiledCpuOps, op)

    def dependent(self: Ops, first: Any, *others: Any, **options: Any) -> Any:
        given = first.query if op == "select_entries" else first.positions if op == "ngram_rows" else first
        rows = given.shape[0]
        if op in WRITERS:
            return original(self, first.roll(1, -1) if rows > 2 else first, *others, **options)
        return shifted(original(self, first, *others, **options), rows)

    class Faulty(CpuAccelerator):
        name = "faulty"

        @override
        def deterministic_ops(self, precision: Precision) -> Ops:
            kind: type[Ops] = type("FaultyOps", (TiledCpuOps,), {op: dependent})
            return kind(self.device, precision)

    return Faulty()


@pytest.mark.parametrize("op", [op.__name__ for op in OPS])
def test_a_dependence_on_the_other_rows_is_found(op: str) -> None:
    own = [case for case in SMALL if case.op.__name__ == op and case.precision.dtype == torch.float32]
    assert any("rows differ alone" in str(case.judge(faulty(op)).fault) for case in own)


def test_a_failure_names_accelerator_and_case() -> None:
    case = next(case for case in SMALL if case.op is Ops.greedy)
    with pytest.raises(ConformanceError, match=r"accelerator 'faulty', case greedy-.*: 37 of 37 rows differ alone"):
        case.check(faulty("greedy"))
