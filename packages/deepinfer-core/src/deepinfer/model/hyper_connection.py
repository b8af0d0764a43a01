"""The hyper-connection around one sub-layer: how it reads the residual streams and writes back."""

from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.stream_mixing import Mix, MixSettings
from deepinfer.accelerator.parameters import MixParameters
from deepinfer.model.config import ModelConfig
from deepinfer.model.weights import Weights


def mix_settings(config: ModelConfig) -> MixSettings:
    """The constants of the mixing ops."""
    return MixSettings(config.sinkhorn_iters, config.hc_eps, config.eps)


def mix_parameters(weights: Weights, ops: Ops, name: str) -> MixParameters:
    """Read `name`_fn, `name`_base and `name`_scale."""
    wide = ops.precision.wide
    return MixParameters(*(weights.vector(f"{name}_{part}", wide) for part in ("fn", "base", "scale")))


class HyperConnection:
    """Mixing of one sub-layer (`hc_attn_*` or `hc_ffn_*`) with the norm in front of it."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, prefix: str, part: str) -> None:
        self.ops = ops
        self.shifted = config.hc_shifted
        self.settings = mix_settings(config)
        self.parameters = mix_parameters(weights, ops, f"{prefix}.hc_{part}")
        self.norm = weights.vector(f"{prefix}.{part}_norm.weight", ops.precision.wide)

    def enter(self, streams: Tensor, incoming: Tensor) -> tuple[Tensor, Mix]:
        """The sub-layer's normed input [T, D] and its mixing; V4.1 reads with `incoming`, the previous mixing's pre."""
        return self.ops.mix_in(streams, incoming if self.shifted else None, self.parameters, self.settings, self.norm)

    def leave(self, streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
        """The streams after the sub-layer's output y [T, D] is written back."""
        return self.ops.mix_out(streams, y, mix)
