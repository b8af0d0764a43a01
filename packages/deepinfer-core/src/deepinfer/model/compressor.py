"""The compressor of a layer that owns compressed KV: pools tokens into latents, one per `ratio` tokens."""

from torch import Tensor

from deepinfer.accelerator.batch import Batch, TailView
from deepinfer.accelerator.ops import Ops
from deepinfer.model.config import ModelConfig
from deepinfer.model.weights import Weights


class Compressor:
    """`prefix`.{wkv, wgate, norm, ape}: ratio 1 has no gate, V4 adds a position bias `ape` to the gate."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, prefix: str, ratio: int) -> None:
        wide = ops.precision.wide
        self.ops = ops
        self.ratio = ratio
        self.eps = config.eps
        self.values = weights.linear(f"{prefix}.wkv")
        self.gate = weights.linear(f"{prefix}.wgate") if ratio > 1 else None
        self.bias = weights.vector(f"{prefix}.ape", wide) if config.family == "deepseek_v4" else None
        self.norm = weights.vector(f"{prefix}.norm.weight", wide)

    def forward(self, x: Tensor, batch: Batch, tail: TailView | None) -> Tensor:
        """Latents [N, C] (normed, neither rotated nor rounded) of the groups that end in x [T, D]'s rows."""
        values = self.ops.linear(x, self.values, wide=True)
        scores = None if self.gate is None else self.ops.linear(x, self.gate, wide=True)
        if scores is not None and self.bias is not None:
            scores = scores + self.bias.index_select(0, batch.positions % self.ratio)
        return self.ops.rms_norm(self.ops.compress(values, scores, batch, self.ratio, tail), self.norm, self.eps)
