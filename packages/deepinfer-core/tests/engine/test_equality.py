"""The equalities of the engine over the real tiny model, in float64 and without quantisers: the logic alone.

Chunked = whole prefill, a batch of one = a batch of many, any order of arrival, preempted = not.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.config import EngineConfig
from deepinfer.engine.request import Request, SamplingParams

from .checker import EXAMPLES, tokens_of
from .loaded import Loaded

FAMILIES = ["deepseek_v41", "deepseek_v4"]


def tokens(tiny: Loaded, config: EngineConfig, requests: list[Request]) -> list[tuple[int, ...]]:
    """Tokens of each request, all added before the first step."""
    return [tokens_of(parts) for parts in tiny.run(config, requests)]


@st.composite
def request_lists(draw: st.DrawFn, most: int = 6) -> list[Request]:
    lengths = draw(st.lists(st.one_of(st.integers(1, 30), st.integers(60, 150)), min_size=1, max_size=most))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    sampled = draw(st.booleans())
    return [
        Request(
            generator.integers(30, 255, length).tolist(),
            SamplingParams(temperature=0.8 if sampled else 0, max_tokens=6, ignore_eos=True),
            index=index,
        )
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES // 16)
@given(requests=request_lists(), budget=st.integers(6, 64))
def test_chunked_prefill_is_whole_prefill(
    loaded: Callable[[str], Loaded], family: str, requests: list[Request], budget: int
) -> None:
    tiny = loaded(family)
    config = tiny.config()
    whole = tokens(tiny, replace(config, max_num_batched_tokens=1000), requests)
    assert tokens(tiny, replace(config, max_num_batched_tokens=budget, max_num_seqs=6), requests) == whole


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES // 16)
@given(requests=request_lists(8), order=st.randoms(use_true_random=False))
def test_a_batch_of_one_is_a_batch_of_many_in_any_order(
    loaded: Callable[[str], Loaded], family: str, requests: list[Request], order: object
) -> None:
    tiny = loaded(family)
    config = tiny.config()
    places = list(range(len(requests)))
    order.shuffle(places)  # type: ignore[attr-defined]
    many = tokens(tiny, config, [requests[place] for place in places])
    alone = [tokens(tiny, config, [request])[0] for request in requests]
    assert many == [alone[place] for place in places]
    assert tokens(tiny, replace(config, max_num_seqs=1), requests) == alone


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES // 25)
@given(seed=st.integers(0, 1000), budget=st.sampled_from([8, 40, 512]))
def test_preempted_is_not_preempted(loaded: Callable[[str], Loaded], family: str, seed: int, budget: int) -> None:
    tiny = loaded(family)
    config = tiny.config()
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [Request(generator.integers(30, 255, length).tolist(), params) for length in (110, 100, 120, 20)]
    starved = replace(config, blocks=4, max_model_len=300, max_num_batched_tokens=budget, window_blocks=7)
    assert tokens(tiny, starved, requests) == tokens(tiny, config, requests)
