"""The ops of `nvidia` against the reference: on the device where there is one, else in Triton's interpreter.

The interpreter shows that the kernels' arithmetic is right; what the device makes of it only the device shows.
"""

from dataclasses import replace
from typing import override

import pytest
import torch

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.conformance import TINY, Case, InvarianceCase, cases, invariance_cases
from deepinfer.accelerator.conformance.attention import attention_cases
from deepinfer.accelerator.conformance.case import AUTO
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.report import report_ops
from deepinfer.errors import AcceleratorError
from deepinfer_kernels_cuda.accelerator import NvidiaAccelerator
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.ops import NvidiaOps, SteadyNvidiaOps


class OnCpu(CpuAccelerator):
    """The wheel's ops on the host, their kernels interpreted."""

    name = "nvidia on the CPU"

    @override
    def ops(self, precision: Precision) -> Ops:
        return NvidiaOps(self.device, precision)


HAS_DEVICE = probe() is None
ACCELERATOR: Accelerator = NvidiaAccelerator() if HAS_DEVICE else OnCpu()
SLOW = (
    *(f"write_window-tiny-{name}-bfloat16" for name in ("turned", "window")),
    "write_entries-tiny-entries-bfloat16",
    "compress-tiny-ratio128-bfloat16",
    *(f"compress-tiny-resumed-ratio{r}-bfloat16" for r in (1, 2, 128)),
    "attention-tiny",
    *(f"{op}-tiny" for op in ("copy_records", "unpack_records")),
    *(f"select_entries-{name}-ratio{r}-bfloat16" for name in ("tiny", "wide-index") for r in (1, 4)),
)
"""Cases that take the interpreter minutes, because they fill caches row by row; `test_records.py` and
`test_attention_parts.py` and the cases that are left show what they show."""
WIDE_INDEX = replace(TINY, name="wide-index", index_heads=16, index_dim=128, rope=64)
"""Index keys of the released models' width, which kernels read in words."""
SMALL = cases([TINY]) + [case for case in attention_cases([WIDE_INDEX]) if case.op is Ops.select_entries]
SMALL = [case for case in SMALL if not str(case).startswith(SLOW)]


@pytest.mark.parametrize("case", cases() if HAS_DEVICE else SMALL, ids=str)
def test_conformance(case: Case) -> None:
    case.check(ACCELERATOR)


@pytest.mark.skipif(not HAS_DEVICE, reason="what the interpreter rounds is the host's, not the kernels'")
@pytest.mark.parametrize("case", invariance_cases(), ids=str)
def test_a_row_has_the_same_bits_in_every_batch(case: InvarianceCase) -> None:
    case.check(ACCELERATOR)


def test_deterministic_ops_are_kernels_where_kernels_run_and_never_the_plain_reference() -> None:
    """They raise where only the reference could attend: its sums follow the shapes of a step."""
    steady = SteadyNvidiaOps(torch.device("cpu"), AUTO)
    taken = {report.op for report in report_ops(CpuAccelerator(), steady, {}) if report.reason is None}
    assert {"linear", "experts", "attention", "select_entries"} <= taken
    with pytest.raises(AcceleratorError, match="depend on the batch; run it without deterministic=True"):
        steady.only_reference("attention", "fp8_rope records of 48 channels")
    NvidiaOps(torch.device("cpu"), AUTO).only_reference("attention", "fp8_rope records of 48 channels")
