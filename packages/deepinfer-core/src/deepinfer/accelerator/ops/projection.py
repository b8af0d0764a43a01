"""Matrix products and norms: embedding, linear layers over plain, FP8 and FP4 weights, the head, RMSNorm.

Owns how a stored weight becomes what is multiplied; experts are `expert_routing`'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.accelerator.ops.number_formats import dequantise_fp8_blocks, dequantise_rows, fp8_round
from deepinfer.accelerator.ops.settings import OpsSettings
from deepinfer.accelerator.parameters import StoredWeight

EXPAND_LIMIT = 1 << 22
"""Weights of at most this many elements are widened when they are packed: dequantising a 128 x 128 weight at every
call costs several times its product, while a large one would take four to eight times its bytes."""


@dataclass(frozen=True)
class PackedLinear:
    """A weight [out, in] as the reference multiplies it: `dense` in the wide dtype, or `stored` (dequantised per call).

    round_group: width of the FP8 groups that inputs are rounded in; 0 = inputs are taken as they are.
    """

    dense: Tensor | None
    stored: StoredWeight | None
    round_group: int


def dequantise(weight: StoredWeight) -> Tensor:
    """The values of a stored weight: float32 [out, in], or its own dtype when it is not quantised."""
    if weight.scale is None:
        return weight.data
    if weight.is_fp4:
        return dequantise_rows(weight.data, weight.scale)
    return dequantise_fp8_blocks(weight.data, weight.scale, weight.block)


class ProjectionOps(OpsSettings):
    """Reference products: everything is multiplied and summed in the wide dtype and rounded once."""

    def tensor(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Bring a stored tensor to the device, as `dtype` (default: the activation dtype)."""
        return tensor.to(self.device, dtype or self.precision.dtype)

    def pack_linear(self, weight: StoredWeight, *, round_inputs: bool = True) -> PackedLinear:
        """Make a weight ready for `linear`; `round_inputs=False` never rounds its inputs."""
        rounds = round_inputs and self.precision.round_inputs and weight.scale is not None
        group = weight.block if rounds else 0
        elements = weight.data.numel() * (2 if weight.is_fp4 else 1)
        if elements <= EXPAND_LIMIT or weight.scale is None:
            return PackedLinear(self.tensor(dequantise(weight), self.precision.wide), None, group)
        assert weight.scale is not None
        stored = StoredWeight(weight.data.to(self.device), weight.scale.to(self.device), weight.block)
        return PackedLinear(None, stored, group)

    def pack_grouped(self, weight: StoredWeight, groups: int) -> PackedLinear:
        """Make a block-diagonal weight of `groups` blocks ready for `grouped_linear`; its inputs are never rounded."""
        assert weight.data.shape[0] % groups == 0
        return self.pack_linear(weight, round_inputs=False)

    def linear(self, x: Tensor, weight: PackedLinear, *, wide: bool = False) -> Tensor:
        """x [..., in] times weight^T -> [..., out] in the activation dtype, or unrounded with `wide`.

        With `round_group` the inputs go through FP8 first: groups along `in`, as the checkpoint was trained.
        """
        y = functional.linear(self._rounded(x, weight).to(self.precision.wide), self._dense(weight))
        return y if wide else y.to(self.precision.dtype)

    def grouped_linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """Block-diagonal product: x [T, G, K] with weight [G * R, K] (row = g * R + r) -> [T, G * R]."""
        groups = x.shape[1]
        dense = self._dense(weight).unflatten(0, (groups, -1))
        x = self._rounded(x, weight).to(self.precision.wide)
        return torch.bmm(x.transpose(0, 1), dense.transpose(1, 2)).transpose(0, 1).flatten(1).to(self.precision.dtype)

    def _rounded(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return fp8_round(x, weight.round_group) if weight.round_group else x

    def _dense(self, weight: PackedLinear) -> Tensor:
        if weight.dense is not None:
            return weight.dense
        assert weight.stored is not None
        return dequantise(weight.stored).to(self.precision.wide)

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of `table` [V, D] -> [T, D] in the activation dtype."""
        return table.index_select(0, token_ids).to(self.precision.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last dimension; wide inside, one rounding to the activation dtype.

        Without `weight` only the scaling (V4's per-head query norm).
        """
        wide = x.to(self.precision.wide)
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (y if weight is None else y * weight.to(self.precision.wide)).to(self.precision.dtype)
