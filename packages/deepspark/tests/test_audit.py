"""The losslessness table of the specification, and that the harness catches what it must."""

import numpy as np
import pytest

from deepspark.audit import (
    LoopAudit,
    Plan,
    SchedulerPlanner,
    World,
    admissibility_table,
    audit_against_law,
    audit_engines,
    first_tokens,
    noise_key_table,
    target_law,
)
from deepspark.audit.engine import WorldEngine
from deepspark.audit.loops import OldConfidence
from deepspark.audit.table import EXACT
from deepspark.cost import CostTable
from deepspark.drafter import DrafterSettings
from deepspark.errors import InputError
from deepspark.parking import Parking
from deepspark.policy import AlgorithmOne, Asynchronous, Fixed, Policy, Threshold
from deepspark.scheduler import Scheduler
from deepspark.verify import Rule

COST = CostTable([1, 1000], [1.0, 101.0], mode="linear")


def test_the_table_of_admissible_cuts() -> None:
    lines = admissibility_table(worlds=5)
    assert [line for line in lines if not line.as_expected] == []
    caught = {(line.cut, line.rule) for line in lines if not line.should_be_exact and line.tv > 0.02}
    for wrong in (
        ("best of all budgets, current confidences", "chain"),
        ("next confidence must be high (look-ahead)", "chain"),
        ("stop before a draft because of itself", "chain"),
        ("best of all budgets, current confidences", "block"),
        ("two requests: best of all budgets, current", "chain"),
    ):
        assert wrong in caught
    exact = {(line.cut, line.rule) for line in lines if line.tv < EXACT}
    assert ("stop before a draft because of itself", "coupled") in exact
    assert ("next confidence must be high (look-ahead)", "coupled") in exact
    assert ("two requests: Algorithm 1", "chain") in exact


def test_the_table_of_noise_keys() -> None:
    lines = noise_key_table(worlds=4)
    assert [line for line in lines if not line.as_expected] == []
    assert max(line.tv for line in lines if "DRAFT" in line.cut) > 0.01


@pytest.mark.parametrize("rule", ["chain", "coupled", "block"])
@pytest.mark.parametrize(
    "policy", [Asynchronous(lag=1), Asynchronous(), AlgorithmOne(), Threshold(0.5)], ids=lambda p: type(p).__name__
)
def test_the_shipped_scheduler_keeps_the_law_over_a_loop(policy: Policy, rule: Rule) -> None:
    """Exactly: history, corrections, parking and probing included, over up to three blocks."""
    cost = CostTable([1, 2, 3], [1.0, 1.2, 1.5], draft_sizes=[1], draft_ms=[0.05])
    scheduler = Scheduler(policy, cost, 2, 1, rule=rule, parking=Parking(patience=0.3, first_probe=1))
    drafting = Scheduler(policy, cost, 2, 1, rule=rule)
    for each in (scheduler, drafting):
        planner = SchedulerPlanner(each)
        assert LoopAudit(World(2, 3), 2, rule).tv(planner, length=3) < EXACT
    assert SchedulerPlanner(drafting).plan(np.array([0.99, 0.99])) > 0


def test_a_loop_that_verifies_nothing_is_plain() -> None:
    assert LoopAudit(World(3, 5), 2, "chain").tv(OldConfidence(2.0, 2), length=2) < EXACT


@pytest.mark.parametrize("rule", ["chain", "coupled", "block", "match"])
def test_the_public_loop_passes_the_sampling_test(rule: Rule) -> None:
    """4 x 4 classes, 3,000 texts: false alarm 1e-3, and a distance of 0.11 is missed with chance 1e-3 at most."""
    world = World(4, 1)
    settings = DrafterSettings(rule=rule, policy=Asynchronous(lag=1), parking=None)
    samples = WorldEngine(world, 3, settings, COST).sample(range(3000), 4)
    verdict = audit_against_law(samples, target_law(world, (0,), 4), first_tokens(2, 4))
    assert verdict.lossless, verdict
    assert verdict.detectable < 0.11


def test_the_sampling_test_catches_a_wrong_law() -> None:
    """Texts of another target, as a wrong rule would give them."""
    samples = WorldEngine(World(4, 2), 3, DrafterSettings(parking=None), COST).sample(range(3000), 2)
    verdict = audit_against_law(samples, target_law(World(4, 1), (0,), 2), first_tokens(2, 4))
    assert not verdict.lossless


def test_false_alarms_stay_below_the_stated_rate() -> None:
    """At a stated rate of 20 % the bound holds on perfect samples, and is not so loose that nothing could fail."""
    rng = np.random.default_rng(0)
    p = np.array([0.5, 0.3, 0.2])
    law = {(token,): float(mass) for token, mass in enumerate(p)}
    alarms = 0
    for _ in range(400):
        samples = [(int(token),) for token in rng.choice(3, 300, p=p)]
        alarms += not audit_against_law(samples, law, first_tokens(1, 3), false_alarm=0.2).lossless
    assert alarms / 400 <= 0.2
    shifted = np.array([0.35, 0.45, 0.2])
    verdict = audit_against_law([(int(t),) for t in rng.choice(3, 3000, p=shifted)], law, first_tokens(1, 3))
    assert not verdict.lossless
    assert verdict.threshold < 0.15 < verdict.detectable + 0.1


def test_two_engines_are_compared_without_a_law() -> None:
    world = World(3, 4)
    plain = WorldEngine(world, 2, None, COST)
    good = WorldEngine(world, 2, DrafterSettings(policy=Fixed(2), parking=None), COST)
    other = WorldEngine(World(3, 9), 2, DrafterSettings(policy=Fixed(2), parking=None), COST)
    plan = Plan(num_tokens=2, count=1500, fold=first_tokens(1, 3), num_classes=3)
    assert audit_engines(good, plain, plan).lossless
    assert not audit_engines(other, plain, plan).lossless
    with pytest.raises(InputError, match="more than the stated"):
        audit_engines(good, plain, Plan(2, 50, first_tokens(2, 3), 1))
    with pytest.raises(InputError, match="expected samples"):
        audit_against_law([], {}, first_tokens(1, 2))
