"""What became of drafts: `DraftStep` of one request in one step, `DraftReport` of all its steps.

Counting and judging are the drafter's; this only adds up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Drafts of one request in one step: drawn, verified, accepted; `predicted`: accepted ones that were expected."""

    proposed: int
    verified: int
    accepted: int
    predicted: float


RESTED = DraftStep(0, 0, 0, 0.0)
"""Of a step without drafts because they would have cost more than they bring."""


@dataclass(frozen=True)
class DraftReport:
    """Drafts of one request, or of several.

    steps       those that ended in a choice of the request's tokens, with drafts or without
    rested      those without, because drafts would have cost more than they bring
    proposed, verified, accepted   drafts drawn, judged by the model, and among those that were right
    survival    at place j: of the steps that verified draft j, the share in which drafts 0 .. j were all accepted
    predicted   accepted drafts a step that the drafter expected; realised: those that came
    """

    steps: int = 0
    rested: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    survival: tuple[float, ...] = ()
    predicted: float = 0.0
    realised: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[DraftStep | None]) -> "DraftReport":
        """Add up the steps of a request; None = a step without drafts."""
        drafted = [step for step in steps if step is not None and step is not RESTED]
        accepted = sum(step.accepted for step in drafted)
        each = max(len(steps), 1)
        return cls(
            steps=len(steps),
            rested=sum(step is RESTED for step in steps),
            proposed=sum(step.proposed for step in drafted),
            verified=sum(step.verified for step in drafted),
            accepted=accepted,
            survival=tuple(_survival(drafted)),
            predicted=sum(step.predicted for step in drafted) / each,
            realised=accepted / each,
        )

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step: accepted drafts and the one that every step gives."""
        return 1 + self.realised


def _survival(steps: Sequence[DraftStep]) -> Iterable[float]:
    place = 0
    while judged := [step for step in steps if step.verified > place]:
        yield sum(step.accepted > place for step in judged) / len(judged)
        place += 1
