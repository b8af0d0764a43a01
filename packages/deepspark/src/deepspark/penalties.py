"""Penalties and bans that depend on the emitted prefix: owns what each row of a block must be judged with.

The rest of sampling is `transform`'s.  Row i of a block stands behind drafts 1..i, so its counts include them: with the
counts of row 0 for all rows, text with drafts would differ from text without (DSpark specification, section 3.7).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspark.errors import ConfigError

__all__ = ["Penalties", "penalize", "row_counts", "row_minimum_mask"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """repetition: divides positive and multiplies negative logits of tokens seen in prompt or output (1 is off).
    presence, frequency: subtracted once, or per occurrence, for tokens of the output (0 is off).
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        if not self.repetition > 0:
            raise ConfigError(f"repetition must be > 0 (1 is off), got {self.repetition}")


def row_counts(output_counts: Tensor, x: Tensor) -> Tensor:
    """Return output counts [g+1, V] for the rows of one request's block.

    output_counts: [V] int64 of the tokens emitted so far, the anchor included; x: [g] drafts.  Row i adds x_1..x_i.
    """
    steps = torch.nn.functional.one_hot(x, output_counts.shape[0]).cumsum(0)
    return torch.cat([output_counts[None], output_counts + steps])


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, penalties: Penalties) -> Tensor:
    """Return penalised logits [T, V]: counts [T, V] of the output per row, in_prompt [V] bool."""
    emitted = counts > 0
    seen = emitted | in_prompt
    scaled = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - penalties.presence * emitted.to(logits.dtype) - penalties.frequency * counts.to(logits.dtype)


def row_minimum_mask(num_emitted: int, min_tokens: int, stop: Tensor, num_rows: int) -> Tensor:
    """Return allowed [num_rows, V]: stop tokens are banned in rows whose token would be one of the first `min_tokens`.

    num_emitted: tokens emitted before this step, the anchor included; stop: [V] bool.
    """
    early = num_emitted + torch.arange(num_rows, device=stop.device) < min_tokens
    return ~(early[:, None] & stop)
