"""The ops of `nvidia` against the reference: on the device where there is one, else in Triton's interpreter.

The interpreter shows that the kernels' arithmetic is right; what the device makes of it only the device shows.
"""

from typing import override

import pytest

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.conformance import TINY, Case, cases
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer_kernels_cuda.accelerator import NvidiaAccelerator
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.ops import NvidiaOps


class OnCpu(CpuAccelerator):
    """The wheel's ops on the host, their kernels interpreted."""

    name = "nvidia on the CPU"

    @override
    def ops(self, precision: Precision) -> Ops:
        return NvidiaOps(self.device, precision)


HAS_DEVICE = probe() is None
ACCELERATOR: Accelerator = NvidiaAccelerator() if HAS_DEVICE else OnCpu()
SLOW = (
    "write_window-tiny-turned-bfloat16",
    "attention-tiny-mixed",
    *(f"attention-tiny-decode-ratio{r}" for r in (1, 4)),
    *(f"attention-tiny-resumed-ratio{r}" for r in (0, 1, 4, 128)),
)
"""Cases that take the interpreter minutes and show what the others of their op show."""
SMALL = [case for case in cases([TINY]) if not str(case).startswith(SLOW)]


@pytest.mark.parametrize("case", cases() if HAS_DEVICE else SMALL, ids=str)
def test_conformance(case: Case) -> None:
    case.check(ACCELERATOR)
