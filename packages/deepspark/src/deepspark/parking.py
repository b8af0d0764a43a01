"""Parking: owns when drafting stops because even the best schedule loses to plain decoding, and how it begins again.

What drafting would gain is the scheduler's estimate; this only turns a stream of estimates into decisions.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Parking", "ParkingMeter"]

Action = Literal["draft", "probe", "plain"]

_PROBED_REQUESTS = 8
_WORTH_LOOKING = 0.1
_LOOK_EVERY = 64


@dataclass(frozen=True, slots=True)
class Parking:
    """How much loss is put up with, and how often a parked drafter is tried again.

    margin: drafting must promise this share more tokens a second.  patience: how many steps' worth of tokens a losing
    spell may cost before drafting is parked; it bounds the loss, and keeps the noise of a small batch from parking a
    winner.  A parked scheduler drafts a short burst, one draft a request verified, every `first_probe` steps to see
    whether the text has changed; after each burst that finds nothing the wait doubles, up to `last_probe`.  looking:
    most share of the time that bursts may cost; where a burst is dear, waits are longer.
    """

    margin: float = 0.01
    patience: float = 2.0
    first_probe: int = 128
    last_probe: int = 2048
    looking: float = 0.005


class ParkingMeter:
    """Follows one batch through drafting, waiting, probing and settling.

    settle: steps until a burst's confidences are old enough to decide from.
    """

    def __init__(self, parking: Parking, settle: int) -> None:
        self._parking = parking
        self._settle = settle
        self._state: Literal["drafting", "waiting", "probing", "settling"] = "drafting"
        self._left = 0
        self._wait = parking.first_probe
        self._dear = 0
        self._lost = 0.0
        self._gain_when_parked = 0.0
        self._requests = 0

    @property
    def rests_for(self) -> int:
        """Steps until drafting may begin again, as far as can be known; 0 while it goes on."""
        return self._left if self._state == "waiting" else 0

    def rest(self, requests: int) -> bool:
        """Count a step of waiting for which no estimate is needed; False where `choose` must look at one.

        While the same number of requests goes on, times change slowly: one estimate in 64 steps is enough.
        """
        if self._state != "waiting" or requests != self._requests or self._left % _LOOK_EVERY <= 1:
            return False
        self._left -= 1
        return True

    def choose(self, requests: int, gain: float, probe_loss: float = 0.0) -> Action:
        """Return what the next step does; `gain` is drafting's promised tokens a second over plain decoding's.

        probe_loss: what a probing step that gains nothing costs, in plain steps.
        """
        self._requests = requests
        self._dear = int(probe_loss * max(_PROBED_REQUESTS // requests, 1) / self._parking.looking)
        lost = 1 + self._parking.margin - gain
        if self._state == "drafting":
            self._lost = max(self._lost + lost, 0.0)
            if self._lost < self._parking.patience:
                return "draft"
            self._gain_when_parked = gain
            self._rest(self._parking.first_probe)
        elif self._state == "waiting" and lost < 0 and gain > self._gain_when_parked + _WORTH_LOOKING:
            # The text has not been looked at since, but times have changed: another batch size, another context.
            return self._draft_again()
        self._left -= 1
        if self._left >= 0:
            return "probe" if self._state == "probing" else "plain"
        return self._next(requests, lost)

    def _next(self, requests: int, lost: float) -> Action:
        """Leave a state whose steps are used up."""
        if self._state == "waiting":
            self._state = "probing"
            self._left = max(_PROBED_REQUESTS // requests, 1) - 1
            return "probe"
        if self._state == "probing":
            self._state, self._left = "settling", self._settle - 1
            return "plain"
        if lost < 0:
            return self._draft_again()
        self._rest(min(2 * self._wait, self._parking.last_probe))
        return "plain"

    def _draft_again(self) -> Action:
        self._state, self._lost = "drafting", 0.0
        return "draft"

    def _rest(self, steps: int) -> None:
        self._state = "waiting"
        self._wait = steps
        self._left = max(steps, self._dear)
