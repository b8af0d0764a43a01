import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepspark.errors import InputError
from deepspark.ragged import count_accepted, emitted_tokens, pack
from deepspark.schedule import (
    algorithm_one,
    allocate,
    choose_budget,
    expected_tokens,
    fill,
    survival,
    survival_threshold,
    threshold,
)

Floats = NDArray[np.float64]


def case(seed: int, requests: int, width: int) -> tuple[Floats, Floats]:
    """Survivals with ties and zeros, and rising step times."""
    rng = np.random.default_rng(seed)
    conf = rng.choice([0.0, 0.5, 1.0, *rng.random(6)], (requests, width))
    times = np.cumsum(rng.random(requests * width + 1)) + 1
    return survival(conf), times


def ranked(survivals: Floats, by_position: bool) -> list[tuple[int, int]]:
    """The walk as the specification words it."""
    requests, width = survivals.shape
    cells = itertools.product(range(requests), range(width))
    return sorted(cells, key=lambda c: (-survivals[c], c[1], c[0]) if by_position else (-survivals[c], c[0], c[1]))


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_algorithm_one_is_the_walk(seed: int, requests: int, width: int, by_position: bool) -> None:
    survivals, times = case(seed, requests, width)
    lengths, total, theta = [0] * requests, float(requests), requests / times[0]
    for taken, (r, j) in enumerate(ranked(survivals, by_position), 1):
        following = (total + survivals[r, j]) / times[taken]
        if survivals[r, j] <= 0 or following <= theta:
            break
        total, theta, lengths[r] = total + survivals[r, j], following, lengths[r] + 1
    walk = algorithm_one(survivals, times, "position" if by_position else "request")
    assert walk.lengths.tolist() == lengths
    assert walk.theta == pytest.approx(theta, rel=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 30), st.booleans())
def test_allocate_takes_the_top_in_order(seed: int, requests: int, width: int, budget: int, by_position: bool) -> None:
    survivals, _ = case(seed, requests, width)
    lengths = [0] * requests
    for r, j in ranked(survivals, by_position)[:budget]:
        lengths[r] += survivals[r, j] > 0
    assert allocate(survivals, budget, "position" if by_position else "request").tolist() == lengths


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3))
def test_the_budget_is_the_best_of_all_schedules(seed: int, requests: int, width: int) -> None:
    survivals, times = case(seed, requests, width)
    best = max(
        expected_tokens(survivals, np.array(lengths)) / times[sum(lengths)]
        for lengths in itertools.product(range(width + 1), repeat=requests)
    )
    budget = choose_budget(survivals, times)
    assert budget.theta == pytest.approx(best, rel=1e-12)
    given_out = allocate(survivals, budget.drafts)
    assert expected_tokens(survivals, given_out) / times[budget.drafts] == pytest.approx(best, rel=1e-12)


def test_averaged_steps_are_ranked_one_by_one() -> None:
    first, second = np.array([[0.9, 0.1]]), np.array([[0.5, 0.4]])
    times = np.array([1.0, 1.3, 1.6])
    both = choose_budget(np.stack([first, second]), times)
    expected = [1 / 1.0, (1 + 0.7) / 1.3, (1 + 0.95) / 1.6]
    assert both.drafts == int(np.argmax(expected))
    assert both.theta == pytest.approx(max(expected))


def test_dead_confidences_admit_nothing() -> None:
    conf = np.array([[0.9, np.nan, 0.9], [0.0, 1.0, 1.0], [0.8, 0.7, 0.6]])
    survivals = survival(conf)
    assert survivals.tolist() == [[0.9, 0, 0], [0, 0, 0], [0.8, pytest.approx(0.56), pytest.approx(0.336)]]
    assert allocate(survivals, 9).tolist() == [1, 0, 3]
    flat = np.ones(10)
    assert algorithm_one(survivals, flat).lengths.tolist() == [1, 0, 3]
    assert survival_threshold(survivals, 0.0).tolist() == [1, 0, 3]


def test_a_size_that_does_not_exist_is_never_chosen() -> None:
    survivals = np.full((2, 2), 0.99)
    times = np.array([1.0, 1.0, np.inf, np.inf, np.inf])
    assert choose_budget(survivals, times).drafts == 1
    assert int(algorithm_one(survivals, times).lengths.sum()) == 1
    assert fill(0, times) == 1


def test_fill_stops_where_rows_cost() -> None:
    assert fill(1, np.array([1.0, 2.0, 2.0, 2.0, 3.0])) == 3
    assert fill(0, np.array([1.0])) == 0


def test_threshold_stops_at_the_first_low_confidence() -> None:
    assert threshold(np.array([[0.9, 0.2, 0.9], [0.1, 0.9, 0.9], [0.9, 0.9, 0.9]]), 0.5).tolist() == [1, 0, 3]


def test_confidences_must_be_a_table() -> None:
    with pytest.raises(InputError, match=r"\[R, g\]"):
        survival(np.zeros(3))


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 9))
def test_packing_and_unpacking(seed: int, requests: int, width: int, padding: int) -> None:
    rng = np.random.default_rng(seed)
    drafts, ells = rng.integers(0, 99, (requests, width)), rng.integers(0, width + 1, requests)
    anchors, positions = rng.integers(0, 99, requests), rng.integers(0, 50, requests)
    used = int(ells.sum()) + requests
    batch = pack(anchors, drafts, ells, positions, used + padding)
    assert batch.num_rows == used
    assert batch.ids.shape == (used + padding,)
    for r in range(requests):
        rows = slice(batch.cu[r], batch.cu[r + 1])
        assert batch.ids[rows].tolist() == [anchors[r], *drafts[r, : ells[r]]]
        assert batch.pos[rows].tolist() == list(range(positions[r], positions[r] + ells[r] + 1))
        assert batch.judges_draft[rows].tolist() == [True] * ells[r] + [False]
        assert set(batch.req[rows].tolist()) == {r}
    assert set(batch.pos[used:].tolist()) <= {-1}
    assert set(batch.req[used:].tolist()) <= {-1}
    passed = rng.random((requests, width)) < 0.6
    accepted = count_accepted(passed, ells)
    extra = rng.integers(0, 99, requests)
    tokens = emitted_tokens(drafts, accepted, extra)
    for r in range(requests):
        expected = list(itertools.takewhile(lambda j, r=r: passed[r, j], range(ells[r])))  # type: ignore[misc]
        assert accepted[r] == len(expected)
        assert tokens[r, : accepted[r] + 1].tolist() == [*drafts[r, : accepted[r]], extra[r]]


def test_packing_refuses_what_does_not_fit() -> None:
    one = np.zeros(1, np.int64)
    with pytest.raises(InputError, match=r"0\.\.2"):
        pack(one, np.zeros((1, 2), np.int64), np.array([3]), one)
    with pytest.raises(InputError, match=r"0\.\.2"):
        pack(one, np.zeros((1, 2), np.int64), np.array([-1]), one)
    with pytest.raises(InputError, match="3 rows does not fit 2"):
        pack(one, np.zeros((1, 2), np.int64), np.array([2]), one, 2)
