"""`LLM.chat` held to tools and response formats: every answer of a random model parses and validates."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepinfer import LLM, RequestError, SamplingParams
from deepinfer.engine.grammar.tool_calls import MARKUP_TOKEN
from deepinfer.model.tiny import Family, write_tiny

QUESTION = [{"role": "user", "content": "How is the weather in json?"}]
PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Bergen", "Tromsø"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days", "exact"],
    "additionalProperties": False,
}
CLOCK = {
    "type": "object",
    "properties": {"zone": {"type": "string", "pattern": "^UTC[+-][0-9]$"}},
    "required": ["zone"],
    "additionalProperties": False,
}
PARAMETERS = {"weather": PLACE, "clock": CLOCK}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in PARAMETERS.items()]
NAMED = {"type": "function", "function": {"name": "clock"}}
BAD = {"type": "object", "properties": {"x": {"type": "no such type"}}}
SEEDS = range(2)


@pytest.fixture(scope="module", params=["deepseek_v41", "deepseek_v4"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    family: Family = request.param
    folder: Path = tmp_path_factory.mktemp("tiny") / family
    write_tiny(folder, family=family)
    return LLM(folder, accelerator="cpu", max_num_seqs=4, max_model_len=2048)


def drawn(seed: int, max_tokens: int = 400) -> SamplingParams:
    return SamplingParams(temperature=1, seed=seed, max_tokens=max_tokens)


def leaning(llm: LLM, seed: int, *texts: str, max_tokens: int = 250) -> SamplingParams:
    """Drawn with a leaning to the tokens `texts`, so that what has no bound is begun and ended soon."""
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.token_to_id(text) for text in texts]
    return SamplingParams(temperature=1, seed=seed, max_tokens=max_tokens, logit_bias=dict.fromkeys(ids, 9.0))


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("choice", "names"), [("required", set(PARAMETERS)), (NAMED, {"clock"})], ids=["required", "named"]
)
def test_a_forced_call_names_a_tool_and_validates(llm: LLM, choice: Any, names: set[str], seed: int) -> None:
    stream = llm.chat(QUESTION, TOOLS, leaning(llm, seed, "/"), stream=True, thinking=False, tool_choice=choice).read()
    assert stream.completion.finish_reason == "stop"
    assert stream.message.tool_calls
    for call in stream.message.tool_calls:
        assert call.name in names
        jsonschema.validate(json.loads(call.arguments), PARAMETERS[call.name])


def test_constrained_calls_that_may_be_left_out(llm: LLM) -> None:
    """`constrain=True` with the choice "auto": text is free, what becomes a call is held to its tool."""
    led = leaning(llm, 1, "<", MARKUP_TOKEN, "/")
    stream = llm.chat(QUESTION, TOOLS, led, stream=True, thinking=False, constrain=True).read()
    calls = stream.message.tool_calls or ()
    assert calls
    for call in calls if stream.completion.finish_reason == "stop" else calls[:-1]:
        jsonschema.validate(json.loads(call.arguments), PARAMETERS[call.name])


@pytest.mark.parametrize(("seed", "constrain"), [(0, None), (1, True)])
def test_a_schema_holds_the_content(llm: LLM, seed: int, constrain: bool | None) -> None:
    choices = {"response_format": form(PLACE), "constrain": constrain, "thinking": False}
    message = llm.chat(QUESTION, None, drawn(seed), **choices)
    jsonschema.validate(json.loads(message.content or ""), PLACE)


def test_a_schema_lets_the_model_think_first(llm: LLM) -> None:
    """The tiny model never closes its reasoning by itself, so it is led to: the constraint begins behind."""
    led = leaning(llm, 1, "</think>")
    stream = llm.chat(QUESTION, None, led, stream=True, thinking=True, response_format=form(PLACE)).read()
    assert stream.message.reasoning_content
    jsonschema.validate(json.loads(stream.message.content or ""), PLACE)


def test_a_json_object(llm: LLM) -> None:
    """Of free JSON a random model finds no end, so that what it has is to be the beginning of an object."""
    for seed in SEEDS:
        answer = {"response_format": {"type": "json_object"}, "thinking": False}
        stream = llm.chat(QUESTION, None, drawn(seed, 30), stream=True, **answer).read()
        content = stream.message.content or ""
        assert content.lstrip().startswith("{")
        if stream.completion.finish_reason == "stop":
            assert isinstance(json.loads(content), dict)


def test_constrain_false_leaves_the_answer_free(llm: LLM) -> None:
    free = llm.chat(QUESTION, None, drawn(0, 30), thinking=False)
    asked = llm.chat(QUESTION, None, drawn(0, 30), thinking=False, constrain=False, response_format={"type": "text"})
    assert asked.content == free.content
    wild = llm.chat(QUESTION, None, drawn(0, 30), thinking=False, constrain=False, response_format=form(PLACE))
    with pytest.raises(json.JSONDecodeError):
        json.loads(wild.content or "")


@pytest.mark.parametrize(
    "choices",
    [
        {"response_format": form(BAD)},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
    ],
    ids=["schema", "parameters", "no schema", "no such tool"],
)
def test_what_cannot_be_held_to_is_refused(llm: LLM, choices: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        llm.chat(QUESTION, sampling_params=drawn(0), thinking=False, **choices)
    assert llm.chat(QUESTION, None, drawn(0, 5), thinking=False).role == "assistant"


def test_two_constraints_are_refused(llm: LLM) -> None:
    both = SamplingParams(max_tokens=5, structured={"json_object": True})
    with pytest.raises(RequestError, match="leave one out"):
        llm.chat(QUESTION, TOOLS, both, thinking=False, tool_choice="required")
