import numpy as np
import pytest

from deepspark.admissibility import Sees, check_admissible, tolerates
from deepspark.audit.cuts import BestOfCurrent, LookAhead, OwnProbability
from deepspark.cost import CostTable
from deepspark.errors import ConfigError, InputError
from deepspark.estimate import SurvivalHistory
from deepspark.parking import Parking
from deepspark.policy import AlgorithmOne, Asynchronous, Fixed, Off, Policy, SurvivalThreshold, Threshold
from deepspark.ragged import count_accepted
from deepspark.scheduler import Decision, Scheduler, StepRequests
from deepspark.telemetry import Telemetry

WIDTH = 5
POLICIES: list[Policy] = [Fixed(3), Threshold(0.4), SurvivalThreshold(0.2), AlgorithmOne(), Asynchronous()]


def table(row_ms: float, draft_ms: float = 0.2, base_ms: float = 10.0) -> CostTable:
    """Steps of `base_ms` and `row_ms` a row; drafting costs `draft_ms`."""
    return CostTable([1, 2000], [base_ms, base_ms + 1999 * row_ms], mode="linear", draft_sizes=[1], draft_ms=[draft_ms])


def batch(requests: int, limit: int = WIDTH) -> StepRequests:
    return StepRequests(np.arange(requests), np.full(requests, limit))


def run(scheduler: Scheduler, acceptance: float, requests: int, steps: int, seed: int = 0) -> tuple[float, float, int]:
    """Return tokens and milliseconds of `steps` steps, and how many drafted."""
    rng = np.random.default_rng(seed)
    step = batch(requests)
    tokens = ms = 0.0
    drafted = 0
    for _ in range(steps):
        decision = scheduler.decide(step)
        conf = np.full((requests, WIDTH), acceptance)
        allocation = scheduler.allocate(decision, conf if decision.draft else None, step)
        lengths = allocation.lengths
        accepted = count_accepted(rng.random(conf.shape) < conf, lengths)
        scheduler.record(step, allocation, accepted)
        tokens += requests + int(accepted.sum())
        ms += float(scheduler.cost.step_ms(np.array([requests + int(lengths.sum())]))[0])
        ms += scheduler.cost.draft_ms(requests) if decision.draft else 0.0
        drafted += decision.draft
    return tokens, ms, drafted


def test_wrong_pairs_are_refused_when_they_are_made() -> None:
    for policy in POLICIES:
        for rule in ("greedy", "chain", "coupled", "block", "match"):
            Scheduler(policy, table(0.1), WIDTH, 1, rule=rule)
    times = np.ones(4)
    for cutting in (BestOfCurrent(times), LookAhead(0.5), OwnProbability(0.5)):
        with pytest.raises(ConfigError, match=type(cutting).__name__):
            check_admissible(cutting, "chain")
        with pytest.raises(ConfigError):
            check_admissible(cutting, "block")
        check_admissible(cutting, "match")
        check_admissible(cutting, "greedy")
        check_admissible(cutting, "chain", one_hot=True)
    check_admissible(OwnProbability(0.5), "coupled")
    with pytest.raises(ConfigError, match="BestOfCurrent"):
        check_admissible(BestOfCurrent(times), "coupled")
    assert tolerates("chain") == Sees.PAST
    with pytest.raises(ConfigError, match="lag must be >= 1"):
        Asynchronous(lag=0)
    with pytest.raises(ConfigError, match="Off"):
        Fixed(0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_drafting_parks_where_it_loses(policy: Policy) -> None:
    """Rows as dear as steps: nothing can win, and the loss stays within patience and probes."""
    tokens, ms, drafted = run(Scheduler(policy, table(10.0, 2.0), WIDTH, 4, parking=Parking()), 0.3, 4, 1000)
    assert drafted < 60
    assert tokens / ms > 0.98 * 4 / 40


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_drafting_stays_where_it_wins(policy: Policy) -> None:
    tokens, ms, drafted = run(Scheduler(policy, table(0.05), WIDTH, 4, parking=Parking()), 0.8, 4, 300)
    assert drafted == 300
    assert tokens / ms > 2 * 4 / 10.2


def test_a_parked_scheduler_notices_better_text() -> None:
    scheduler = Scheduler(Asynchronous(), table(3.0, 1.0), WIDTH, 8, parking=Parking(first_probe=20))
    run(scheduler, 0.1, 8, 200)
    assert run(scheduler, 0.1, 8, 100)[2] < 10
    assert run(scheduler, 0.95, 8, 400)[2] > 200


def test_confidences_that_lie_are_corrected() -> None:
    """Predicted 0.95, realised 0.2: after a while the scheduler knows, and parks."""
    scheduler = Scheduler(Asynchronous(), table(1.0, 1.0), WIDTH, 16, parking=Parking())
    rng = np.random.default_rng(1)
    step = batch(16)
    drafted = []
    for _ in range(200):
        decision = scheduler.decide(step)
        conf = np.full((16, WIDTH), 0.95)
        allocation = scheduler.allocate(decision, conf if decision.draft else None, step)
        scheduler.record(step, allocation, count_accepted(rng.random((16, WIDTH)) < 0.2, allocation.lengths))
        drafted.append(decision.draft)
    assert drafted[0]
    assert sum(drafted[100:]) < 20


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_limits_hold(policy: Policy) -> None:
    scheduler = Scheduler(policy, table(0.01), WIDTH, 4)
    step = StepRequests(np.arange(4), np.array([0, 1, 3, 5]))
    for _ in range(6):
        allocation = scheduler.allocate(scheduler.decide(step), np.full((4, WIDTH), 0.9), step)
        assert (allocation.lengths <= step.limits).all()
        scheduler.record(step, allocation, allocation.lengths)
    nothing = StepRequests(np.arange(4), np.zeros(4, np.int64))
    assert not scheduler.decide(nothing).draft


def test_weights_move_rows() -> None:
    scheduler = Scheduler(Asynchronous(lag=1), table(2.0, 0.0), WIDTH, 2)
    step = StepRequests(np.arange(2), np.full(2, WIDTH), weights=np.array([9.0, 1.0]))
    conf = np.full((2, WIDTH), 0.8)
    for _ in range(20):
        allocation = scheduler.allocate(scheduler.decide(step), conf, step)
        scheduler.record(step, allocation, allocation.lengths)
    first, second = scheduler.allocate(scheduler.decide(step), conf, step).lengths
    assert first > second


def test_the_budget_comes_from_old_confidences_only() -> None:
    """Whatever the current confidences say, the sum of lengths was fixed before them."""
    first = Scheduler(Asynchronous(lag=2), table(0.6, 0.1), WIDTH, 8)
    second = Scheduler(Asynchronous(lag=2), table(0.6, 0.1), WIDTH, 8)
    step = batch(8)
    rng = np.random.default_rng(4)
    for _ in range(30):
        conf = rng.uniform(0.2, 1.0, (8, WIDTH))
        decisions = [each.decide(step) for each in (first, second)]
        assert decisions[0] == decisions[1]
        for each, decision in zip((first, second), decisions, strict=True):
            allocation = each.allocate(decision, conf, step)
            assert int(allocation.lengths.sum()) == decision.budget
            each.record(step, allocation, np.zeros(8, np.int64))
    one, other = first.decide(step), second.decide(step)
    changed = second.allocate(other, np.full((8, WIDTH), 0.999), step).lengths
    assert int(first.allocate(one, rng.uniform(0.2, 1, (8, WIDTH)), step).lengths.sum()) == int(changed.sum())


def test_an_overlapped_loop_sees_what_is_two_steps_old() -> None:
    """Step n + 1 is planned before step n is recorded; both loops then rest on step n - 1."""
    plain, overlapped = (SurvivalHistory(3, WIDTH, lag=2) for _ in range(2))
    slots = np.arange(3)
    blocks = [np.random.default_rng(step).random((3, WIDTH)) for step in range(30)]
    for step in range(2, 30):
        assert np.array_equal(plain.old(slots, step), overlapped.old(slots, step))
        if step > 4:
            assert np.array_equal(plain.old(slots, step)[0], blocks[step - 2])
        plain.add(slots, blocks[step], step)
        if step > 2:
            overlapped.add(slots, blocks[step - 1], step - 1)


def test_off_never_drafts_and_errors_speak() -> None:
    scheduler = Scheduler(Off(), table(0.1), WIDTH, 2)
    step = batch(2)
    assert not scheduler.decide(step).draft
    assert scheduler.allocate(Decision(draft=False, budget=0), None, step).lengths.tolist() == [0, 0]
    with pytest.raises(InputError, match=r"confidences \[2, 5\]"):
        Scheduler(Fixed(2), table(0.1), WIDTH, 2).allocate(Decision(draft=True, budget=None), np.ones((2, 3)), step)


def test_telemetry_counts_what_happened() -> None:
    telemetry = Telemetry(4, WIDTH)
    scheduler = Scheduler(Fixed(3), table(0.01), WIDTH, 4)
    step = StepRequests(np.array([1, 3]), np.full(2, WIDTH))
    conf = np.full((2, WIDTH), 0.5)
    for accepted in ([3, 0], [1, 2]):
        allocation = scheduler.allocate(scheduler.decide(step), conf, step)
        telemetry.record(scheduler.record(step, allocation, np.array(accepted)))
    one = telemetry.report(1)
    assert (one.steps, one.proposed, one.verified, one.accepted) == (2, 10, 6, 4)
    assert one.tokens_per_step == 3
    assert one.survival[:3].tolist() == [1.0, 0.5, 0.5]
    assert np.isnan(one.survival[3:]).all()
    assert one.predicted == pytest.approx(0.875)
    assert one.realised == 2
    assert telemetry.report().steps == 4
    telemetry.begin(1)
    assert telemetry.report(1).steps == 0
    assert telemetry.report().accepted == 6
