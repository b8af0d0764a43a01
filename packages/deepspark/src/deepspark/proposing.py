"""Proposing: owns the sequential half of drafting, from a backbone's parallel rows to drafts, their laws and
confidences.

The parallel half is a `DraftBackbone`; how many drafts are verified is `schedule`'s decision.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspark.backbone import BlockRows, DraftBackbone
from deepspark.errors import InputError
from deepspark.heads import SequentialHeads
from deepspark.noise import match_gumbel
from deepspark.transform import argmax
from deepspark.verify import draw

__all__ = [
    "Blocks",
    "Chooser",
    "Drafts",
    "HeadedSource",
    "Law",
    "by_argmax",
    "by_match_noise",
    "by_uniforms",
    "propose",
]

Law = Callable[[Tensor, int], Tensor]
"""From draft logits [R, V] at an offset to the law q [R, V] drafts are drawn from: the engine's own sampling transform.
"""

Chooser = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""From the law q [R, V] at an offset to the drafts [R] and the law they were really drawn from (None: one-hot)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where to draft: anchors [R] tokens, their absolute positions [R], the sequences' slots [R]; all int64."""

    anchors: Tensor
    positions: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """The proposed blocks of R requests.

    tokens: [R, g].  Q: [R, g, V], the laws they were drawn from, stored now because recomputing them in another batch
    gives other numbers; None when each was certain.  confidence_logits: [R, g] before calibration, None without that
    head.
    logits: [R, g, V], with Markov bias.
    """

    tokens: Tensor
    Q: Tensor | None
    confidence_logits: Tensor | None
    logits: Tensor


def by_uniforms(uniforms: Tensor) -> Chooser:
    """Draw by inverse CDF with uniforms [R, g] (`noise.draft_uniforms`): the chain and block rules' way."""

    def choose(law: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        return draw(law, uniforms[:, offset]), law

    return choose


def by_argmax() -> Chooser:
    """Take the likeliest token: q is one-hot, every cut is admissible, acceptance is p(argmax q)."""

    def choose(law: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        return argmax(law), None

    return choose


def by_match_noise(seeds: Tensor, positions: Tensor) -> Chooser:
    """Draw with the Gumbel noise that plain decoding will use at the same place: the match rule's way.

    seeds, positions: [R], positions of the anchors; the draft at offset k stands k + 1 behind its anchor.
    """

    def choose(law: Tensor, offset: int) -> tuple[Tensor, Tensor | None]:
        return argmax(law.log() + match_gumbel(seeds, positions + offset + 1, law.shape[-1])), None

    return choose


def propose(rows: BlockRows, heads: SequentialHeads, anchors: Tensor, law: Law, choose: Chooser) -> Drafts:
    """Chain the block's rows: x_1 ~ q_1(.|anchor), x_2 ~ q_2(.|x_1), ...; anchors [R].

    A confidence is computed before its draft is drawn and never sees it.
    """
    requests, width = rows.normed.shape[:2]
    if anchors.shape != (requests,):
        raise InputError(
            f"anchors must be [{requests}] as the block has that many requests, got {tuple(anchors.shape)}"
        )
    state = heads.markov_head.start(rows.normed[:, 0])
    previous = anchors
    tokens, laws, scores, logits = [], [], [], []
    for k in range(width):
        features = heads.markov_head.embed(previous)
        bias, state = heads.markov_head.advance(features, rows.normed[:, k], state)
        score = heads.confidence_logits(rows.hidden[:, k], rows.normed[:, k], features)
        row = rows.base[:, k] + bias
        previous, drawn_from = choose(law(row, k), k)
        tokens.append(previous)
        logits.append(row)
        laws.append(drawn_from)
        scores.append(score)
    known_laws = [each for each in laws if each is not None]
    known_scores = [each for each in scores if each is not None]
    return Drafts(
        tokens=torch.stack(tokens, 1),
        Q=torch.stack(known_laws, 1) if known_laws else None,
        confidence_logits=torch.stack(known_scores, 1) if known_scores else None,
        logits=torch.stack(logits, 1),
    )


class HeadedSource:
    """A backbone and its heads as one source of drafts (`drafter.DraftSource`)."""

    def __init__(self, backbone: DraftBackbone, heads: SequentialHeads) -> None:
        self.backbone = backbone
        self.heads = heads

    @property
    def width(self) -> int:
        """Drafts of a step."""
        return self.backbone.block_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.backbone.vocab_size

    @torch.no_grad()
    def draft(self, block: Blocks, law: Law, choose: Chooser) -> Drafts:
        """Draft one block for each sequence."""
        rows = self.backbone.draft_block(block.anchors, block.positions, block.slots)
        return propose(rows, self.heads, block.anchors, law, choose)
