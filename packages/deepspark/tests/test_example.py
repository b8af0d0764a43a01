"""The worked example with a Hugging Face target, on tiny random weights."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from deepspark.decode import GenerationSettings, SpeculativeDecoder
from deepspark.drafter import DrafterSettings
from deepspark.policy import Fixed

EXAMPLE = Path(__file__).parents[1] / "examples" / "qwen3.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("qwen3_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["qwen3_example"] = module
    spec.loader.exec_module(module)
    return module


def test_texts_with_and_without_drafts_are_equal(example: ModuleType) -> None:
    target, drafter = example.tiny_pair()
    example.train(target, drafter, steps=60)
    prompts = [[1, 2, 3], [7, 8]]
    settings = [GenerationSettings(seed=seed, max_new=16) for seed in (1, 2)]
    for rule in ("greedy", "match"):
        model = example.HuggingFaceTarget(target, drafter.config.target_layer_ids)
        plain = SpeculativeDecoder(model, None, rule=rule).generate(prompts, settings)
        drafting = DrafterSettings(rule=rule, policy=Fixed(4), parking=None)
        drafted = example.make_decoder(target, drafter, 2, drafting).generate(prompts, settings)
        assert [each.tokens for each in drafted] == [each.tokens for each in plain]
        steps = sum(len(each.accepted_lengths) for each in drafted)
        assert steps < sum(len(each.tokens) for each in plain)
