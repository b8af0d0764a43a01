"""The ops of `ascend` against the reference: on a device where there is one (no such run was made), else on the CPU.

On the CPU this shows that the class composes and that each op runs; what the device computes only the device shows.
"""

from typing import override

import pytest

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.conformance import TINY, Case, cases
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer_kernels_ascend.accelerator import AscendAccelerator
from deepinfer_kernels_ascend.installation import probe
from deepinfer_kernels_ascend.ops import AscendOps


class OnCpu(CpuAccelerator):
    """The wheel's ops on the host."""

    name = "ascend on the CPU"

    @override
    def ops(self, precision: Precision) -> Ops:
        return AscendOps(self.device, precision)


HAS_DEVICE = probe() is None
ACCELERATOR: Accelerator = AscendAccelerator() if HAS_DEVICE else OnCpu()
ONE_EACH = list({case.op: case for case in cases([TINY])}.values())


@pytest.mark.parametrize("case", cases() if HAS_DEVICE else ONE_EACH, ids=str)
def test_conformance(case: Case) -> None:
    case.check(ACCELERATOR)
