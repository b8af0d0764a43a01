"""Mixture of experts: who works on a row (`route`), the work (`experts`), and the sum (`combine`).

Rank-blind: picks are local expert numbers, -1 = elsewhere; moving rows between ranks is `Parallel`'s.
Source: the section on MoE of the model card.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.accelerator.ops.number_formats import fp8_round
from deepinfer.accelerator.ops.projection import EXPAND_LIMIT, ProjectionOps, dequantise
from deepinfer.accelerator.parameters import StoredExpert, StoredWeight


@dataclass(frozen=True)
class RouteSettings:
    """top_k picks; weights are normalised to sum 1 (never for top_k 1), then scaled."""

    top_k: int
    normalise: bool
    scale: float


@dataclass(frozen=True)
class PackedExperts:
    """Experts as the reference multiplies them: stacked and wide, or a list that is dequantised one by one.

    w13 [E, 2 I, D] (gate rows, then up rows), w2 [E, D, I] (laid out as [D, E, I]); `stored` instead of both for large
    ones.
    round_group: see `PackedLinear`.
    """

    w13: Tensor | None
    w2: Tensor | None
    stored: tuple[StoredExpert, ...]
    round_group: int
    count: int


class ExpertRoutingOps(ProjectionOps):
    """Reference experts: one after the other, in the wide dtype."""

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, picks: Tensor | None, settings: RouteSettings
    ) -> tuple[Tensor, Tensor]:
        """Choose experts: picks int64 [T, k] in descending order and their weights [T, k], wide.

        x [T, D], gate [E, D] wide.  s = sqrt(softplus(x gate^T)); picks = top k of s + bias (bias [E], or [T, E] where
        rows differ), or `picks` as given (hash layers).  weights = s[picks] / (sum + 1e-20) * scale.
        """
        scores = functional.softplus(functional.linear(self.widen(x), gate)).sqrt_()
        if picks is None:
            picks = torch.topk(scores if bias is None else scores + bias, settings.top_k, dim=1).indices
        weights = scores.gather(1, picks)
        if settings.normalise and settings.top_k > 1:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return picks, weights * settings.scale

    def pack_experts(self, experts: list[StoredExpert]) -> PackedExperts:
        """Make experts ready for `experts` and `shared_expert`."""
        first = experts[0].w1
        group = first.block if first.scale is not None and self.precision.round_inputs else 0
        elements = sum(w.elements for w in (first, experts[0].w2, experts[0].w3))
        if elements > EXPAND_LIMIT:
            moved = tuple(StoredExpert(self.stored(e.w1), self.stored(e.w2), self.stored(e.w3)) for e in experts)
            return PackedExperts(None, None, moved, group, len(experts))
        w13 = torch.stack([torch.cat((self._widened(e.w1), self._widened(e.w3))) for e in experts])
        w2 = torch.stack([self._widened(e.w2) for e in experts], 1).transpose(0, 1)
        return PackedExperts(w13, w2, (), group, len(experts))

    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """Sum over the local picks of expert(x, weight): x [T, D], picks and weights [T, k] -> [T, D], wide.

        expert(x, w) = (w * silu(min(x w1^T, limit)) * clamp(x w3^T, -limit, limit)) w2^T; the weight multiplies before
        w2 and before the rounding of its input.  Picks of -1 add nothing.  The rows of an expert are counted on the
        host, so this op's inner shapes are not static.
        """
        total = torch.zeros(x.shape, dtype=self.wide, device=x.device)
        for expert in range(experts.count):
            rows, place = torch.nonzero(picks == expert, as_tuple=True)
            if rows.numel():
                out = self._expert(x[rows], weights[rows, place].unsqueeze(1), experts, expert, limit)
                total.index_add_(0, rows, out)
        return total

    def shared_expert(self, x: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """The expert that every row passes, without a weight: x [T, D] -> [T, D], wide."""
        return self._expert(x, None, experts, 0, limit)

    def combine(self, routed: Tensor, shared: Tensor) -> Tensor:
        """Add the routed sum (over all ranks) and the shared expert's output; one rounding to the activation dtype."""
        return self.narrow(routed + shared)

    def _expert(self, x: Tensor, weight: Tensor | None, experts: PackedExperts, expert: int, limit: float) -> Tensor:
        """One expert on rows x [n, D] with weights [n, 1] -> [n, D] wide."""
        if experts.w13 is not None and experts.w2 is not None:
            w13, w2 = experts.w13[expert], experts.w2[expert]
        else:
            stored = experts.stored[expert]
            w13 = self.widen(torch.cat((dequantise(stored.w1), dequantise(stored.w3))))
            w2 = self.widen(dequantise(stored.w2))
        hidden = swiglu(functional.linear(self._expert_input(x, experts), w13), weight, limit)
        return functional.linear(self._expert_input(hidden, experts), w2)

    def _expert_input(self, x: Tensor, experts: PackedExperts) -> Tensor:
        wide = self.widen(self.narrow(x))
        return fp8_round(wide, experts.round_group) if experts.round_group else wide

    def _widened(self, weight: StoredWeight) -> Tensor:
        return self.tensor(dequantise(weight), self.wide)


def swiglu(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """Weight * silu(min(gate, limit)) * clamp(up, -limit, limit): gate_up [n, 2 I], weight [n, 1] -> [n, I]."""
    gate, up = gate_up.chunk(2, dim=1)
    hidden = functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return hidden if weight is None else hidden * weight
