"""Products and norms on the CPU: weights laid out for one row, norms of few rows."""

from dataclasses import replace
from typing import override

from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import FEW_NUMBERS, HostOps
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
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Few numbers: numpy, half the time of torch's."""
        if x.numel() > FEW_NUMBERS:
            return super().rms_norm(x, weight, eps)
        return self.result(self.norm(self.array(x), weight, eps))
