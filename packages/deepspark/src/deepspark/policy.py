"""Policies: owns the ways to choose verified lengths by name, each with the class of what it sees.

The arithmetic is `schedule`'s, the state over steps `scheduler`'s.  Source: DSpark specification, sections 3.3 and 3.4.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from deepspark.admissibility import Sees
from deepspark.errors import ConfigError
from deepspark.schedule import Ties, algorithm_one, survival_threshold, threshold

__all__ = ["AlgorithmOne", "Asynchronous", "Fixed", "Off", "Policy", "SurvivalThreshold", "Threshold"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Off:
    """No drafts: plain decoding."""

    sees: ClassVar[Sees] = Sees.PAST


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every request verifies `length` drafts (as far as its limit allows)."""

    length: int
    sees: ClassVar[Sees] = Sees.PAST

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"a fixed length must be >= 1 (Off() verifies none), got {self.length}")

    def lengths(self, conf: Floats, survivals: Floats, step_ms: Floats) -> Ints:
        """Return min(length, what survivals above 0 leave) for each request."""
        return np.minimum(self.length, np.cumprod(survivals > 0, axis=1).sum(axis=1))


@dataclass(frozen=True, slots=True)
class Threshold:
    """Verify up to the first current confidence below `least` (DeepSpec's rule)."""

    least: float
    sees: ClassVar[Sees] = Sees.PAST

    def lengths(self, conf: Floats, survivals: Floats, step_ms: Floats) -> Ints:
        """Return lengths [R]; c_j decides on draft j and has not seen it."""
        return np.minimum(threshold(conf, self.least), np.cumprod(survivals > 0, axis=1).sum(axis=1))


@dataclass(frozen=True, slots=True)
class SurvivalThreshold:
    """Verify while the current survival c_1..c_j is at least `least`: the price of one row, in tokens."""

    least: float
    sees: ClassVar[Sees] = Sees.PAST

    def lengths(self, conf: Floats, survivals: Floats, step_ms: Floats) -> Ints:
        """Return lengths [R]."""
        return survival_threshold(survivals, self.least)


@dataclass(frozen=True, slots=True)
class AlgorithmOne:
    """The paper's walk over current confidences; needs a smooth cost table (it stops at the first stair)."""

    ties: Ties = "position"
    sees: ClassVar[Sees] = Sees.PAST

    def lengths(self, conf: Floats, survivals: Floats, step_ms: Floats) -> Ints:
        """Return lengths [R]."""
        return algorithm_one(survivals, step_ms, self.ties).lengths


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """The budget from confidences `lag` steps old (any search is then allowed), its rows to the largest current
    survivals.

    lag 2 suits an overlapped loop (step n is launched before step n-1 is read), 1 a plain one.  fill: use rows that a
    captured graph pads anyway.
    """

    lag: int = 2
    fill: bool = True
    ties: Ties = "position"
    sees: ClassVar[Sees] = Sees.PAST

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise ConfigError(
                f"lag must be >= 1, got {self.lag}: a best budget over CURRENT confidences has seen what it admits"
            )


Policy = Off | Fixed | Threshold | SurvivalThreshold | AlgorithmOne | Asynchronous
