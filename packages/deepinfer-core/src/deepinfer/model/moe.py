"""The MoE feed-forward of one layer: routed experts and one shared expert."""

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import RouteSettings
from deepinfer.model.config import ModelConfig
from deepinfer.model.weights import Weights


class MoE:
    """`prefix`.{gate, experts, shared_experts}; with `hashed` the gate looks experts up by token id (V4)."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, prefix: str, *, hashed: bool) -> None:
        wide = ops.precision.wide
        vision_bias = config.family == "deepseek_v41"
        self.ops = ops
        self.limit = config.swiglu_limit
        self.settings = RouteSettings(config.top_k, config.normalize_top_k, config.routed_scale)
        self.gate = weights.vector(f"{prefix}.gate.weight", wide)
        self.picks = weights.vector(f"{prefix}.gate.tid2eid", torch.int64) if hashed else None
        self.bias = None if hashed else weights.vector(f"{prefix}.gate.bias", wide)
        self.image_bias = weights.vector(f"{prefix}.gate.bias_vl", wide) if vision_bias else None
        self.experts = weights.experts(f"{prefix}.experts", config.experts)
        self.shared = weights.expert(f"{prefix}.shared_experts")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return y [T, D] for normed rows x [T, D]."""
        picks = None if self.picks is None else self.picks.index_select(0, batch.token_ids)
        bias = self.bias
        if batch.image_rows is not None and self.image_bias is not None and bias is not None:
            bias = torch.where(batch.image_rows.unsqueeze(1), self.image_bias, bias)
        picks, shares = self.ops.route(x, self.gate, bias, picks, self.settings)
        routed = self.ops.experts(x, picks, shares, self.experts, self.limit)
        return self.ops.combine(routed, self.ops.shared_expert(x, self.shared, self.limit))
