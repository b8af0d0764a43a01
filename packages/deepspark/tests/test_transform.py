import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspark.errors import ConfigError, InputError
from deepspark.penalties import Penalties, penalize, row_counts, row_minimum_mask
from deepspark.transform import SamplingSettings, SettingsTable, argmax, transform, transform_rows

SETTINGS = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)


@given(st.integers(0, 10**6), st.lists(SETTINGS, min_size=1, max_size=5))
def test_a_mixed_batch_is_its_rows(seed: int, settings: list[SamplingSettings]) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(settings), 8)) * 2)
    together = transform_rows(logits, SettingsTable.of(settings))
    for row, each in enumerate(settings):
        torch.testing.assert_close(together[row], transform(logits[row], each), rtol=0, atol=1e-12)


@given(st.integers(0, 10**6), SETTINGS)
def test_laws_sum_to_one_and_keep_the_likeliest(seed: int, settings: SamplingSettings) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(6, 8)) * 2)
    law = transform(logits, settings)
    torch.testing.assert_close(law.sum(-1), torch.ones(6, dtype=law.dtype))
    assert bool((law.gather(1, argmax(logits)[:, None]) > 0).all())
    if settings.top_k:
        assert bool(((law > 0).sum(-1) <= settings.top_k).all())


def test_ties_go_to_the_lowest_index() -> None:
    assert argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]
    assert transform(torch.tensor([1.0, 3.0, 3.0]), SamplingSettings(temperature=0)).tolist() == [0, 1, 0]


def test_the_filter_order_changes_the_law() -> None:
    logits = torch.tensor([0.30, 0.25, 0.24, 0.21]).log()
    first_p = transform(logits, SamplingSettings(top_p=0.6, top_k=3, order="p_k"))
    first_k = transform(logits, SamplingSettings(top_p=0.6, top_k=3, order="k_p"))
    assert int((first_p > 0).sum()) == 3
    assert int((first_k > 0).sum()) == 2


def test_refusals() -> None:
    with pytest.raises(InputError, match="allows no token"):
        transform(torch.zeros(3), SamplingSettings(), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(InputError, match=r"banned tokens must lie in 0\.\.2"):
        transform(torch.zeros(3), SamplingSettings(ban=(3,)))
    with pytest.raises(ConfigError, match="one batch needs one filter order"):
        SettingsTable.of([SamplingSettings(), SamplingSettings(order="k_p")])
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0}):
        with pytest.raises(ConfigError):
            SamplingSettings(**wrong)  # type: ignore[arg-type]


def test_rows_count_the_drafts_before_them() -> None:
    counts = row_counts(torch.tensor([1, 0, 0]), torch.tensor([2, 2]))
    assert counts.tolist() == [[1, 0, 0], [1, 0, 1], [1, 0, 2]]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    counts = torch.tensor([[2, 0, 0]])
    in_prompt = torch.tensor([False, True, False])
    got = penalize(logits, counts, in_prompt, Penalties(repetition=2.0, presence=0.5, frequency=0.25))
    assert got.tolist() == [[2.0 / 2 - 0.5 - 0.5, -4.0, 1.0]]


def test_stops_are_banned_only_in_early_rows() -> None:
    allowed = row_minimum_mask(3, 5, torch.tensor([False, True]), 4)
    assert allowed.tolist() == [[True, False], [True, False], [True, True], [True, True]]
