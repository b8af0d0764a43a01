"""Telemetry: owns the counts of what was proposed, verified and accepted, by request slot and over all.

It watches and decides nothing; what a scheduler learns from is `estimate`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspark.estimate import Outcome

__all__ = ["Report", "Telemetry"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of one request, or of all.

    steps, proposed, verified, accepted: steps that ran, drafts drawn, judged, accepted.  survival: [g] share of the
    steps that verified position j in which drafts 1..j were all accepted (NaN: never verified).  predicted, realised:
    mean over steps of the accepted drafts that confidences promised for the verified rows, and of those that came.
    """

    steps: int
    proposed: int
    verified: int
    accepted: int
    survival: Floats
    predicted: float
    realised: float

    @property
    def tokens_per_step(self) -> float:
        """Accepted length tau, the extra token counted."""
        return 1 + self.accepted / self.steps if self.steps else float("nan")


class Telemetry:
    """Counts for `num_slots` concurrent requests drafting `width` tokens."""

    def __init__(self, num_slots: int, width: int) -> None:
        self._width = width
        # Columns: steps, proposed, verified, accepted, predicted, then judged and survived by position.
        self._table = np.zeros((num_slots, 5 + 2 * width))
        self._total = np.zeros(5 + 2 * width)

    def begin(self, slot: int) -> None:
        """Give `slot` to a new request; totals over all requests stay."""
        self._table[slot] = 0

    def record(self, outcome: Outcome) -> None:
        """Count one step."""
        step = np.empty((outcome.slots.size, self._table.shape[1]))
        step[:, 0], step[:, 1] = 1, 0 if outcome.survivals is None else self._width
        step[:, 2], step[:, 3] = outcome.lengths, outcome.accepted
        step[:, 4] = 0 if outcome.survivals is None else (outcome.survivals * outcome.judged).sum(axis=1)
        step[:, 5 : 5 + self._width] = outcome.judged
        step[:, 5 + self._width :] = outcome.survived
        self._table[outcome.slots] += step
        self._total += step.sum(axis=0)

    def report(self, slot: int | None = None) -> Report:
        """Return the counts of `slot`'s request, or of all requests so far."""
        row = self._total if slot is None else self._table[slot]
        steps, proposed, verified, accepted = (int(value) for value in row[:4])
        judged, survived = row[5 : 5 + self._width], row[5 + self._width :]
        share = np.divide(survived, judged, out=np.full(self._width, np.nan), where=judged > 0)
        each = max(steps, 1)
        return Report(steps, proposed, verified, accepted, share, float(row[4]) / each, accepted / each)
