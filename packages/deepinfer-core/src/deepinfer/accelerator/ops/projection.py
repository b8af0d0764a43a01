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

    `stored` holds the weights whose rows follow one another.
    round_group: width of the FP8 groups that inputs are rounded in; 0 = inputs are taken as they are.
    """

    dense: Tensor | None
    stored: tuple[StoredWeight, ...]
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
        return tensor.to(self.device, dtype or self.dtype)

    def pack_linear(self, weight: StoredWeight) -> PackedLinear:
        """Make a weight ready for `linear`."""
        return self._pack([weight], round_inputs=True)

    def pack_stacked(self, weights: list[StoredWeight]) -> PackedLinear:
        """Make weights of one input and one format ready as one `linear`: their rows follow one another."""
        return self._pack(weights, round_inputs=True)

    def pack_grouped(self, weight: StoredWeight, groups: int) -> PackedLinear:
        """Make a block-diagonal weight of `groups` blocks ready for `grouped_linear`; its inputs are never rounded."""
        assert weight.data.shape[0] % groups == 0
        return self._pack([weight], round_inputs=False)

    def _pack(self, weights: list[StoredWeight], *, round_inputs: bool) -> PackedLinear:
        quantised = weights[0].scale is not None
        group = weights[0].block if quantised and round_inputs and self.precision.round_inputs else 0
        if not quantised or sum(weight.elements for weight in weights) <= EXPAND_LIMIT:
            dense = torch.cat([self.tensor(dequantise(weight), self.wide) for weight in weights])
            return PackedLinear(dense, (), group)
        return PackedLinear(None, tuple(self.stored(weight) for weight in weights), group)

    def stored(self, weight: StoredWeight) -> StoredWeight:
        """Bring a weight to the device as it is."""
        scale = None if weight.scale is None else weight.scale.to(self.device)
        return StoredWeight(weight.data.to(self.device), scale, weight.block)

    def linear(self, x: Tensor, weight: PackedLinear, *, wide: bool = False) -> Tensor:
        """X [..., in] times weight^T -> [..., out] in the activation dtype, or unrounded with `wide`.

        With `round_group` the inputs go through FP8 first: groups along `in`, as the checkpoint was trained.
        """
        y = functional.linear(self.widen(self._rounded(x, weight)), self._dense(weight))
        return y if wide else self.narrow(y)

    def grouped_linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """Block-diagonal product: x [T, G, K] with weight [G * R, K] (row = g * R + r) -> [T, G * R]."""
        groups = x.shape[1]
        dense = self._dense(weight).unflatten(0, (groups, -1))
        x = self.widen(self._rounded(x, weight))
        return self.narrow(torch.bmm(x.transpose(0, 1), dense.transpose(1, 2)).transpose(0, 1).flatten(1))

    def _rounded(self, x: Tensor, weight: PackedLinear) -> Tensor:
        return fp8_round(x, weight.round_group) if weight.round_group else x

    def _dense(self, weight: PackedLinear) -> Tensor:
        if weight.dense is not None:
            return weight.dense
        return torch.cat([self.widen(dequantise(part)) for part in weight.stored])

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows of `table` [V, D] -> [T, D] in the activation dtype."""
        return self.narrow(table.index_select(0, token_ids))

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Weight * x / sqrt(mean(x^2) + eps) over the last dimension; one rounding to the activation dtype.

        `weight` is wide; without it only the scaling (V4's per-head query norm).
        """
        return self.narrow(functional.rms_norm(self.widen(x), x.shape[-1:], weight, eps))
