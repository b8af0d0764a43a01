import numpy as np
import pytest

from deepspark.audit import World
from deepspark.audit.engine import WorldSource, WorldTarget
from deepspark.cost import CostTable, Lookup
from deepspark.drafter import DrafterSettings, DraftRequest, DSparkDrafter
from deepspark.errors import ConfigError
from deepspark.policy import Fixed


@pytest.mark.parametrize("mode", ["ceil", "floor", "linear"])
def test_a_slower_machine_is_learned_in_place(mode: Lookup) -> None:
    table = CostTable([1, 8, 16, 24], [5.0, 6.0, 7.0, 8.0], mode=mode)
    rows = np.array([8, 16])
    before = table.step_ms(rows)
    rng = np.random.default_rng(0)
    for _ in range(60):
        for size in (8, 16):
            hiccup = 50.0 if rng.random() < 0.1 else 0.0
            table.observe(size, 0.0, float(before[size // 8 - 1]) * 1.3 + hiccup)
    np.testing.assert_allclose(table.step_ms(rows), before * 1.3, rtol=1e-6)
    # An unmeasured size takes its neighbour's correction.
    assert float(table.step_ms(np.array([24]))[0]) == pytest.approx(8.0 * 1.3)
    assert table.budgets_ms(8, 1)[0] == pytest.approx(float(before[0]) * 1.3)


def test_context_is_told_from_rows() -> None:
    table = CostTable([1, 64], [10.0, 20.0])
    rng = np.random.default_rng(0)
    for _ in range(300):
        context = float(rng.integers(1000, 100_000))
        table.observe(64, context, 20.0 + 1e-4 * context)
    assert table.context_ms == pytest.approx(1e-4, rel=0.02)
    assert float(table.step_ms(np.array([64]), 50_000.0)[0]) == pytest.approx(25.0, rel=0.02)


def test_the_drafter_is_paid_only_by_steps_that_draft() -> None:
    table = CostTable([1, 8], [5.0, 6.0], draft_sizes=[1, 5], draft_ms=[1.0, 2.0])
    assert table.draft_ms(3) == 1.5
    assert table.draft_ms(0) == 0.0
    assert table.budgets_ms(3, 1)[0] == pytest.approx(float(table.step_ms(np.array([3]))[0]) + 1.5)


def test_tables_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="sizes must ascend"):
        CostTable([4, 2], [1.0, 2.0])
    with pytest.raises(ConfigError, match="draft_sizes must ascend"):
        CostTable([2], [1.0], draft_sizes=[1, 2], draft_ms=[1.0])
    with pytest.raises(ConfigError, match="times > 0"):
        CostTable([1], [0.0])
    with pytest.raises(ConfigError, match="mode"):
        CostTable([1], [1.0], mode="nearest")  # type: ignore[arg-type]


def test_an_engine_teaches_the_table_through_the_drafter() -> None:
    target = WorldTarget(World(3, 1))
    table = CostTable([1, 8], [5.0, 6.0])
    drafter = DSparkDrafter(WorldSource(target, 2), table, 1, DrafterSettings(policy=Fixed(2), parking=None))
    target.begin(0)
    target.forward([0], [[1]], [0])
    proposal = drafter.propose([DraftRequest(slot=0, anchor=2, position=1, seed=3, limit=2)])
    for _ in range(9):
        drafter.observe(proposal, 12.0)
    assert float(table.step_ms(np.array([3]))[0]) == pytest.approx(12.0)
