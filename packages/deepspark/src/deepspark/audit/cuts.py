"""Cuts to put through the audit: owns ways to choose verified lengths, right and wrong, each with what it sees.

Which rule stays exact under which is `admissibility`'s claim; `table` checks it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspark.admissibility import Sees
from deepspark.audit.blocks import CutView
from deepspark.schedule import algorithm_one, allocate, choose_budget, survival

__all__ = ["BestOfCurrent", "FixedLength", "LookAhead", "OwnProbability", "Threshold", "TopOfCurrent", "WalkOfCurrent"]

Floats = NDArray[np.float64]


def _current(views: Sequence[CutView]) -> Floats:
    return survival(np.stack([view.conf for view in views]))


@dataclass(frozen=True)
class FixedLength:
    """Verify `length` drafts, whatever they are."""

    length: int
    sees = Sees.PAST

    def __call__(self, views: list[CutView]) -> list[int]:
        """Return lengths."""
        return [self.length for _ in views]


@dataclass(frozen=True)
class Threshold:
    """Stop at the first confidence below `least`."""

    least: float
    sees = Sees.PAST

    def __call__(self, views: list[CutView]) -> list[int]:
        """Return lengths."""
        return [int(np.cumprod(view.conf >= self.least).sum()) for view in views]


@dataclass(frozen=True)
class WalkOfCurrent:
    """Algorithm 1 on current confidences."""

    step_ms: Floats
    sees = Sees.PAST

    def __call__(self, views: list[CutView]) -> list[int]:
        """Return lengths."""
        return [int(length) for length in algorithm_one(_current(views), self.step_ms).lengths]


@dataclass(frozen=True)
class TopOfCurrent:
    """A budget from outside, given to the largest current survivals."""

    budget: int
    sees = Sees.PAST

    def __call__(self, views: list[CutView]) -> list[int]:
        """Return lengths."""
        return [int(length) for length in allocate(_current(views), self.budget)]


@dataclass(frozen=True)
class BestOfCurrent:
    """WRONG with sampling rules: the best of all budgets on current confidences, which have seen the drafts they
    admit.
    """

    step_ms: Floats
    sees = Sees.BLOCK

    def __call__(self, views: list[CutView]) -> list[int]:
        """Return lengths."""
        current = _current(views)
        return [int(length) for length in allocate(current, choose_budget(current, self.step_ms).drafts)]


@dataclass(frozen=True)
class LookAhead:
    """WRONG with a fresh last row: admit a draft only if the NEXT confidence, which has seen it, is high."""

    least: float
    sees = Sees.DRAFT

    def __call__(self, views: list[CutView]) -> list[int]:
        """Return lengths."""
        return [self._length(view.conf) for view in views]

    def _length(self, conf: Floats) -> int:
        later = np.append(conf[1:] >= self.least, True)
        return int(np.cumprod(later).sum())


@dataclass(frozen=True)
class OwnProbability:
    """WRONG with a fresh last row: stop before a draft because of the draft itself (own probability, or a grammar)."""

    least: float
    sees = Sees.DRAFT

    def __call__(self, views: list[CutView]) -> list[int]:
        """Return lengths."""
        return [self._length(view) for view in views]

    def _length(self, view: CutView) -> int:
        own = np.array([view.Q[k, token] for k, token in enumerate(view.x)])
        return int(np.cumprod(own >= self.least).sum())
