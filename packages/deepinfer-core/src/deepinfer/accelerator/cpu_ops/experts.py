"""Mixture of experts on the CPU: rows sorted by expert, so that an expert costs its two products."""

from dataclasses import replace
from itertools import pairwise
from typing import override

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import FEW_PRODUCTS, FEW_ROWS, Floats, HostOps, Ints, pick, product
from deepinfer.accelerator.cpu_ops.formats import round_inputs
from deepinfer.accelerator.ops.expert_routing import ExpertRoutingOps, PackedExperts, RouteSettings
from deepinfer.accelerator.parameters import StoredExpert


class CpuExperts(HostOps, ExpertRoutingOps):
    """Routing of few rows in numpy, experts on rows that lie together."""

    @override
    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, picks: Tensor | None, settings: RouteSettings
    ) -> tuple[Tensor, Tensor]:
        """Few rows: a third of the reference's time."""
        if x.shape[0] * gate.numel() > FEW_PRODUCTS:
            return super().route(x, gate, bias, picks, settings)
        scores = np.sqrt(np.logaddexp(0, self.array(x).dot(self.held(gate).T)))
        if picks is None:
            ranked = scores if bias is None else scores + bias.numpy()
            chosen: Ints = (-ranked).argsort(1)[:, : settings.top_k]
            picks = torch.from_numpy(chosen)
        else:
            chosen = picks.numpy()
        weights = pick(scores, chosen)
        if settings.normalise and settings.top_k > 1:
            weights /= np.add.reduce(weights, 1, keepdims=True) + 1e-20
        weights *= settings.scale
        return picks, torch.from_numpy(weights)

    @override
    def pack_experts(self, experts: list[StoredExpert]) -> PackedExperts:
        """Lay out each expert's matrices so that rows times them is a product of contiguous arrays."""
        packed = super().pack_experts(experts)
        if packed.w13 is None or packed.w2 is None:
            return packed
        w13, w2 = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (packed.w13, packed.w2))
        return replace(packed, w13=w13, w2=w2)

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """Rows sorted by expert: two products for each; the reference makes ten calls for each."""
        if experts.w13 is None or experts.w2 is None:
            return super().experts(x, picks, weights, experts, limit)
        chosen = picks.numpy().reshape(-1)
        order = chosen.argsort(kind="stable")
        bounds = chosen.take(order).searchsorted(np.arange(experts.count + 1)).tolist()
        given = self._input(x, experts).take(order // picks.shape[1], 0)
        shares = weights.numpy().reshape(-1).take(order)[:, None]
        hidden = self._activated(self._each(given, experts.w13, bounds), shares, experts, limit)
        # Picks of -1 sort in front of the first bound, where the result stays 0.
        unsorted = np.empty((len(order), x.shape[1]), given.dtype)
        unsorted[order] = self._each(hidden, experts.w2, bounds)
        return torch.from_numpy(np.add.reduce(unsorted.reshape(*picks.shape, x.shape[1]), 1))

    @override
    def shared_expert(self, x: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """Few rows: half of the reference's time."""
        if experts.w13 is None or experts.w2 is None or x.shape[0] > FEW_ROWS:
            return super().shared_expert(x, experts, limit)
        hidden = product(self._input(x, experts), experts.w13[0].t())
        hidden = self._activated(hidden, None, experts, limit)
        return torch.from_numpy(product(hidden, experts.w2[0].t()))

    @override
    def _expert_input(self, x: Tensor, experts: PackedExperts) -> Tensor:
        wide = self.widen(self.narrow(x))
        return round_inputs(wide, experts.round_group) if experts.round_group else wide

    def _input(self, x: Tensor, experts: PackedExperts) -> Floats:
        """The array of `_expert_input`."""
        array: Floats = self._expert_input(x, experts).numpy()
        return array

    @np.errstate(over="ignore")  # of exp: silu is then 0, as it should be
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

    def _each(self, x: Floats, weights: Tensor, bounds: list[int]) -> Floats:
        """Rows bounds[e] .. bounds[e + 1] of x [n, K] times expert e of weights [E, N, K], transposed -> [n, N]."""
        matrices = self.held(weights).transpose(0, 2, 1)
        out = np.empty((x.shape[0], matrices.shape[2]), x.dtype)
        out[: bounds[0]] = 0
        limit = FEW_PRODUCTS // matrices[0].size
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if 0 < end - start <= limit:
                np.dot(x[start:end], matrices[expert], out[start:end])
            elif start < end:
                torch.mm(torch.from_numpy(x[start:end]), weights[expert].t(), out=torch.from_numpy(out[start:end]))
        return out
