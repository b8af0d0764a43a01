"""Hostile and clumsy input ends in a clear error that says where, in bounded time and memory."""

import json
import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import deepseek_recipe as recipe

USER = {"role": "user", "content": "x"}
MEGABYTE = 1 << 20


def chat(**members: Any) -> dict[str, Any]:
    return {"model": "DeepSeek-V4.1-Flash", "messages": [USER]} | members


@contextmanager
def bounded(seconds: float, megabytes: float) -> Iterator[None]:
    """Check processor time and peak memory; the bounds are far above what is needed, far below what a blow-up takes."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
    finally:
        took, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert took < seconds
    assert peak < megabytes * MEGABYTE


@pytest.mark.parametrize(
    ("body", "place", "text"),
    [
        (
            chat(messages=[USER, {"role": "user", "content": [{"type": "text", "text": 1}]}]),
            "messages[1].content[0].text",
            "a string",
        ),
        (
            chat(tools=[{"type": "function", "function": {"name": "f", "strict": 1}}]),
            "tools[0].function.strict",
            "a boolean",
        ),
        (chat(stop=["a", None]), "stop[1]", "a string"),
        (chat(max_tokens=-1), "max_tokens", "u32"),
        (chat(messages=[{"role": "nobody"}]), "messages[0].role", "unknown variant"),
        (chat(thinking={"type": "enabled", "budget_tokens": "x"}), "thinking.budget_tokens", "u64"),
    ],
)
def test_a_wrong_type_says_where(body: dict[str, Any], place: str, text: str) -> None:
    with pytest.raises(ValueError, match="invalid request body: ") as raised:
        recipe.ChatCompletionRequest(body)
    assert text in str(raised.value)
    assert raised.value.__notes__ == [f"at {place}"]


def shape_error(body: dict[str, Any]) -> str | None:
    try:
        recipe.ChatCompletionRequest(body)
    except ValueError as error:
        return str(error)
    return None


def test_wrong_types_at_any_depth_are_told() -> None:
    content: Any = [{"type": "text", "text": "x"}]
    body = chat(messages=[USER, {"role": "assistant", "content": content, "tool_calls": [{"id": "1"}]}])
    for wrong in (1, True, [], {}, None, "x", 1.5):
        for spot in ("messages", "model", "tools", "stop", "response_format", "tool_choice", "stream_options"):
            problem = shape_error(chat() | {spot: wrong})
            assert problem is None or problem.startswith("invalid request body: ")
    with pytest.raises(ValueError, match="missing field `type`"):
        recipe.ChatCompletionRequest(body)


@pytest.mark.parametrize(
    "text", ["", "{", "nope", '{"a":', "[1,]", '{"a":"\x01"}', "\xff", '{"model":"\\ud800"}', "1e999", "{}x"]
)
def test_bad_json_says_line_and_column(text: str) -> None:
    with pytest.raises(ValueError, match=r"^invalid JSON request: .* at line 1 column \d+$"):
        recipe.ChatCompletionRequest(text.encode("latin-1"))


@pytest.mark.parametrize("opener", ["[", '{"a":', '[{"b":'])
def test_deep_nesting_is_refused(opener: str) -> None:
    for depth in (1_000, 100_000):
        with bounded(2, 40), pytest.raises(ValueError, match="recursion limit exceeded at line 1 column"):
            recipe.ChatCompletionRequest('{"zz":' + opener * depth)


def test_deep_python_values_are_refused() -> None:
    value: Any = 1
    for _ in range(1_000):
        value = [value]
    with pytest.raises(RecursionError, match="maximum nesting depth of 128"):
        recipe.ChatCompletionRequest(chat(zz=value))
    with pytest.raises(RecursionError, match="maximum nesting depth of 128"):
        recipe.ToolDefinition("f", parameters=value)


@pytest.mark.parametrize("form", ["plain", "escaped", "broken"])
def test_strings_of_ten_megabytes(form: str) -> None:
    filling = {"plain": "x", "escaped": "\\n", "broken": "x"}[form]
    body = json.dumps(chat(messages=[{"role": "user", "content": "@"}]))
    body = body.replace("@", filling * (10 * MEGABYTE // len(filling)))
    if form == "broken":
        with bounded(5, 120), pytest.raises(ValueError, match="EOF while parsing an object"):
            recipe.ChatCompletionRequest(body[:-1])
        return
    with bounded(5, 120):
        request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
        prompt = recipe.DeepseekV41Encoding().render_conversation(request.conversation).prompt
    assert len(prompt) > 10 * MEGABYTE // len(filling)


def test_long_arguments_names_and_stops() -> None:
    long = "[" * MEGABYTE
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": long}}
    history = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "r"}]
    with bounded(5, 120):
        request = recipe.ChatCompletionRequest(chat(messages=history)).convert(recipe.ConversionOptions())
        assert long in recipe.DeepseekV4Encoding().render_conversation(request.conversation).prompt
    request_with_name = recipe.ChatCompletionRequest(
        chat(tools=[{"type": "function", "function": {"name": "f" * MEGABYTE}}])
    )
    with bounded(2, 40), pytest.raises(recipe.ConversionError, match="string too long"):
        request_with_name.convert(recipe.ConversionOptions())
    with bounded(10, 200):
        parsing = recipe.ParsingOptions(stop_sequences=["a" * 100_000])
        processor = recipe.StreamProcessor(recipe.MessagesChunkGenerator("ID", "M", False), parsing)
        processor.push(recipe.InferenceChunk.text("a" * 99_999 + "b"))
        processor.finish()


def test_a_hundred_thousand_messages() -> None:
    body = json.dumps(chat(messages=[USER, {"role": "assistant", "content": "y"}] * 50_000))
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    prompt = recipe.DeepseekV41Encoding().render_conversation(request.conversation).prompt
    assert time.process_time() - start < 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 400 * 1024  # kilobytes
    assert len(request.conversation.messages) == 100_000
    assert prompt.count("<｜Assistant｜></think>y") == 50_000


def test_schemas_that_refer_in_circles_and_chains() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5_000)} | {"d5000": {"$ref": "#"}}
    schema = {"type": "object", "$ref": "#/$defs/d0", "$defs": chain}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with bounded(5, 60):
        recipe.ChatCompletionRequest(chat(tools=tools)).convert(recipe.ConversionOptions())


@pytest.mark.parametrize("output", ["\n", "<", "｜DSML｜", "</", "\n<", "a\n", "\ufffd"])
@pytest.mark.parametrize("repair", [False, True])
def test_a_long_output_takes_linear_time(output: str, repair: bool) -> None:
    def seconds(count: int) -> float:
        processor = recipe.StreamProcessor(
            recipe.MessagesChunkGenerator("ID", "M", False), recipe.ParsingOptions(repair=repair)
        )
        chunk = recipe.InferenceChunk.text(output, 1)
        start = time.process_time()
        for _ in range(count):
            processor.push(chunk)
        processor.finish()
        return time.process_time() - start

    small = max(min(seconds(1_000) for _ in range(3)), 0.002)
    assert seconds(10_000) < 30 * small
