"""Experts on the device: FP4 routed experts and FP8 or FP4 shared ones through the wheel's kernels.

Experts in other formats are the reference.
"""

from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import PackedExperts, RouteSettings
from deepinfer.accelerator.parameters import StoredExpert, StoredWeight
from deepinfer_kernels_cuda.kernel_ops import KernelOps, columns
from deepinfer_kernels_cuda.kernels.experts import BINS, down, gate_up, schedule
from deepinfer_kernels_cuda.kernels.gate import MOST_EXPERTS, MOST_PICKS, route
from deepinfer_kernels_cuda.kernels.packing import STEP, PackedWeight, fill_weight, new_weight
from deepinfer_kernels_cuda.kernels.products import ROW_TILE, activate, linear, products
from deepinfer_kernels_cuda.kernels.rounding import round_rows
from deepinfer_kernels_cuda.kernels.sums import combine

WIDEST = 8192
"""Columns of a gate: 32 parts of 256."""


@dataclass(frozen=True)
class KernelExperts(PackedExperts):
    """Experts as the kernels read them: `up` holds gate rows, then up rows, each padded to `ROW_TILE`."""

    up: PackedWeight | None = None
    down: PackedWeight | None = None


class ExpertKernels(KernelOps, Ops):
    """`route`, `experts`, `shared_expert` and `combine`."""

    @override
    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, picks: Tensor | None, settings: RouteSettings
    ) -> tuple[Tensor, Tensor]:
        takes = gate.shape[0] <= MOST_EXPERTS and settings.top_k <= MOST_PICKS and gate.shape[1] <= WIDEST
        if self.no_kernels or not takes or x.dtype != self.dtype or x.stride(1) != 1:
            return super().route(x, gate, bias, picks, settings)
        given = None if picks is None else picks.contiguous()
        shift = None if bias is None else bias.contiguous()
        constants = (settings.top_k, settings.normalise and settings.top_k > 1, settings.scale)
        return route(x, gate, shift, given, constants, steady=self.steady)

    @override
    def pack_experts(self, experts: list[StoredExpert]) -> PackedExperts:
        return self._packed_experts(experts) or super().pack_experts(experts)

    def _packed_experts(self, experts: list[StoredExpert]) -> KernelExperts | None:
        """Return the experts as kernels take them, or None where they do not."""
        first = experts[0].w1
        alike: list[StoredWeight] = [weight for expert in experts for weight in (expert.w1, expert.w3)]
        downs = [expert.w2 for expert in experts]
        if not (self.kernels_take(alike) and self.kernels_take(downs)):
            return None
        if len(experts) > 1 and not (first.is_fp4 and downs[0].is_fp4 and len(experts) < BINS):
            return None
        width, hidden = first.data.shape[0], downs[0].data.shape[0]
        padded = -(-width // ROW_TILE) * ROW_TILE
        up = new_weight(len(experts), 2 * padded, columns(first), self.device, fp4=first.is_fp4)
        memory = new_weight(len(experts), -(-hidden // ROW_TILE) * ROW_TILE, width, self.device, fp4=downs[0].is_fp4)
        for index, expert in enumerate(experts):
            fits = fill_weight(up, index, 0, [expert.w1]) and fill_weight(up, index, padded, [expert.w3])
            if not (fits and fill_weight(memory, index, 0, [expert.w2])):
                return None
        group = first.block if self.precision.round_inputs else 0
        lower = PackedWeight(memory.words, memory.factors, hidden, width, memory.fp4)
        return KernelExperts(None, None, (), group, len(experts), up=up, down=lower)

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        if not isinstance(experts, KernelExperts):
            return super().experts(x, picks, weights, experts, limit)
        assert experts.up is not None
        assert experts.down is not None
        picks, weights = picks.contiguous(), weights.contiguous()
        plan = schedule(picks, experts.count, steady=self.steady)
        rows = round_rows(self.narrow(x), experts.round_group, experts.up.steps * STEP)
        hidden = gate_up(rows, weights, experts.up, plan, limit, experts.round_group)
        return down(hidden, picks, experts.down, plan)

    @override
    def shared_expert(self, x: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        if not isinstance(experts, KernelExperts):
            return super().shared_expert(x, experts, limit)
        assert experts.up is not None
        assert experts.down is not None
        rows = round_rows(self.narrow(x), experts.round_group, experts.up.steps * STEP)
        hidden = activate(products(rows, experts.up, steady=self.steady), limit, experts.round_group)
        return linear(hidden, experts.down, torch.float32, steady=self.steady)

    @override
    def combine(self, routed: Tensor, shared: Tensor) -> Tensor:
        same = routed.shape == shared.shape and routed.dtype == shared.dtype == torch.float32
        if self.no_kernels or not (same and routed.is_contiguous() and shared.is_contiguous()):
            return super().combine(routed, shared)
        return combine(routed, shared)
