"""`LLM(draft=...)` on every golden checkpoint: its drafts token for token, and the text of decoding without them."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.model.tiny import write_tiny

V41 = ["v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth"]


@pytest.fixture(scope="session")
def opened(golden_dir: Callable[[str], Path]) -> Callable[..., tuple[LLM, dict[str, Any]]]:
    @cache
    def make(name: str, **options: Any) -> tuple[LLM, dict[str, Any]]:
        folder = golden_dir(name)
        choices = {"dtype": "float32", "kv_cache_dtype": "model", "decoder_replay": "off", "max_num_seqs": 4}
        llm = LLM(str(folder), accelerator="cpu", **(choices | options))
        return llm, json.loads((folder / "golden.json").read_text())

    return make


def proposed(llm: LLM, ids: list[int], anchor: int) -> list[int]:
    """What the engine proposes behind `ids` and `anchor`: it reads the ids, and is made to draw the anchor."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    done = llm.generate({"prompt_token_ids": ids}, replace(params, max_tokens=1))[0]
    assert done.token_ids == (anchor,)
    steps = llm.generate({"prompt_token_ids": ids}, params, stream=True)
    next(steps)
    table = engine.sampler._table
    row = next(row for row, sequence in enumerate(table.sequences) if sequence is not None)
    drafts: list[int] = table.draft_tokens[row].tolist()
    steps.close()
    engine.step()
    return drafts


@pytest.mark.parametrize("name", V41)
def test_golden_drafts_through_the_engine(name: str, opened: Callable[..., Any]) -> None:
    llm, facts = opened(name, draft="on", draft_rule="greedy")
    for draft in facts["drafts"]:
        ids = (facts["prompts"][draft["prompt"]] + facts["greedy"][draft["prompt"]])[: draft["context"]]
        assert proposed(llm, ids, draft["token"]) == draft["tokens"]


@pytest.mark.parametrize("name", V41)
def test_golden_drafts_after_replay(name: str, opened: Callable[..., Any]) -> None:
    _, facts = opened(name, draft="on", draft_rule="greedy")
    replay = facts["decoder_replay"]
    ids = facts["prompts"][replay["prompt"]]
    llm, _ = opened(name, draft="on", draft_rule="greedy", decoder_replay=len(ids) - replay["first_row"])
    assert proposed(llm, ids, replay["greedy"][0]) == replay["draft_tokens"]


@pytest.mark.parametrize("rule", ["match", "greedy", "chain", "block"])
@pytest.mark.parametrize("name", V41)
def test_greedy_texts_are_those_without_drafts(name: str, rule: str, opened: Callable[..., Any]) -> None:
    llm, facts = opened(name, draft="on", draft_rule=rule)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": ids} for ids in facts["prompts"]], params)
    assert [list(completion.token_ids) for completion in done] == facts["greedy"]
    for completion in done:
        assert completion.drafts is not None
        assert completion.drafts.verified > 0
        assert 0 <= completion.drafts.accepted <= completion.drafts.verified <= completion.drafts.proposed


def test_requests_with_rules_draft_too() -> None:
    choices = {"accelerator": "cpu", "dtype": "float64", "kv_cache_dtype": "model", "max_num_seqs": 4}
    plain, drafting = LLM("tiny", **choices), LLM("tiny", draft="on", **choices)
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True, frequency_penalty=0.5, logprobs=2, logprobs_mode="processed"),
        SamplingParams(max_tokens=20, structured={"regex": "[a-f]{5,9}"}),
    ]
    expected = plain.generate(["one", "two", "three"], params)
    found = drafting.generate(["one", "two", "three"], params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    reports = [one.drafts for one in found if one.drafts is not None]
    # A random model's drafts hardly ever begin as the pattern does, and such a draft is not even judged.
    assert [report.proposed > 0 for report in reports] == [True, True, True]
    assert [report.verified > 0 for report in reports[:2]] == [True, True]
    assert all(one.drafts is None for one in expected)


def test_auto_without_draft_stages_says_so_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny(tmp_path / "v4", family="deepseek_v4")
    llm = LLM(tmp_path / "v4", accelerator="cpu", draft="auto")
    assert "no drafts: this deepseek_v4 checkpoint has no draft stages" in caplog.text
    (done,) = llm.generate("a", SamplingParams(max_tokens=2))
    assert done.error is None
    assert done.drafts is None
