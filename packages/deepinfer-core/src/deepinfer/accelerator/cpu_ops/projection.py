"""Products and norms on the CPU: weights laid out for one row, norms of few rows."""

from dataclasses import replace
from typing import override

from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import FEW_PRODUCTS, HostOps
from deepinfer.accelerator.cpu_ops.formats import round_inputs
from deepinfer.accelerator.ops.projection import PackedLinear, ProjectionOps
from deepinfer.accelerator.parameters import StoredWeight


class CpuProjection(HostOps, ProjectionOps):
    """Products and norms of few rows by the bodies in C, over weights in the layout that it reads."""

    @override
    def _pack(self, weights: list[StoredWeight], *, round_inputs: bool) -> PackedLinear:
        """Columns lie together: BLAS reads them in half the time when rows are few, and as fast when they are many."""
        packed = super()._pack(weights, round_inputs=round_inputs)
        return packed if packed.dense is None else replace(packed, dense=packed.dense.t().contiguous().t())

    @override
    def linear(self, x: Tensor, weight: PackedLinear, *, wide: bool = False) -> Tensor:
        """Few rows by the bodies in C: the call costs a third of BLAS's."""
        dense, rows = weight.dense, x.shape[0]
        if dense is None or self.kernels is None or rows * dense.numel() > FEW_PRODUCTS or x.dim() != 2:
            return super().linear(x, weight, wide=wide)
        x, y = self.widen(self._rounded(x, weight)), self.empty(rows, dense.shape[0])
        self.kernels.linear(
            rows, 1, dense.shape[1], dense.shape[0], x.data_ptr(), x.stride(0), dense.data_ptr(), y.data_ptr()
        )
        return y if wide else self.narrow(y)

    @override
    def grouped_linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        dense, (rows, groups, width) = weight.dense, x.shape
        if dense is None or self.kernels is None or rows * dense.numel() > FEW_PRODUCTS:
            return super().grouped_linear(x, weight)
        x, y = self.wide_rows(self._rounded(x, weight)), self.empty(rows, dense.shape[0])
        self.kernels.linear(
            *(rows, groups, width, dense.shape[0] // groups),
            *(x.data_ptr(), groups * width, dense.data_ptr(), y.data_ptr()),
        )
        return self.narrow(y)

    @override
    def _rounded(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return round_inputs(self.widen(x), weight.round_group) if weight.round_group else x

    @override
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if self.kernels is None or x.dim() > 3 or x.stride(-1) != 1:
            return super().rms_norm(x, weight, eps)
        return self.narrow(self.norm_rotate(self.widen(x), weight, eps, None))
