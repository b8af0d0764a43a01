"""The choice of the best: the set that a stable sort gives, whatever the scores, in any number of pieces."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.kernels import selection
from deepinfer_kernels_cuda.kernels.selection import Rows, select

DEVICE = torch.device("cuda" if probe() is None else "cpu")


def rows_of(visible: list[int], blocks: int) -> Rows:
    """Rows at ratio 1 that see so many entries; block b of row r is block 1000 r + b of the pool."""
    numbers = torch.arange(len(visible))
    tables = numbers.unsqueeze(1) * 1000 + torch.arange(blocks)
    return Rows(torch.tensor(visible).to(DEVICE) - 1, numbers.to(DEVICE), tables.to(DEVICE), 1)


def expected(scores: Tensor, numbers: Tensor, most: int) -> list[int]:
    """By a full sort: larger first, the smaller number first among equals; neither -inf nor NaN is chosen."""
    pairs = zip(scores.tolist(), numbers.tolist(), strict=True)
    kept = sorted(((-s, n) for s, n in pairs if s > -math.inf and n >= 0))
    return sorted(n for _, n in kept[:most])


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_small_rows_give_the_set_of_a_full_sort(data: st.DataObject) -> None:
    values = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.5, 1e-40, -1e-40, 3e38, math.inf, -math.inf, math.nan])
    count, most = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 24))
    rows = data.draw(st.lists(st.lists(values, min_size=count, max_size=count), min_size=1, max_size=3))
    visible = [data.draw(st.integers(0, count)) for _ in rows]
    scores = torch.nn.functional.pad(torch.tensor(rows), (0, -count % 16), value=math.nan)
    chosen, slots, bias = select(scores.to(DEVICE), None, rows_of(visible, 1), count, most)
    for row, seen in enumerate(visible):
        want = expected(scores[row, :seen], torch.arange(seen), most)
        assert chosen[row].tolist() == want + [-1] * (most - len(want))
        assert slots[row].tolist() == [row * 128000 + n for n in want] + [-1] * (most - len(want))
        assert bias[row].tolist() == [0.0] * len(want) + [-math.inf] * (most - len(want))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_listed_numbers_in_any_order(seed: int, count: int, most: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(500, generator=generator)[:count].to(torch.int32)
    numbers[torch.rand(count, generator=generator) < 0.2] = -1
    scores = torch.randint(levels, (1, count), generator=generator).to(torch.float32)
    chosen, _, _ = select(scores.to(DEVICE), numbers.unsqueeze(0).to(DEVICE), rows_of([1], 4), count, most)
    want = expected(scores[0], numbers, most)
    assert sorted(n for n in chosen[0].tolist() if n >= 0) == want


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("most", [3, 40])
def test_long_rows_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch, most: int, *, ties: bool) -> None:
    """With pieces of 128 scores, two and three levels of them."""
    monkeypatch.setattr(selection, "PIECE", 128)
    generator = torch.Generator().manual_seed(most)
    scores = torch.randn(2, 1000, generator=generator)
    scores = (scores * 2).round() if ties else scores
    visible = [1000, 517]
    chosen, _, _ = select(scores.to(DEVICE), None, rows_of(visible, 8), 1000, most)
    for row, seen in enumerate(visible):
        want = expected(scores[row, :seen], torch.arange(seen), most)
        assert [n for n in chosen[row].tolist() if n >= 0] == want


@pytest.mark.parametrize("most", [2, 7])
def test_groups_count_by_their_largest_and_the_newest_always(most: int) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(6, (4, 80), generator=generator).to(torch.float32)
    visible = [80, 33, 8, 0]
    chosen, _, _ = select(scores.to(DEVICE), None, rows_of(visible, 1), 10, most, group=8)
    for row, seen in enumerate(visible):
        groups = -(-seen // 8)
        best = torch.tensor([float(scores[row, 8 * g : min(8 * g + 8, seen)].max()) for g in range(groups)])
        best[groups - 1 : groups] = 1e9
        assert [n for n in chosen[row].tolist() if n >= 0] == expected(best, torch.arange(groups), most)
