"""Linear layers on the device: FP8 and FP4 weights through the wheel's kernels, bfloat16 weights through cuBLAS.

Weights in float32 and everything outside of bfloat16 activations is the reference.
"""

from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.projection import PackedLinear
from deepinfer.accelerator.parameters import StoredWeight
from deepinfer.accelerator.tiled_ops.tiles import by_tiles
from deepinfer_kernels_cuda.kernel_ops import KernelLinear, KernelOps, columns
from deepinfer_kernels_cuda.kernels.packing import STEP, PackedWeight, fill_weight, new_weight
from deepinfer_kernels_cuda.kernels.products import ROW_TILE, linear
from deepinfer_kernels_cuda.kernels.rounding import round_rows

STEADY_ROWS = 64
"""Rows of every product that a library computes where bits may not depend on the batch."""


class LinearKernels(KernelOps, Ops):
    """`linear` and `grouped_linear`."""

    @override
    def pack_linear(self, weight: StoredWeight) -> PackedLinear:
        return self._packed([weight], 1, round_inputs=True) or super().pack_linear(weight)

    @override
    def pack_stacked(self, weights: list[StoredWeight]) -> PackedLinear:
        return self._packed(weights, 1, round_inputs=True) or super().pack_stacked(weights)

    @override
    def pack_grouped(self, weight: StoredWeight, groups: int) -> PackedLinear:
        if weight.data.shape[0] // groups % ROW_TILE or columns(weight) % STEP:
            return super().pack_grouped(weight, groups)
        return self._packed([weight], groups, round_inputs=False) or super().pack_grouped(weight, groups)

    def _packed(self, weights: list[StoredWeight], groups: int, *, round_inputs: bool) -> KernelLinear | None:
        """Return the weights one below the other as kernels take them, or None where they do not."""
        by_library = self.no_kernels is None and self.device.type == "cuda" and groups == 1
        if by_library and all(weight.data.dtype == torch.bfloat16 for weight in weights):
            return KernelLinear(None, (), 0, plain=torch.cat([self.tensor(weight.data) for weight in weights]))
        if not self.kernels_take(weights):
            return None
        rows = sum(weight.data.shape[0] for weight in weights)
        padded = -(-rows // ROW_TILE) * ROW_TILE
        memory = new_weight(1, padded, columns(weights[0]), self.device, fp4=weights[0].is_fp4)
        if not fill_weight(memory, 0, 0, weights):
            return None
        packed = PackedWeight(memory.words, memory.factors, rows // groups, memory.columns, memory.fp4)
        group = weights[0].block if round_inputs and self.precision.round_inputs else 0
        return KernelLinear(None, (), group, packed=packed)

    @override
    def linear(self, x: Tensor, weight: PackedLinear, *, wide: bool = False) -> Tensor:
        dtype = self.wide if wide else self.dtype
        if not isinstance(weight, KernelLinear):
            return super().linear(x, weight, wide=wide)
        rows = x.reshape(-1, x.shape[-1])
        if weight.packed is None:
            assert weight.plain is not None
            y = self._by_library(self.narrow(rows), weight.plain).to(dtype)
        else:
            x_rows = self._rows(rows, weight.packed, weight.round_group)
            y = linear(x_rows, weight.packed, dtype, steady=self.steady)
        return y.view(*x.shape[:-1], y.shape[-1])

    @override
    def grouped_linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        if not isinstance(weight, KernelLinear) or weight.packed is None:
            return super().grouped_linear(x, weight)
        rows = self._rows(x.flatten(1), weight.packed, 0)
        return linear(rows, weight.packed, self.dtype, groups=x.shape[1], steady=self.steady)

    def _by_library(self, x: Tensor, weight: Tensor) -> Tensor:
        """X [T, K] times weight [N, K], wide; libraries choose by shape, so steady products all have one."""

        def run(x: Tensor) -> tuple[Tensor]:
            return (torch.mm(x, weight.t(), out_dtype=self.wide),)

        return by_tiles(STEADY_ROWS, run, x)[0] if self.steady else run(x)[0]

    def _rows(self, x: Tensor, weight: PackedWeight, group: int) -> Tensor:
        """Return x [T, K] as kernels read it: bfloat16, rounded in groups, a whole number of steps wide."""
        width = -(-x.shape[1] // STEP) * STEP
        if group == 0 and width == x.shape[1] and x.stride(1) == 1 and x.dtype == torch.bfloat16:
            return x
        return round_rows(self.narrow(x), group, width)
