"""Facts that layers derive from the configuration: rotation tables, and when the index leaves nothing out."""

import math

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Rope
from deepinfer.model.config import ModelConfig, RopeConfig


def make_ropes(config: RopeConfig, device: torch.device) -> tuple[Rope, Rope]:
    """Return the plain table (window-only layers, draft stages) and the compressed one (ratios above 0)."""
    return (
        Rope("plain", config.dim, _frequencies(config.theta, config.dim).to(device)),
        Rope("compressed", config.dim, _stretched(config).to(device)),
    )


def _frequencies(theta: float, dim: int) -> Tensor:
    """theta^(-2t/dim) for t = 0 .. dim/2 - 1, in float32 as the model was trained."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _stretched(config: RopeConfig) -> Tensor:
    """YaRN over the compressed base: low frequencies are divided by `factor`, high ones kept, a ramp between.

    The magnitude of cos and sin is not scaled. Source: the section on RoPE of the model card.
    """

    def turning(rotations: float) -> float:
        """The pair index whose frequency makes `rotations` turns over the original length."""
        ratio = config.original_positions / (2 * math.pi * rotations)
        return config.dim * math.log(ratio) / (2 * math.log(config.compressed_theta))

    low = max(math.floor(turning(config.beta_fast)), 0)
    high = min(math.ceil(turning(config.beta_slow)), config.dim - 1)
    ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = _frequencies(config.compressed_theta, config.dim)
    return plain * (1 - ramp) + plain / config.factor * ramp


def dense_ratios(config: ModelConfig, max_context: int) -> tuple[int, ...]:
    """The compression ratios at which every visible entry is attended to while no context exceeds `max_context`.

    Ratio 128 has no index; the others have one that leaves nothing out below `index_top_k` entries, provided that the
    candidate blocks leave nothing out either.
    """

    def nothing_left_out(ratio: int) -> bool:
        entries = max_context // ratio
        blocks = -(-entries // config.candidate_block_size)
        restricted = any(layer.candidates and layer.ratio == ratio for layer in config.layers)
        return entries <= config.index_top_k and (not restricted or blocks <= config.candidate_blocks)

    return tuple(ratio for ratio in config.ratios if ratio == 128 or nothing_left_out(ratio))
