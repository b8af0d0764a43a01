"""The scheduler: owns the state over steps by which a policy decides whether to draft and how many drafts to verify.

Pure decisions are `schedule`'s, times `cost`'s; running drafter and target is the engine's.  A step goes:
`decide` (before drafting, from old knowledge only), draft, `allocate` (current confidences), verify, `record`.
An overlapped loop may decide and allocate step n + 1 before it records step n: what a step needs travels with it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspark.admissibility import check_admissible
from deepspark.cost import CostTable
from deepspark.errors import InputError
from deepspark.estimate import Outcome, SurvivalHistory, SurvivalTruth, first
from deepspark.parking import Parking, ParkingMeter
from deepspark.policy import Asynchronous, Off, Policy
from deepspark.schedule import allocate, choose_budget, fill, survival
from deepspark.verify import Rule

__all__ = ["Allocation", "Decision", "Scheduler", "StepRequests"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRequests:
    """The requests of one step.

    slots: [R] their rows in the scheduler's tables.  limits: [R] most drafts each may verify
    (`emission.longest_draft`).
    context_tokens: the batch's context, summed.  weights: [R] > 0 priorities, None for equal ones.
    """

    slots: Ints
    limits: Ints
    context_tokens: float = 0.0
    weights: Floats | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the step runs the drafter, and over how many drafts (None: the policy decides from current confidences).

    A step that does not draft still feeds the draft context, so that drafting can begin again at any step.  longest:
    most drafts that a request may verify (None: its limit); a probe verifies one.
    """

    draft: bool
    budget: int | None
    longest: int | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Verified lengths [R] of one step, the survivals [R, g] they came from (None: not drafted), and its number."""

    lengths: Ints
    survivals: Floats | None
    step: int


class Scheduler:
    """Chooses lengths for up to `num_slots` concurrent sequences drafting `width` tokens.

    Raises ConfigError where the policy may see more than `rule` tolerates.  one_hot: the drafter's choices are certain.
    parking: None drafts always, whatever it costs; `drafter.DrafterSettings` parks by default.
    """

    def __init__(  # noqa: PLR0913 - keyword-only behind the fourth
        self,
        policy: Policy,
        cost: CostTable,
        width: int,
        num_slots: int,
        *,
        rule: Rule = "chain",
        one_hot: bool = False,
        parking: Parking | None = None,
    ) -> None:
        check_admissible(policy, rule, one_hot=one_hot)
        self.policy = policy
        self.cost = cost
        self.width = width
        self.parking = parking
        lag = policy.lag if isinstance(policy, Asynchronous) else 1
        self.history = SurvivalHistory(num_slots, width, lag)
        self.truth = SurvivalTruth(width)
        self._meter = None if parking is None else ParkingMeter(parking, lag)
        self._probing = False
        self._step = 0

    @property
    def rests_for(self) -> int:
        """Steps until a step may draft again, as far as can be known; 0 while drafting goes on."""
        return 0 if self._meter is None else self._meter.rests_for

    def begin(self, slot: int) -> None:
        """Give `slot` to a new sequence; it is planned with the running mean until its own confidences are old
        enough.
        """
        self.history.begin(slot)

    def rest(self, requests: int) -> bool:
        """Whether a step of so many requests is known to draft nothing; counts it. Cheaper than `decide`."""
        return self._meter is not None and self._meter.rest(requests)

    def decide(self, requests: StepRequests) -> Decision:
        """Decide before drafting, from knowledge that is a step old or older."""
        count = requests.slots.size
        self._step += 1
        if isinstance(self.policy, Off) or count == 0 or not requests.limits.any():
            return Decision(draft=False, budget=0, step=self._step)
        old = self._limited(self.truth.correct(self.history.old(requests.slots, self._step)), requests)
        times = self.cost.budgets_ms(count, self.width, requests.context_tokens)
        budget: int | None = None
        if isinstance(self.policy, Asynchronous):
            best = choose_budget(old, times)
            budget, theta = best.drafts, best.theta
            if self.policy.fill:
                budget = fill(budget, times)
        else:
            old = old.mean(axis=0)
            planned = self.policy.lengths(self._conditional(old), old, times)
            gained = float((old * first(planned, self.width)).sum())
            theta = (count + gained) / float(times[int(planned.sum())])
        plain_ms = float(times[0]) - self.cost.draft_ms(count)
        probe_loss = min(float(times[count]) / plain_ms - 1, 100.0)
        return self._parked(count, theta * plain_ms / count, probe_loss, budget)

    def _parked(self, count: int, gain: float, probe_loss: float, budget: int | None) -> Decision:
        """Draft, park, or look again; `gain` is what drafting promises over plain decoding, as a factor."""
        action = "draft" if self._meter is None else self._meter.choose(count, gain, probe_loss)
        burst_begins = action == "probe" and not self._probing
        self._probing = action == "probe"
        if action == "draft":
            return Decision(draft=True, budget=budget, step=self._step)
        if action == "plain":
            return Decision(draft=False, budget=0, step=self._step)
        if burst_begins:
            self.history.forget_older()
        return Decision(draft=True, budget=None if budget is None else count, longest=1, step=self._step)

    def allocate(self, decision: Decision, conf: Floats | None, requests: StepRequests) -> Allocation:
        """Return verified lengths from CURRENT calibrated confidences [R, g] (None: nothing was drafted)."""
        if not decision.draft:
            return Allocation(np.zeros(requests.slots.size, np.int64), None, decision.step)
        if conf is None or conf.shape != (requests.slots.size, self.width):
            shape = None if conf is None else conf.shape
            raise InputError(f"a drafting step needs confidences [{requests.slots.size}, {self.width}], got {shape}")
        survivals = survival(conf)
        chosen = self._choose(decision, conf, self._limited(survivals, requests), requests)
        if decision.longest is not None:
            chosen = np.minimum(chosen, decision.longest)
        return Allocation(chosen, survivals, decision.step)

    def _choose(self, decision: Decision, conf: Floats, current: Floats, requests: StepRequests) -> Ints:
        if isinstance(self.policy, Asynchronous):
            return allocate(current, decision.budget or 0, self.policy.ties)
        if isinstance(self.policy, Off):
            return np.zeros(requests.slots.size, np.int64)
        times = self.cost.budgets_ms(requests.slots.size, self.width, requests.context_tokens)
        return self.policy.lengths(conf, current, times)

    def record(self, requests: StepRequests, allocation: Allocation, accepted: Ints) -> Outcome:
        """Learn from the step's `accepted` [R] drafts."""
        outcome = Outcome.of(requests.slots, allocation.survivals, allocation.lengths, accepted)
        if allocation.survivals is not None and outcome.promised is not None:
            self.truth.update(outcome.promised, accepted)
            self.history.add(requests.slots, allocation.survivals, allocation.step)
        return outcome

    def _limited(self, survivals: Floats, requests: StepRequests) -> Floats:
        limited = survivals
        if requests.limits.min(initial=self.width) < self.width:
            limited = survivals * first(requests.limits, self.width)
        if requests.weights is None:
            return limited
        # Mean weight 1 keeps the batch worth R tokens, so that weights move rows between requests and parking stays
        # true.
        return limited * (requests.weights / requests.weights.mean())[:, None]

    def _conditional(self, survivals: Floats) -> Floats:
        """Return the confidences that survivals [R, g] are products of."""
        before = np.concatenate([np.ones((survivals.shape[0], 1)), survivals[:, :-1]], axis=1)
        conf: Floats = np.divide(survivals, before, out=np.zeros_like(survivals), where=before > 0)
        return conf
