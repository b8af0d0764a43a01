"""What CPU ops share: up to which sizes their own bodies pay, memory and layouts, the bodies themselves.

A call of torch on a few numbers costs 2 to 6 us, and a decode step would make a thousand of them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.cpu_ops.kernels import Kernels, load_kernels
from deepinfer.accelerator.ops.settings import OpsSettings
from deepinfer.accelerator.parameters import Precision

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

FEW_ROWS = 64
"""Up to this many rows the cost of an op is that of its calls, not of its sums."""

FEW_NUMBERS = 1 << 15
"""The same bound for an op on single elements."""

FEW_PRODUCTS = 1 << 22
"""Multiplications of the largest product that one thread has done before BLAS would have woken others."""


class HostOps(OpsSettings):
    """Conversions that all CPU ops share, and the bodies in `c/` (None where there is no compiler)."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        super().__init__(device, precision)
        self.kernels: Kernels | None = load_kernels(self.wide)
        self.rounds = self.dtype == torch.bfloat16
        self._scratch = torch.empty(0, dtype=torch.int64)

    @property
    def bodies(self) -> Kernels:
        """The kernels, where the caller knows that there are some."""
        assert self.kernels is not None
        return self.kernels

    def empty(self, *shape: int) -> Tensor:
        """Memory of the wide dtype for a result; torch reads a shape given as one tuple half a microsecond slower."""
        return torch.empty(*shape, dtype=self.wide)

    def scratch(self, numbers: int) -> int:
        """Address of memory for so many numbers of 8 bytes, until the next call: ops of one engine run one by one."""
        if numbers > self._scratch.numel():
            self._scratch = torch.empty(numbers, dtype=torch.int64)
        return self._scratch.data_ptr()

    def whole(self, *shape: int) -> Tensor:
        """Memory of whole numbers for a result."""
        return torch.empty(*shape, dtype=torch.int64)

    def wide_rows(self, x: Tensor) -> Tensor:
        """Return x in the wide dtype, laid out row by row."""
        return self.widen(x).contiguous()

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float | None, turns: Tensor | None) -> Tensor:
        """RMSNorm (unless eps is None), then RoPE (unless turns is None), of vectors that lie together in each row.

        x [T, C] or [T, H, C], wide, rows anywhere; turns [T, dim] pairs of numbers -> y like x, wide.
        """
        shape = x.shape
        y = torch.empty(*shape, dtype=self.wide)
        self.bodies.norm_rotate(
            *(shape[0], 1 if len(shape) == 2 else shape[1], shape[-1], 0 if turns is None else turns.shape[1] // 2),
            *(eps or 0, self.rounds, x.data_ptr(), x.stride(0), eps is not None),
            *(0 if weight is None else weight.data_ptr(), 0 if turns is None else turns.data_ptr(), y.data_ptr()),
        )
        return y
