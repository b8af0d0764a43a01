"""The shape of a drafter: what the engine asks of speculative decoding, whoever provides it.

Heads, noise, verification and scheduling are the drafter's own; it is found by entry point and imports nothing of ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one sequence, in order, laid behind its last token. Plain numbers, so that it can cross ranks."""

    draft_tokens: tuple[int, ...]


class Drafter(Protocol):
    """Proposes tokens and judges them; owns the draft state of each sequence, by its state row."""

    def propose(self, states: Sequence[int], hidden: Tensor, last_tokens: Sequence[int]) -> list[Proposal]:
        """Propose tokens for each sequence from the model's hidden rows [R, taps * D] at its last computed position."""
        ...

    def verify(self, logits: Tensor, proposals: Sequence[Proposal]) -> list[tuple[int, ...]]:
        """Return the tokens that each sequence gains (accepted drafts and one more) from logits [R + drafts, V]."""
        ...

    def forget(self, state: int) -> None:
        """Drop the draft state of a sequence that ended or was preempted."""
        ...
