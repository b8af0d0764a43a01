"""Products and norms on the CPU: weights laid out for one row, norms of few rows."""

from dataclasses import replace
from typing import override

from torch import Tensor
from torch.nn import functional

from deepinfer.accelerator.cpu_ops.arrays import FEW_NUMBERS, HostOps
from deepinfer.accelerator.cpu_ops.formats import round_inputs
from deepinfer.accelerator.ops.projection import PackedLinear, ProjectionOps
from deepinfer.accelerator.parameters import StoredWeight


class CpuProjection(HostOps, ProjectionOps):
    """Reference products over weights in another layout."""

    @override
    def _pack(self, weights: list[StoredWeight], *, round_inputs: bool) -> PackedLinear:
        """Columns lie together: BLAS reads them in half the time when rows are few, and as fast when they are many."""
        packed = super()._pack(weights, round_inputs=round_inputs)
        return packed if packed.dense is None else replace(packed, dense=packed.dense.t().contiguous().t())

    @override
    def linear(self, x: Tensor, weight: PackedLinear, *, wide: bool = False) -> Tensor:
        """Where nothing is rounded the product is all there is: a third of the call at one row was asking."""
        if weight.dense is None or weight.round_group or x.dtype != self.wide:
            return super().linear(x, weight, wide=wide)
        return functional.linear(x, weight.dense)

    @override
    def _rounded(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return round_inputs(self.widen(x), weight.round_group) if weight.round_group else x

    @override
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Few numbers: numpy, half the time of torch's."""
        if x.numel() > FEW_NUMBERS:
            return super().rms_norm(x, weight, eps)
        return self.result(self.norm(self.array(x), weight, eps))
