"""The ops of `nvidia` against the reference: on the device where there is one, else with the same class on the CPU.

On the CPU this shows that the class composes and that each op runs; what the device computes only the device shows.
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
    """The wheel's ops on the host."""

    name = "nvidia on the CPU"

    @override
    def ops(self, precision: Precision) -> Ops:
        return NvidiaOps(self.device, precision)


HAS_DEVICE = probe() is None
ACCELERATOR: Accelerator = NvidiaAccelerator() if HAS_DEVICE else OnCpu()
SMALL = cases([TINY])


@pytest.mark.parametrize("case", cases() if HAS_DEVICE else SMALL, ids=str)
def test_conformance(case: Case) -> None:
    case.check(ACCELERATOR)
