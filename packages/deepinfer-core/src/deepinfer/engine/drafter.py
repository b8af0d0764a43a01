"""The shape of a drafter: what the engine asks of speculative decoding, whoever provides it.

Heads, noise, verification and scheduling are the drafter's own; it is found by entry point and imports nothing of ours.
What passes is plain host numbers, in columns; only the drafter's backbone and the target's laws are tensors.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.config import DraftRule
from deepinfer.engine.plan import Plan
from deepinfer.engine.sequence import Integers

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The sequences that draw in the next step, as columns [R].

    states       names a sequence towards the drafter: its row in per-sequence memory
    anchors      its last token, which the target has not read yet, and `positions`, where that stands
    seeds        of its noise
    limits       most drafts that may be verified; 0 = it gets none, and counts as a row of the step all the same
    temperature, top_k, top_p, min_p   its sampling, in the order top_k, top_p, min_p
    """

    states: Integers
    anchors: Integers
    positions: Integers
    seeds: Integers
    limits: Integers
    temperature: Floats
    top_k: Integers
    top_p: Floats
    min_p: Floats


@dataclass(frozen=True, slots=True)
class Judged:
    """The J sequences of a step for which something was proposed, on their way from drawing to verification.

    plain        the step as the `Sampler` sees it: it draws for the others
    places [J]   theirs among the sequences that draw
    rows [J]     of the table
    counts [J]   drafts that were computed: a sequence has counts + 1 rows, which lie flat in what follows
    logits [N, V]  of these rows; `ruled` the same after penalties, bias, banned tokens and masks of each row
    tokens [N]   that plain decoding draws there, or the `laws` [N, V] that it draws from
    """

    plain: Plan
    places: Integers
    rows: Integers
    counts: Integers
    logits: Tensor
    ruled: Tensor
    tokens: Tensor | None
    laws: Tensor | None


class DraftVerdict(Protocol):
    """What verification gives: columns [R]."""

    @property
    def accepted(self) -> Integers:
        """How many of the verified drafts are accepted."""

    @property
    def tokens(self) -> Integers:
        """The one token behind them."""

    @property
    def predicted(self) -> Floats:
        """How many were expected to be accepted."""


class Drafter(Protocol):
    """Proposes tokens and judges them; owns the draft state of each sequence, by its state row."""

    @property
    def width(self) -> int:
        """W: drafts of a step."""

    @property
    def needs_laws(self) -> bool:
        """Whether `verify` reads the target's laws; else the tokens that plain decoding draws are enough."""

    @property
    def rests_for(self) -> int:
        """Steps for which it will propose nothing because drafts would lose, as far as it knows; 0 while it drafts."""

    def rest(self, requests: int) -> bool:
        """Whether it proposes nothing for the coming step of so many sequences; counts the step. False = ask it."""

    def set_costs(self, target_ms: dict[int, float], draft_ms: dict[int, float]) -> None:
        """Take measured times: of a target step by its rows, and of drafting by its sequences."""

    def rehearse(self, rows: DraftRows) -> None:
        """Draft for `rows` and forget it, to be timed."""

    def begin(self, state: int) -> None:
        """Give `state` to a new sequence."""

    def propose(self, rows: DraftRows, room: int) -> tuple[Integers, Integers] | None:
        """Return draft tokens [R, W] and how many [R] to verify, at most `room` in all; None = no drafts this time."""

    def verify(self, states: Integers, counts: Integers, drawn: Integers | None, laws: Tensor | None) -> DraftVerdict:
        """Judge the last proposals of `states` [R], of which the first `counts` [R] were computed.

        drawn [T] are the tokens that plain decoding draws at the sequences' rows, counts + 1 of each, flat; laws
        [T, V] the target's laws of the same rows.
        """

    def observe(self, rows: int, context_tokens: int, target_ms: float) -> None:
        """Learn how long a decoding step of the target took, over so many rows and so much context."""

    def observe_draft(self, requests: int, draft_ms: float) -> None:
        """Learn how long it took to propose for so many sequences that draft."""


DraftMode = Literal["auto", "on"]


class DrafterClass(Protocol):
    """What a drafter's entry point names."""

    def __call__(
        self, backbone: object, heads: object, *, num_states: int, rule: DraftRule, mode: DraftMode
    ) -> Drafter:
        """Make a drafter over the stages `backbone` and their head parameters, for up to `num_states` sequences."""
