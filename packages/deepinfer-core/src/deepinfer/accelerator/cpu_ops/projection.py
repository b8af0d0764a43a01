"""Products and norms on the CPU: weights laid out for one row, norms of few rows."""

from dataclasses import dataclass, replace
from typing import override

from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import FEW_PRODUCTS, HostOps
from deepinfer.accelerator.cpu_ops.formats import round_inputs
from deepinfer.accelerator.ops.projection import PackedLinear, ProjectionOps
from deepinfer.accelerator.parameters import StoredWeight


@dataclass(frozen=True)
class _Laid(PackedLinear):
    """A dense weight as the bodies take it: memory [inputs, outputs] at `address`, which `dense` keeps alive."""

    inputs: int
    outputs: int
    address: int


class CpuProjection(HostOps, ProjectionOps):
    """Products and norms of few rows by the bodies in C, over weights in the layout that it reads."""

    @override
    def _pack(self, weights: list[StoredWeight], *, round_inputs: bool) -> PackedLinear:
        """Columns lie together: BLAS reads them in half the time when rows are few, and as fast when they are many."""
        packed = super()._pack(weights, round_inputs=round_inputs)
        if packed.dense is None:
            return packed
        columns = packed.dense.t().contiguous()
        if self.kernels is None:
            return replace(packed, dense=columns.t())
        inputs, outputs = columns.shape
        return _Laid(columns.t(), (), packed.round_group, inputs, outputs, columns.data_ptr())

    @override
    def linear(self, x: Tensor, weight: PackedLinear, *, wide: bool = False) -> Tensor:
        """Few rows by the bodies in C: the call costs a third of BLAS's."""
        rows = x.shape[0]
        if not isinstance(weight, _Laid) or rows * weight.inputs * weight.outputs > FEW_PRODUCTS or x.dim() != 2:
            return super().linear(x, weight, wide=wide)
        x = self._rounded(x, weight) if weight.round_group else self.widen(x)
        y = self.empty(rows, weight.outputs)
        self.bodies.linear(
            *(rows, 1, weight.inputs, weight.outputs),
            *(x.data_ptr(), x.stride(0), weight.address, y.data_ptr()),
        )
        return y if wide else self.narrow(y)

    @override
    def grouped_linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        rows, groups, width = x.shape
        if not isinstance(weight, _Laid) or rows * weight.inputs * weight.outputs > FEW_PRODUCTS:
            return super().grouped_linear(x, weight)
        x, y = self.wide_rows(self._rounded(x, weight)), self.empty(rows, weight.outputs)
        self.bodies.linear(
            *(rows, groups, width, weight.outputs // groups),
            *(x.data_ptr(), groups * width, weight.address, y.data_ptr()),
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
