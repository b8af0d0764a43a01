"""Every recorded case of repair gives the wanted result, however the output is cut into chunks."""

import json
from pathlib import Path
from typing import Any

import pytest

import deepseek_recipe as recipe

from .case_files import Case, folder_cases, packed_cases
from .request_runner import TokenizerOf

CASES = packed_cases("repairs")


def chunkings(given: dict[str, Any]) -> list[list[recipe.InferenceChunk]]:
    if given.get("token_chunks"):
        return [[recipe.InferenceChunk.tokens(ids) for ids in given["token_chunks"]]]
    text = given["model_output"]
    sizes = [len(text) if size == "whole" else size for size in given["chunk_sizes_chars"]]
    return [[recipe.InferenceChunk.text(text[i : i + n], 1) for i in range(0, len(text), n)] for n in sizes]


def result(given: dict[str, Any], chunks: list[recipe.InferenceChunk], tokenizer_of: TokenizerOf) -> dict[str, Any]:
    """The message that comes out, in the shape of the wanted result."""
    converted = recipe.ChatCompletionRequest(given["body"]).convert(recipe.ConversionOptions())
    options = dict(given["parsing"])
    if isinstance(options.get("thinking_initial_stage"), str):
        options["thinking_initial_stage"] = recipe.ThinkingInitialStage[options["thinking_initial_stage"]]
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(converted, "ID", "MODEL"),
        recipe.ParsingOptions(repair=True, **options),
        tokenizer_of("v4") if given.get("token_chunks") else None,
    )
    events = []
    for chunk in chunks:
        if not processor.finished:
            events += processor.push(chunk)
    if given.get("finish") and not processor.finished:
        reasons = {reason.value: reason for reason in recipe.InferenceFinishReason}
        events += processor.push(recipe.InferenceChunk.finish(reasons[given["finish"]]))
    events += processor.finish()
    response: Any = recipe.ChatCompletionResponse("ID", "MODEL", 0, 0, 0)
    for event in events:
        response.accumulate(event)
    got = json.loads(response.to_json())
    choice = got["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    return {
        "content": choice["message"]["content"],
        "reasoning_content": choice["message"].get("reasoning_content") or None,
        "tool_calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        "finish_reason": choice["finish_reason"],
        "warnings": [warning.partition(":")[0] for warning in processor.warnings],
        "completion_tokens": got["usage"]["completion_tokens"],
    }


def check(case: Case, tokenizer_of: TokenizerOf) -> None:
    wanted = case["wanted_result"]
    for chunks in chunkings(case["input"]):
        got = result(case["input"], chunks, tokenizer_of)
        for name in ("content", "finish_reason"):
            assert got[name] == wanted[name]
        assert got["reasoning_content"] == (wanted["reasoning_content"] or None)
        assert [name for name, _ in got["tool_calls"]] == [call["name"] for call in wanted["tool_calls"]]
        for (_, arguments), call in zip(got["tool_calls"], wanted["tool_calls"], strict=True):
            if "arguments_object" in call:
                members = json.loads(arguments, object_pairs_hook=list)
                assert len({name for name, _ in members}) == len(members)
                assert json.loads(arguments) == call["arguments_object"]
            else:
                assert arguments == call["arguments"]
        assert set(wanted["warnings"]) <= set(got["warnings"])
        assert bool(got["warnings"]) == bool(wanted["warnings"])
        assert got["completion_tokens"] == wanted.get("completion_tokens", got["completion_tokens"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: Case, tokenizer_of: TokenizerOf) -> None:
    check(case, tokenizer_of)


def test_cases_of_a_folder(extra_data: Path, tokenizer_of: TokenizerOf) -> None:
    for case in folder_cases(extra_data / "vectors" / "recipe_repair"):
        check(case, tokenizer_of)
