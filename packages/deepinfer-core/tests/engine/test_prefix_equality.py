"""A prefix hit = a cold run over the real model, in float64 and without quantisers: logits and tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.config import EngineConfig
from deepinfer.engine.request import CacheUse, Progress, Request, SamplingParams

from .checker import EXAMPLES, drain, tokens_of
from .loaded import Loaded, rows, text

MODELS = ["deepseek_v41", "deepseek_v4", "v41-c-f32", "v4-g"]
BOUND = 1e-9
"""Of log-probabilities, which are handed out in float32 of float64 sums: the logic alone."""


def cold(tiny: Loaded, request: Request, config: EngineConfig) -> list[Progress]:
    """What a request becomes alone, in an engine without a prefix cache."""
    return tiny.run(replace(config, prefix_cache="off"), [replace(request, prefix_cache=None)])[0]


def same(warm: list[Progress], alone: list[Progress]) -> CacheUse:
    """Check that tokens and log-probabilities are those of the cold run; return what the cache did."""
    assert warm[-1].error is None
    assert tokens_of(warm) == tokens_of(alone)
    assert float((rows(warm) - rows(alone)).abs().max()) < BOUND
    assert warm[-1].cache is not None
    return warm[-1].cache


@dataclass(frozen=True)
class Shared:
    """A prompt that shares its first `shared` tokens with an earlier one and has `more` of its own."""

    shared: int
    more: int
    generated: int
    budget: int
    temperature: float


CASES = st.builds(
    Shared,
    shared=st.sampled_from([0, 100, 127, 128, 129, 200, 255, 256, 257, 300, 400]),
    more=st.sampled_from([1, 2, 60, 128, 170]),
    generated=st.sampled_from([1, 5]),
    budget=st.sampled_from([40, 500]),
    temperature=st.sampled_from([0.0, 0.9]),
)


@pytest.mark.parametrize(
    ("name", "margin"),
    [(name, margin) for name in MODELS for margin in ((None, 0, 12) if "v41" in name else (None,))],
)
@settings(max_examples=EXAMPLES // 33)
@given(case=CASES)
def test_a_hit_is_a_cold_run(loaded: Callable[[str], Loaded], name: str, margin: int | None, case: Shared) -> None:
    """A prompt, the same again, and one that shares a part of it; `margin` None = no decoder replay."""
    tiny = loaded(name)
    kept = None if margin is None else tiny.model_config.window + margin
    engine = tiny.engine(tiny.config(decoder_replay=kept, max_num_batched_tokens=case.budget, max_model_len=1024))
    params = SamplingParams(
        temperature=case.temperature, max_tokens=case.generated, ignore_eos=True, logprobs=-1, seed=7
    )
    first = text(1, 420)
    uses: list[CacheUse] = []
    for prompt in (first, first, [*first[: case.shared], *text(2, case.more)]):
        request = Request(prompt, params)
        number = engine.add(request)
        uses.append(same(drain(engine)[number], cold(tiny, request, engine.config)))
    assert uses[1].hit == 384
    assert uses[1].hit - uses[1].replayed >= 256 if kept else uses[1].replayed == 0
    assert uses[2].hit == min(case.shared, case.shared + case.more - 1) // 128 * 128


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_is_a_cold_run(loaded: Callable[[str], Loaded], name: str) -> None:
    """Each turn goes on behind what the last one generated."""
    tiny = loaded(name)
    engine = tiny.engine(tiny.config(max_model_len=1200))
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True, logprobs=-1)
    prompt, saved = text(5, 200), []
    for turn in range(3):
        request = Request(prompt, params)
        number = engine.add(request)
        gained = drain(engine)[number]
        used = same(gained, cold(tiny, request, engine.config))
        saved.append(used.hit - used.replayed)
        prompt = [*prompt, *tokens_of(gained), *text(turn, 30)]
    assert all(later > earlier for earlier, later in pairwise(saved))
    assert saved[-1] >= 256


@pytest.mark.parametrize("name", MODELS)
def test_prompt_log_probs_are_those_of_a_cold_run(loaded: Callable[[str], Loaded], name: str) -> None:
    """Every row is wanted, so that every row runs; what is shared is memory."""
    tiny = loaded(name)
    engine = tiny.engine(tiny.config(decoder_replay=None, max_num_batched_tokens=100))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    request = Request(text(1, 300), params)
    for _ in range(2):
        number = engine.add(request)
        warm, alone = drain(engine)[number], cold(tiny, request, engine.config)
        used = same(warm, alone)
        parts = [[part.prompt_logprobs for part in run if part.prompt_logprobs is not None] for run in (warm, alone)]
        left, right = (torch.cat(part) for part in parts)  # type: ignore[arg-type]
        assert float((left - right).abs().max()) < BOUND
    assert (used.hit, used.replayed, used.computed) == (256, 256, 300)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=EXAMPLES // 50)
@given(seed=st.integers(0, 1000), budget=st.sampled_from([24, 200]))
def test_preempted_and_sharing_is_a_cold_run(
    loaded: Callable[[str], Loaded], name: str, seed: int, budget: int
) -> None:
    """More requests than fit, with one first part: they wait, are preempted, and go on from each other's blocks."""
    tiny = loaded(name)
    sizes = {"max_num_batched_tokens": budget, "blocks": 6, "window_blocks": 8, "snapshots": 2, "max_num_seqs": 5}
    engine = tiny.engine(tiny.config(max_model_len=450, **sizes))
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=-1)
    requests = [Request([*text(9, 150), *text(seed + i, 40 + 9 * i)], params) for i in range(3)]
    ids = [engine.add(request) for request in requests]
    gained = drain(engine)
    for number, request in zip(ids, requests, strict=True):
        same(gained[number], cold(tiny, request, engine.config))
