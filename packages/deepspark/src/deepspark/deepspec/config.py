"""Configuration of a DeepSpec-style drafter: owns its fields, their meaning and what refuses to fit a target.

Tensors are checked by `checkpoint`, which reads them.  Source: DSpark specification, sections 1.1 to 1.4.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Literal

from deepspark.errors import CheckpointError
from deepspark.heads import ConfidenceReads, HeadsConfig, MarkovKind

__all__ = ["DeepSpecConfig", "Family", "TargetFacts"]

Family = Literal["qwen3", "gemma"]


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a drafter must know of its target; `attention_window` is 0 for full attention."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    attention_window: int = 0


@dataclass(frozen=True, slots=True)
class DeepSpecConfig:
    """A drafter's architecture.  Field names are those of its config.json.

    target_layer_ids: the taps; the OUTPUT of each layer (-1: the embedding), concatenated in this order.
    mask_token_id: the noise token of block rows 1..g-1.  attention_window: context positions a block sees (0: all).
    family 'gemma': scaled embeddings, unweighted norm on V, optional K = V, attention scale 1, four norms a layer, a
    layer scalar, and a soft cap on base logits before the Markov bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    markov_rank: int = 256
    markov_head_type: MarkovKind = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_reads: ConfidenceReads = "normed"
    confidence_bias: bool = True
    attention_window: int = 0
    family: Family = "qwen3"
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        def refuse(what: str) -> None:
            raise CheckpointError(f"drafter configuration: {what}")

        if self.block_size < 1:
            refuse(f"block_size must be >= 1, got {self.block_size}")
        if not self.target_layer_ids:
            refuse("target_layer_ids (the taps) is empty; the drafter reads at least one target layer")
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            refuse(f"target_layer_ids (the taps) repeat: {list(self.target_layer_ids)}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            refuse(f"mask_token_id (the noise token) must lie in 0..{self.vocab_size - 1}, got {self.mask_token_id}")
        if self.num_attention_heads % self.num_key_value_heads:
            refuse(f"{self.num_attention_heads} query heads do not divide into {self.num_key_value_heads} key heads")
        if self.head_dim % 2:
            refuse(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.family not in ("qwen3", "gemma"):
            refuse(f"family must be 'qwen3' or 'gemma', got {self.family!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "DeepSpecConfig":
        """Build from a config.json's dictionary; unknown keys are left alone, a missing one is a CheckpointError."""
        known = {field.name: field for field in fields(cls)}
        missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
        if missing:
            raise CheckpointError(
                f"drafter configuration lacks {', '.join(missing)}; is this the drafter's own config.json?"
            )
        chosen = {name: values[name] for name in known if name in values}
        chosen["target_layer_ids"] = tuple(chosen["target_layer_ids"])  # type: ignore[arg-type]
        return cls(**chosen)  # type: ignore[arg-type]

    @property
    def heads(self) -> HeadsConfig:
        """The sequential heads of this drafter."""
        return HeadsConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            markov_kind=self.markov_head_type,
            markov_rank=self.markov_rank,
            has_confidence=self.enable_confidence_head,
            confidence_reads=self.confidence_reads,
            confidence_with_markov=self.confidence_head_with_markov,
            confidence_bias=self.confidence_bias,
        )

    def check_target(self, target: TargetFacts) -> None:
        """Raise CheckpointError, naming the field, where this drafter was not made for `target`.

        Such a drafter would run, at a few per cent acceptance.
        """
        last = target.num_hidden_layers - 1
        outside = [layer for layer in self.target_layer_ids if not -1 <= layer < last]
        if outside:
            raise CheckpointError(
                f"taps {outside} do not exist in the target: expected layers -1..{last - 1} of its {last + 1} (the "
                "last layer is not allowed, its output is only kept normed); this drafter was made for another target"
            )
        if self.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"width: the drafter has hidden_size {self.hidden_size}, the target {target.hidden_size}"
            )
        if self.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"vocabulary: the drafter has {self.vocab_size} tokens, the target {target.vocab_size}"
            )
        if target.attention_window and self.attention_window != target.attention_window:
            raise CheckpointError(
                f"attention_window must equal the target's {target.attention_window}, got {self.attention_window}"
            )
