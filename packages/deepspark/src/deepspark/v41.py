"""DeepSeek-V4.1's drafter heads: owns their names and formats in the released checkpoints, and what must fit the
target.

The draft stages themselves (blocks, taps, context rings) are model code of an engine, reached as a `DraftBackbone`.
Source: model specification, section 11, and DSpark specification, section 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspark.errors import CheckpointError
from deepspark.heads import HeadsConfig, SequentialHeads

__all__ = ["V41DraftConfig", "load_heads"]

_NAMES = {
    "markov_head.embed.weight": "markov_head.markov_w1.weight",
    "markov_head.head.weight": "markov_head.markov_w2.weight",
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_head.proj.weight": "confidence_head.proj.weight",
}
"""Checkpoint name behind `mtp.S.` (V4.1, then V4's 0731 release) to ours."""


@dataclass(frozen=True, slots=True)
class V41DraftConfig:
    """The drafter's part of `text_config`; block_size is the trained width, an engine may draft fewer."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    num_stages: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int

    @classmethod
    def from_text_config(cls, values: Mapping[str, object]) -> "V41DraftConfig":
        """Read a V4.1 `text_config`; raise CheckpointError naming what is missing or cannot be."""
        names = {
            "num_hidden_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "vocab_size": "vocab_size",
            "num_stages": "num_nextn_predict_layers",
            "block_size": "dspark_block_size",
            "noise_token_id": "dspark_noise_token_id",
            "target_layer_ids": "dspark_target_layer_ids",
            "markov_rank": "dspark_markov_rank",
        }
        missing = [theirs for theirs in names.values() if theirs not in values]
        if missing:
            raise CheckpointError(
                f"text_config lacks {', '.join(missing)}: the checkpoint has no DSpark drafter; decode without drafts"
            )
        chosen = {ours: values[theirs] for ours, theirs in names.items()}
        chosen["target_layer_ids"] = tuple(chosen["target_layer_ids"])  # type: ignore[arg-type]
        config = cls(**chosen)  # type: ignore[arg-type]
        config._check()
        return config

    def _check(self) -> None:
        if self.block_size < 1 or self.num_stages < 1:
            raise CheckpointError(f"block size and stages must be >= 1, got {self.block_size} and {self.num_stages}")
        outside = [layer for layer in self.target_layer_ids if not 0 <= layer < self.num_hidden_layers]
        if outside or not self.target_layer_ids:
            raise CheckpointError(
                f"dspark_target_layer_ids (the taps) must be layers 0..{self.num_hidden_layers - 1}, "
                f"got {list(self.target_layer_ids)}"
            )
        if not 0 <= self.noise_token_id < self.vocab_size:
            raise CheckpointError(
                f"dspark_noise_token_id must lie in 0..{self.vocab_size - 1}, got {self.noise_token_id}"
            )

    @property
    def heads(self) -> HeadsConfig:
        """V4.1's heads: vanilla Markov, confidence on the row BEFORE the last norm and without bias."""
        return HeadsConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            markov_kind="vanilla",
            markov_rank=self.markov_rank,
            confidence_reads="prenorm",
            confidence_bias=False,
        )

    @property
    def last_stage(self) -> str:
        """The prefix of the stage that owns the heads and the last norm."""
        return f"mtp.{self.num_stages - 1}."


def load_heads(config: V41DraftConfig, tensors: Mapping[str, Tensor]) -> SequentialHeads:
    """Build the heads from checkpoint tensors (all names, or only those under `config.last_stage`); weights keep their
    dtype.

    Raises CheckpointError naming each head tensor that is missing or has another shape than the configuration says.
    """
    found: dict[str, Tensor] = {}
    for theirs, ours in _NAMES.items():
        tensor = tensors.get(config.last_stage + theirs)
        if tensor is not None:
            found[ours] = tensor
    with torch.device("meta"):
        heads = SequentialHeads(config.heads)
    wanted = heads.state_dict()
    problems = [f"lacks {config.last_stage}{name}" for name in wanted if name not in found]
    problems += [
        f"has {config.last_stage}{name} of shape {list(found[name].shape)}, expected {list(wanted[name].shape)}"
        for name in wanted.keys() & found.keys()
        if wanted[name].shape != found[name].shape
    ]
    if problems:
        raise CheckpointError(
            "the checkpoint "
            + "; ".join(sorted(problems))
            + f" (markov rank {config.markov_rank}, {config.num_stages} stages)"
        )
    heads.load_state_dict(found, assign=True)
    return heads.eval()
