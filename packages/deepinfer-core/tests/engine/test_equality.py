"""The equalities of the engine over the real tiny model, in float64 and without quantisers: the logic alone.

Chunked = whole prefill, a batch of one = a batch of many, any order of arrival, preempted = not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.tiny import write_tiny
from deepinfer.model.weights import Weights

from .checker import EXAMPLES, drain, engine_config, tokens_of

PRECISION = Precision(torch.float64, round_inputs=False, cache="model")
FAMILIES = ["deepseek_v41", "deepseek_v4"]


@dataclass(frozen=True)
class Loaded:
    """A tiny model, ready for engines of any configuration."""

    model_config: ModelConfig
    model: DeepSeek
    ops: Ops

    def run(self, config: EngineConfig, requests: list[Request]) -> list[tuple[int, ...]]:
        """Tokens of each request, all added before the first step."""
        engine = Engine(config, self.model_config, self.model, self.ops, CpuAccelerator(), None)
        ids = [engine.add(request) for request in requests]
        gained = drain(engine)
        return [tokens_of(gained[number]) for number in ids]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    models: dict[str, Loaded] = {}

    def load(family: str) -> Loaded:
        if family not in models:
            folder: Path = tmp_path_factory.mktemp("tiny") / family
            write_tiny(folder, family=family)  # type: ignore[arg-type]
            checkpoint, accelerator = Checkpoint(folder), CpuAccelerator()
            ops = accelerator.ops(PRECISION)
            model = DeepSeek(checkpoint.config, Weights(checkpoint, ops, accelerator), ops)
            models[family] = Loaded(checkpoint.config, model, ops)
        return models[family]

    return load


def roomy(model: ModelConfig) -> EngineConfig:
    replay = model.window + 12 if model.first_decoder_layer is not None else None
    return engine_config(precision=PRECISION, decoder_replay=replay)


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
    config = roomy(tiny.model_config)
    whole = tiny.run(replace(config, max_num_batched_tokens=1000), requests)
    assert tiny.run(replace(config, max_num_batched_tokens=budget, max_num_seqs=6), requests) == whole


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES // 16)
@given(requests=request_lists(8), order=st.randoms(use_true_random=False))
def test_a_batch_of_one_is_a_batch_of_many_in_any_order(
    loaded: Callable[[str], Loaded], family: str, requests: list[Request], order: object
) -> None:
    tiny = loaded(family)
    config = roomy(tiny.model_config)
    places = list(range(len(requests)))
    order.shuffle(places)  # type: ignore[attr-defined]
    many = tiny.run(config, [requests[place] for place in places])
    alone = [tiny.run(config, [request])[0] for request in requests]
    assert many == [alone[place] for place in places]
    assert tiny.run(replace(config, max_num_seqs=1), requests) == alone


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES // 25)
@given(seed=st.integers(0, 1000), budget=st.sampled_from([8, 40, 512]))
def test_preempted_is_not_preempted(loaded: Callable[[str], Loaded], family: str, seed: int, budget: int) -> None:
    tiny = loaded(family)
    config = roomy(tiny.model_config)
    generator = np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [Request(generator.integers(30, 255, length).tolist(), params) for length in (110, 100, 120, 20)]
    starved = replace(config, blocks=4, max_model_len=300, max_num_batched_tokens=budget, window_blocks=7)
    engine = Engine(starved, tiny.model_config, tiny.model, tiny.ops, CpuAccelerator(), None)
    ids = [engine.add(request) for request in requests]
    gained = drain(engine)
    assert [tokens_of(gained[number]) for number in ids] == tiny.run(config, requests)
