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
        # Steps by verified length and accepted drafts, steps that drafted, promised drafts; last row: past requests.
        self._steps = np.zeros((num_slots + 1, width + 1, width + 1), np.int64)
        self._drafted = np.zeros(num_slots + 1, np.int64)
        self._promised = np.zeros(num_slots + 1)

    def begin(self, slot: int) -> None:
        """Give `slot` to a new request; totals over all requests keep the old one."""
        for table in (self._steps, self._drafted, self._promised):
            table[-1] += table[slot]
            table[slot] = 0

    def record(self, outcome: Outcome) -> None:
        """Count one step."""
        side = self._width + 1
        self._steps.ravel()[(outcome.slots * side + outcome.lengths) * side + outcome.accepted] += 1
        if outcome.promised is not None:
            self._drafted[outcome.slots] += 1
            self._promised[outcome.slots] += outcome.promised.sum(axis=1)

    def report(self, slot: int | None = None) -> Report:
        """Return the counts of `slot`'s request, or of all requests so far."""
        tables = (self._steps, self._drafted, self._promised)
        counts, drafted, promised = (table.sum(axis=0) if slot is None else table[slot] for table in tables)
        lengths, accepts = counts.sum(axis=1), counts.sum(axis=0)
        steps = int(lengths.sum())
        # A position is judged in steps that verified more than its index, and survives likewise.
        judged, survived = (counts[::-1].cumsum()[::-1][1:] for counts in (lengths, accepts))
        share = np.divide(survived, judged, out=np.full(self._width, np.nan), where=judged > 0)
        each = max(steps, 1)
        accepted = int(survived.sum())
        return Report(
            steps=steps,
            proposed=int(drafted) * self._width,
            verified=int(judged.sum()),
            accepted=accepted,
            survival=share,
            predicted=float(promised) / each,
            realised=accepted / each,
        )
