"""The prefix cache through the public API: golden numbers of the bounded replay, restarts, and what is told."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepinfer import LLM, SamplingParams
from deepinfer.accelerator.batch import Batch
from deepinfer.engine.batch_builder import Ahead
from deepinfer.engine.plan import Plan
from deepinfer.engine.request import Completion
from deepinfer.errors import ConfigError
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.tiny import write_tiny

V41 = ["v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth"]
PROMPT = [5 + (7 * i * i + i) % 190 for i in range(420)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("name", V41)
def test_encoder_replay_rows(
    name: str, golden_dir: Callable[[str], Path], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows behind a replay are those of the reference, whose hit may end inside of a block."""
    folder = golden_dir(name)
    facts: dict[str, Any] = json.loads((folder / "golden.json").read_text())
    replay = facts["encoder_replay"]
    ids, cached = facts["prompts"][replay["prompt"]], replay["cached"]
    llm = LLM(
        folder,
        accelerator=pytestconfig.getoption("--accelerator"),
        dtype="float32",
        kv_cache_dtype="model",
        decoder_replay="off",
        prefix_cache="replay",
        max_num_seqs=4,
        overlap=False,
    )
    other = [1 + (token + 1) % 200 for token in ids[cached : cached + 60]]
    llm.generate({"prompt_token_ids": [*ids[:cached], *other]}, SamplingParams(max_tokens=1))
    outputs: list[ModelOutput] = []
    build, run = llm.engine.builder.build, llm.engine.runner.run

    def build_all_rows(plan: Plan, ahead: Ahead | None = None) -> Batch:
        batch = build(plan, ahead)
        return replace(batch, logit_rows=torch.arange(len(batch.positions), device=batch.positions.device))

    def run_and_keep(batch: Batch) -> ModelOutput:
        outputs.append(run(batch))
        return ModelOutput(outputs[-1].logits[-1:], outputs[-1].hidden)

    monkeypatch.setattr(llm.engine.builder, "build", build_all_rows)
    monkeypatch.setattr(llm.engine.runner, "run", run_and_keep)
    done = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=1))[0]
    assert done.cache is not None
    assert (done.cache.mode, done.cache.hit) == ("replay", cached)
    assert done.cache.replayed == cached - replay["first_row"] == llm.model_config.window
    assert done.cache.computed == outputs[0].logits.shape[0] == len(ids) - replay["first_row"]
    rows = outputs[0].logits[replay["logits_rows_from"] - replay["first_row"] :].cpu()
    expected = load_file(folder / "golden.safetensors")["encoder_replay.logits"]
    assert rows.shape == expected.shape
    assert float((rows - expected).abs().max()) < 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("tiny") / family
            write_tiny(folders[family], family=family)  # type: ignore[arg-type]
        return folders[family]

    return make


def open_tiny(folder: Path, **changes: Any) -> LLM:
    return LLM(
        folder,
        accelerator="cpu",
        **{"dtype": "float64", "kv_cache_dtype": "model", "max_num_seqs": 4, "max_model_len": 1024, **changes},
    )


def ask(llm: LLM, prompt: list[int], **fields: object) -> Completion:
    return llm.generate({"prompt_token_ids": prompt, **fields}, GREEDY)[0]


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_a_conversation_survives_a_restart(family: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    cold = ask(open_tiny(tiny(family), prefix_cache="off"), PROMPT)
    first = open_tiny(tiny(family), prefix_cache_dir=tmp_path)
    assert ask(first, PROMPT).token_ids == cold.token_ids
    first.close()
    second = open_tiny(tiny(family), prefix_cache_dir=tmp_path)
    warm = ask(second, PROMPT)
    assert warm.token_ids == cold.token_ids
    assert warm.cache is not None
    assert warm.cache.hit == 384
    assert warm.num_cached_tokens >= 256
    second.close()


def test_files_of_another_model_are_not_used(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    first = open_tiny(tiny("deepseek_v41"), prefix_cache_dir=tmp_path)
    ask(first, PROMPT)
    first.close()
    other = tmp_path / "other"
    write_tiny(other)
    weights = next(other.glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-9] ^= 1
    weights.write_bytes(bytes(changed))
    for changes in ({"folder": other}, {"folder": tiny("deepseek_v41"), "dtype": "float32"}):
        llm = open_tiny(changes.pop("folder"), prefix_cache_dir=tmp_path, **changes)  # type: ignore[arg-type]
        assert ask(llm, PROMPT).num_cached_tokens == 0
        llm.close()


def test_damaged_files_cost_time_and_nothing_else(
    tiny: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_tiny(tiny("deepseek_v41"), prefix_cache_dir=tmp_path)
    cold = ask(first, PROMPT)
    first.close()
    for path in tmp_path.glob("*/*.piece"):
        file = bytearray(path.read_bytes())
        file[len(file) // 2] ^= 8
        path.write_bytes(bytes(file))
    second = open_tiny(tiny("deepseek_v41"), prefix_cache_dir=tmp_path)
    with caplog.at_level(logging.WARNING):
        again = ask(second, PROMPT)
    assert again.token_ids == cold.token_ids
    assert again.num_cached_tokens == 0
    assert "cannot be used and is removed" in caplog.text
    second.close()


def test_each_request_chooses_and_is_told(tiny: Callable[[str], Path]) -> None:
    llm = open_tiny(tiny("deepseek_v41"))
    ask(llm, PROMPT, cache_salt="a")
    uses = [
        ask(llm, PROMPT, **fields).cache
        for fields in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"prefix_cache": "off"}, {"prefix_cache": "replay"})
    ]
    assert [use and (use.mode, use.hit, use.why) for use in uses] == [
        ("exact", 384, ""),
        ("exact", 0, "other salt"),
        ("off", 0, "prefix_cache is off"),
        ("replay", 0, "other salt"),
    ]
    refused = ask(llm, PROMPT, prefix_cache="on")
    assert refused.finish_reason == "error"
    assert "prefix_cache must be" in str(refused.error)
    assert refused.cache is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefix_cache": "on"}, 'prefix_cache must be "exact", "replay" or "off"'),
        ({"prefix_cache_host_bytes": -1}, "prefix_cache_host_bytes must be an integer, at least 0"),
        ({"prefix_cache_disk_bytes": 1.5}, "prefix_cache_disk_bytes must be an integer"),
        ({"prefix_cache_dir": 5}, "prefix_cache_dir must be a folder or None"),
        ({"prefix_cache": "off", "prefix_cache_dir": "x"}, "keeps nothing"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM("tiny", accelerator="cpu", **options)
