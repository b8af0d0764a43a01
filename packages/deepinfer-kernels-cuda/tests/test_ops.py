"""What the wheel says about its ops: which are its own, and why a precision or a shape gets the reference."""

import torch

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.report import report_ops
from deepinfer_kernels_cuda.ops import NvidiaOps

QUANTISED = Precision(torch.bfloat16, round_inputs=True, cache="records")
WITH_KERNELS = {
    *("linear", "grouped_linear", "route", "experts", "shared_expert", "mix_in", "mix_out"),
    *("rms_norm", "rotate_queries", "write_window", "attention", "select_entries", "write_entries", "compress"),
    *("collapse", "combine", "ngram_rows", "engram_lookup", "engram_gate"),
    *("mask_tokens", "greedy", "sample"),
}


def reasons(precision: Precision, **shapes: int) -> dict[str, str | None]:
    reports = report_ops(CpuAccelerator(), NvidiaOps(torch.device("cpu"), precision), shapes)
    return {report.op: report.reason for report in reports}


def test_ops_with_kernels_are_told_from_the_others() -> None:
    told = reasons(QUANTISED, hidden=5120, streams=4)
    assert {op for op, reason in told.items() if reason is None} == WITH_KERNELS
    assert "the definition" in (told["log_probs"] or "")


def test_other_activations_than_bfloat16_run_the_reference_and_say_so() -> None:
    for dtype, name in ((torch.float32, "float32"), (torch.float64, "float64")):
        told = reasons(Precision(dtype, round_inputs=False, cache="model"))
        assert all(told.values())
        assert all(f"these are {name}" in (told[op] or "") for op in WITH_KERNELS)


def test_a_shape_that_kernels_cannot_take_is_named() -> None:
    told = reasons(QUANTISED, hidden=16384, streams=4)
    assert "at most 8192 channels" in (told["mix_in"] or "")
    assert told["experts"] is None
