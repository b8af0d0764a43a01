"""Mixture of experts on the CPU: few rows in one call, each weight read once for up to eight of them."""

from dataclasses import replace
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import FEW_PRODUCTS, HostOps
from deepinfer.accelerator.cpu_ops.formats import round_inputs
from deepinfer.accelerator.ops.expert_routing import ExpertRoutingOps, PackedExperts, RouteSettings
from deepinfer.accelerator.parameters import StoredExpert

TILE = 8
"""Rows of a tile, as in `c/products.h`."""


class CpuExperts(HostOps, ExpertRoutingOps):
    """Routing and experts of few rows by the bodies in C; many rows, and large experts, are BLAS's."""

    @override
    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, picks: Tensor | None, settings: RouteSettings
    ) -> tuple[Tensor, Tensor]:
        rows, count = x.shape[0], gate.shape[0]
        if self.kernels is None or rows * gate.numel() > FEW_PRODUCTS:
            return super().route(x, gate, bias, picks, settings)
        x, given = self.wide_rows(x), picks is not None
        if picks is None:
            picks = torch.empty((rows, settings.top_k), dtype=torch.int64)
        weights = self.empty(*picks.shape)
        stride = 0 if bias is None or bias.dim() == 1 else count
        self.bodies.route(
            *(rows, x.shape[1], count, picks.shape[1], settings.normalise, settings.scale),
            *(x.data_ptr(), gate.data_ptr(), 0 if bias is None else bias.data_ptr(), stride, given),
            *(picks.data_ptr(), weights.data_ptr(), self.scratch(2 * count)),
        )
        return picks, weights

    @override
    def pack_experts(self, experts: list[StoredExpert]) -> PackedExperts:
        """Lay out each expert's matrices [in, out], so that one row after the other adds to all outputs at once."""
        packed = super().pack_experts(experts)
        if packed.w13 is None or packed.w2 is None:
            return packed
        w13, w2 = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (packed.w13, packed.w2))
        return replace(packed, w13=w13, w2=w2)

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        if not self._fits(x.shape[0] * picks.shape[1], experts):
            return super().experts(x, picks, weights, experts, limit)
        return self._few(x, picks.contiguous(), weights.contiguous(), experts, limit)

    @override
    def shared_expert(self, x: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        if not self._fits(x.shape[0], experts):
            return super().shared_expert(x, experts, limit)
        return self._few(x, None, None, experts, limit)

    def _fits(self, rows: int, experts: PackedExperts) -> bool:
        """Whether the body in C takes so many rows: few products, inputs rounded as it can."""
        few = experts.w13 is not None and rows * experts.w13[0].numel() <= FEW_PRODUCTS
        return self.kernels is not None and few and (not experts.round_group or self.wide == torch.float32)

    def _few(
        self, x: Tensor, picks: Tensor | None, weights: Tensor | None, experts: PackedExperts, limit: float
    ) -> Tensor:
        """Few rows through their picks, or all through the one expert there is."""
        assert experts.w13 is not None
        assert experts.w2 is not None
        x = self._expert_input(x, experts).contiguous()
        rows, width = x.shape
        inner, out = experts.w2.shape[2], self.empty(rows, width)
        self.bodies.experts(
            *(rows, width, inner, experts.count, 1 if picks is None else picks.shape[1], limit),
            *(self.rounds, experts.round_group, x.data_ptr(), 0 if picks is None else picks.data_ptr()),
            *(0 if weights is None else weights.data_ptr(), experts.w13.data_ptr(), experts.w2.data_ptr()),
            *(self.scratch(TILE * (2 * inner + width)), out.data_ptr()),
        )
        return out

    @override
    def _expert_input(self, x: Tensor, experts: PackedExperts) -> Tensor:
        wide = self.widen(self.narrow(x))
        return round_inputs(wide, experts.round_group) if experts.round_group else wide
