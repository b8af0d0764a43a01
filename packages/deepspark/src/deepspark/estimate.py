"""Acceptance estimates: owns what was known of each slot's survivals some steps ago, and how true predictions came out.

Decisions from them are `scheduler`'s.  Everything here is old when it is used, so any use of it is admissible.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Outcome", "RealisedAcceptance", "SurvivalHistory", "SurvivalTruth"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PRIOR = 0.6
_DECAY = 0.98
_ENOUGH = 16.0
_ENOUGH_TRUTH = 1.0
_ENOUGH_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step came to: verified lengths [R] and accepted drafts [R] of the requests in `slots` [R].

    survivals: [R, g] as predicted by current confidences, None where the step did not draft; promised: the same where a
    draft was verified, else 0.
    """

    slots: Ints
    survivals: Floats | None
    promised: Floats | None
    lengths: Ints
    accepted: Ints

    @classmethod
    def of(cls, slots: Ints, survivals: Floats | None, lengths: Ints, accepted: Ints) -> "Outcome":
        """Lay out the counts of a step."""
        if survivals is None:
            return cls(slots, None, None, lengths, accepted)
        return cls(slots, survivals, survivals * first(lengths, survivals.shape[1]), lengths, accepted)


def first(counts: Ints, width: int) -> NDArray[np.bool_]:
    """Return [R, width] bool, true in the first counts[r] places of row r; column-major, as all decisions are."""
    return np.less.outer(np.arange(width), counts).T


class SurvivalHistory:
    """Survivals of every slot in the last drafting steps; a new sequence starts with the running mean of all.

    A small batch is averaged over several steps: one old block of one request says little about its next.
    """

    _DEPTH = 16

    def __init__(self, num_slots: int, width: int, lag: int) -> None:
        self.mean = _PRIOR ** np.arange(1, width + 1)
        self._size = self._DEPTH + lag
        self._rings = np.tile(self.mean[:, None], (self._size, 1, num_slots))
        self._drafted_at = [-lag - 1] * self._size
        self._lag = lag
        self._next = 0
        self._oldest = 0

    def begin(self, slot: int) -> None:
        """Forget what `slot` held before."""
        self._rings[:, :, slot] = self.mean

    def old(self, slots: Ints, step: int) -> Floats:
        """Return survivals [N, R, g] of the N latest drafting steps that lie `lag` steps or more before the one
        planned.
        """
        depth = min(max(_ENOUGH_REQUESTS // slots.size, 1), self._DEPTH)
        latest = self._next - 1
        while self._drafted_at[latest % self._size] > step - self._lag:
            latest -= 1
        fresh = latest - self._oldest + 1
        depth = min(depth, fresh) if fresh > 0 else depth
        if depth == 1:
            return np.take(self._rings[latest % self._size], slots, axis=1).T[None]
        entries = [(latest - back) % self._size for back in range(depth)]
        return np.take(self._rings[entries], slots, axis=2).transpose(0, 2, 1)

    def forget_older(self) -> None:
        """Let decisions rest on drafting steps from now on, as soon as one of them is old enough."""
        self._oldest = self._next

    def add(self, slots: Ints, survivals: Floats, step: int) -> None:
        """Keep the survivals [R, g] of the blocks that `step` drafted."""
        if slots.size == 0:
            return
        entry = self._rings[self._next % self._size]
        entry[:] = self._rings[(self._next - 1) % self._size]
        entry[:, slots] = survivals.T
        self._drafted_at[self._next % self._size] = step
        self._next += 1
        self.mean += (survivals.sum(axis=0) / slots.size - self.mean) * 0.05


class SurvivalTruth:
    """Realised over predicted survival per position, from verified rows, decaying; corrects what confidences
    promise.
    """

    def __init__(self, width: int) -> None:
        # Rows: predicted, realised; a start of equal counts says that predictions are true until many say otherwise.
        self._sums = np.full((2, width), _ENOUGH_TRUTH)
        self._note_ratio()

    def update(self, promised: Floats, accepted: Ints) -> None:
        """Count one step: predicted survivals [R, g] of verified rows, and accepted drafts [R]."""
        self._sums *= _DECAY
        self._sums[0] += promised.sum(axis=0)
        # Draft j was accepted in the steps that accepted more than j.
        self._sums[1] += np.bincount(accepted, minlength=promised.shape[1] + 1)[:0:-1].cumsum()[::-1]
        self._note_ratio()

    def correct(self, survivals: Floats) -> Floats:
        """Return survivals [..., g] scaled by what predictions were worth; positions seldom verified are left alone."""
        scaled: Floats = survivals * self._ratio
        np.minimum(scaled, 1.0, out=scaled)
        return np.minimum.accumulate(scaled, axis=-1, out=scaled)

    def _note_ratio(self) -> None:
        self._ratio = (self._sums[1] + 1) / (self._sums[0] + 1)


class RealisedAcceptance:
    """Running acceptance per position, for drafters without a confidence head: old knowledge, the same for all
    requests.
    """

    def __init__(self, width: int) -> None:
        self._reached = np.full(width, _ENOUGH)
        self._passed = np.full(width, _ENOUGH * _PRIOR)

    def update(self, outcome: Outcome) -> None:
        """Count the verified positions whose predecessors were all accepted."""
        width = self._passed.size
        judged, survived = first(outcome.lengths, width), first(outcome.accepted, width)
        reached = judged & first(outcome.accepted + 1, width)
        self._reached += reached.sum(axis=0)
        self._passed += survived.sum(axis=0)

    def confidences(self, requests: int) -> Floats:
        """Return [R, g], one row repeated."""
        return np.tile(self._passed / self._reached, (requests, 1))
