"""`LLM` on every golden checkpoint: the numbers and tokens of an independent reference, through the public API.

`pytest --accelerator NAME` runs them on another device than the CPU.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.accelerator.batch import Batch
from deepinfer.engine.plan import Plan
from deepinfer.model.deepseek import ModelOutput

V41 = ["v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth"]


@pytest.fixture(scope="session")
def opened(
    golden_dir: Callable[[str], Path], pytestconfig: pytest.Config
) -> Callable[..., tuple[LLM, dict[str, Any], dict[str, Tensor]]]:
    @cache
    def make(
        name: str, kv_cache_dtype: str = "model", decoder_replay: int | str = "off"
    ) -> tuple[LLM, dict[str, Any], dict[str, Tensor]]:
        folder = golden_dir(name)
        llm = LLM(
            str(folder),
            accelerator=pytestconfig.getoption("--accelerator"),
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            decoder_replay=decoder_replay,
            max_num_seqs=4,
        )
        return llm, json.loads((folder / "golden.json").read_text()), load_file(folder / "golden.safetensors")

    return make


@pytest.mark.parametrize("name", [*V41, "v4-g"])
def test_prompt_log_probs_and_greedy_tokens(name: str, opened: Callable[..., Any]) -> None:
    llm, facts, tensors = opened(name)
    params = SamplingParams(temperature=0, max_tokens=32, prompt_logprobs=-1, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": ids} for ids in facts["prompts"]], params)
    for number, completion in enumerate(done):
        assert completion.error is None
        assert list(completion.token_ids) == facts["greedy"][number]
        expected = torch.log_softmax(tensors[f"logits.{number}"].double(), -1)
        rows = completion.prompt_logprobs
        assert isinstance(rows, Tensor)
        assert rows.dtype == torch.float32
        assert rows.shape == (len(facts["prompts"][number]), expected.shape[1])
        first = facts["logits_first_row"][number]
        assert float((rows[first:].double() - expected).abs().max()) < 1e-4


def test_quantised_cache(opened: Callable[..., Any]) -> None:
    """kv_cache_dtype="auto" stores the model's records: within 2e-3 rms of the reference that rounds as they do."""
    llm, facts, tensors = opened("v41-s-smooth", "auto")
    done = llm.generate(facts["prompts"][0], SamplingParams(max_tokens=1, prompt_logprobs=-1))[0]
    expected = torch.log_softmax(tensors["logits.0@kv_quant"].double(), -1)
    assert isinstance(done.prompt_logprobs, Tensor)
    difference = done.prompt_logprobs[-expected.shape[0] :].double() - expected
    assert float(difference.square().mean().sqrt()) < 2e-3


@pytest.mark.parametrize("name", V41)
def test_decoder_replay_rows(name: str, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that a bounded decoder does compute, as they leave `ModelRunner`: tokens alone would prove nothing."""
    replay = opened(name)[1]["decoder_replay"]
    ids = opened(name)[1]["prompts"][replay["prompt"]]
    llm, _, tensors = opened(name, "model", len(ids) - replay["first_row"])
    outputs: list[ModelOutput] = []
    build, run = llm.engine.builder.build, llm.engine.runner.run

    def build_all_rows(plan: Plan, *known: object) -> Batch:
        """The engine's batch, with logits of every decoder row instead of the last."""
        batch = build(plan, *known)
        rows = batch.positions if batch.decoder_rows is None else batch.decoder_rows
        return replace(batch, logit_rows=torch.arange(len(rows), device=rows.device))

    def run_and_keep(batch: Batch) -> ModelOutput:
        outputs.append(run(batch))
        last = outputs[-1].logits[-1:]
        return ModelOutput(last, outputs[-1].hidden)

    monkeypatch.setattr(llm.engine.builder, "build", build_all_rows)
    monkeypatch.setattr(llm.engine.runner, "run", run_and_keep)
    done = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))[0]
    assert done.decoder_replay == len(ids) - replay["first_row"]
    assert list(done.token_ids) == replay["greedy"]
    rows = outputs[0].logits[-24:].cpu()
    assert rows.shape[0] == 24
    assert float((rows - tensors["decoder_replay.logits"]).abs().max()) < 1e-4
