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
        self.down = weights.stacked([f"{prefix}.wkv", f"{prefix}.wgate"] if ratio > 1 else [f"{prefix}.wkv"])
        self.bias = weights.vector(f"{prefix}.ape", wide) if config.family == "deepseek_v4" else None
        self.norm = weights.vector(f"{prefix}.norm.weight", wide)

    def forward(self, x: Tensor, batch: Batch, tail: TailView | None) -> Tensor:
        """Latents [N, C] (normed, neither rotated nor rounded) of the groups that end in x [T, D]'s rows."""
        projected = self.ops.linear(x, self.down, wide=True)
        pooled = self.ops.compress(projected, self.bias, batch, self.ratio, tail)
        return self.ops.rms_norm(pooled, self.norm, self.eps) if pooled.shape[0] else pooled
