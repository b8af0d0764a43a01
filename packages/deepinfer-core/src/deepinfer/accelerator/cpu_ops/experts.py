"""Mixture of experts on the CPU: few large products instead of a dozen calls for each expert."""

from dataclasses import replace
from typing import override

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import FEW_PRODUCTS, FEW_ROWS, Floats, HostOps, Ints, product
from deepinfer.accelerator.ops.expert_routing import ExpertRoutingOps, PackedExperts, RouteSettings
from deepinfer.accelerator.parameters import StoredExpert

PICKED_SHARE = 4
"""All experts run on all rows when there are at most this many of them for each pick of a row."""

FEW_PICKS = 4
"""Up to this many picks in a step are worked off one by one."""


class CpuExperts(HostOps, ExpertRoutingOps):
    """Routing of few rows in numpy; experts as one product where that is less than the calls it saves."""

    @override
    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, picks: Tensor | None, settings: RouteSettings
    ) -> tuple[Tensor, Tensor]:
        """Few rows: a third of the reference's time."""
        if x.shape[0] * gate.numel() > FEW_PRODUCTS:
            return super().route(x, gate, bias, picks, settings)
        scores = np.sqrt(np.logaddexp(0, self.array(x).dot(gate.numpy().T)))
        if picks is None:
            chosen: Ints = (-scores if bias is None else -(scores + bias.numpy())).argsort(1)[:, : settings.top_k]
            picks = torch.from_numpy(chosen)
        else:
            chosen = picks.numpy()
        weights = np.take_along_axis(scores, chosen, 1)
        if settings.normalise and settings.top_k > 1:
            weights /= np.add.reduce(weights, 1, keepdims=True) + 1e-20
        weights *= settings.scale
        return picks, torch.from_numpy(weights)

    @override
    def pack_experts(self, experts: list[StoredExpert]) -> PackedExperts:
        """Lay w13 out as [D, E, 2 I] and w2 as [E, I, D]: all experts are one product of contiguous matrices."""
        packed = super().pack_experts(experts)
        if packed.w13 is None or packed.w2 is None:
            return packed
        w13 = packed.w13.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        return replace(packed, w13=w13, w2=packed.w2.transpose(1, 2).contiguous().transpose(1, 2))

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """Where a row picks a quarter of all experts or more, every expert runs on every row.

        That is two products; only what is picked goes through the activation, the rest is 0.  Very few picks are worked
        off one by one, which reads no weight in vain.
        """
        if experts.w13 is None or experts.w2 is None:
            return super().experts(x, picks, weights, experts, limit)
        if picks.numel() <= FEW_PICKS:
            return self._one_by_one(x, picks, weights, experts, limit)
        if experts.count > PICKED_SHARE * picks.shape[1] or x.shape[0] > FEW_ROWS:
            return super().experts(x, picks, weights, experts, limit)
        rows, count, width = x.shape[0], experts.count, experts.w2.shape[2]
        gate_up = product(self._input(x, experts), experts.w13.flatten(0, 1).t()).reshape(rows * count, 2 * width)
        # Picks of -1 are elsewhere: they add nothing.
        chosen = picks.numpy()
        places = (np.arange(rows)[:, None] * count + chosen)[chosen >= 0]
        shares = weights.numpy()[chosen >= 0]
        hidden = np.zeros((rows * count, width), gate_up.dtype)
        hidden[places] = self._activated(gate_up.take(places, 0), shares[:, None], experts, limit)
        return torch.mm(torch.from_numpy(hidden.reshape(rows, -1)), experts.w2.transpose(1, 2).flatten(0, 1))

    @override
    def shared_expert(self, x: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """Few rows: half of the reference's time."""
        if experts.w13 is None or experts.w2 is None or x.shape[0] > FEW_ROWS:
            return super().shared_expert(x, experts, limit)
        hidden = product(self._input(x, experts), experts.w13[0].t())
        hidden = self._activated(hidden, None, experts, limit)
        return torch.from_numpy(product(hidden, experts.w2[0].t()))

    def _one_by_one(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        assert experts.w13 is not None
        assert experts.w2 is not None
        given, w13, w2 = self._input(x, experts), experts.w13.numpy(), experts.w2.numpy()
        shares = weights.numpy()
        total = np.zeros(given.shape, given.dtype)
        for row, chosen in enumerate(picks.tolist()):
            for place, expert in enumerate(chosen):
                if expert >= 0:
                    gate_up = given[row].dot(w13[expert].T)
                    hidden = self._activated(gate_up[None], shares[row, place], experts, limit)
                    total[row] += hidden[0].dot(w2[expert].T)
        return torch.from_numpy(total)

    def _input(self, x: Tensor, experts: PackedExperts) -> Floats:
        """The array of `_expert_input`."""
        array: Floats = self._expert_input(x, experts).numpy()
        return array

    def _activated(self, gate_up: Floats, weight: Floats | None, experts: PackedExperts, limit: float) -> Floats:
        """The input of w2 from gate_up [n, 2 I] and weights [n, 1], as `swiglu` and `_expert_input` make it."""
        width = gate_up.shape[1] // 2
        gate = np.minimum(gate_up[:, :width], limit)
        hidden = np.exp(-gate)
        hidden += 1
        np.divide(gate, hidden, hidden)
        hidden *= np.minimum(np.maximum(gate_up[:, width:], -limit), limit)
        if weight is not None:
            hidden *= weight
        if self.dtype == self.wide and not experts.round_group:
            return hidden
        return self._input(torch.from_numpy(hidden), experts)
