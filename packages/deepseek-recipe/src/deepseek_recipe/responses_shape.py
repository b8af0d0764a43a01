"""Owns the shape of a Responses request: which members it has and of what types.

Input items are in `responses_items`; what the members mean is checked in `responses_request`.
"""

from typing import Final, NamedTuple

from deepseek_recipe.json_reader import Json
from deepseek_recipe.request_rules import EFFORTS, WantedFormat
from deepseek_recipe.request_tools import RequestedChoice
from deepseek_recipe.responses_items import InputItem, read_input
from deepseek_recipe.responses_tool_shape import ResponsesTool, read_tool
from deepseek_recipe.shapes import (
    Field,
    ShapeError,
    Variant,
    anything,
    boolean,
    choice,
    f32,
    list_of,
    may,
    string,
    struct,
    tagged,
    u8,
    u32,
)


class ResponsesChoice(NamedTuple):
    """The tool choice as requested: `web_search` for web search of any kind, and how the answer repeats it."""

    choice: RequestedChoice = RequestedChoice()
    web_search: bool = False
    shown: Json = "auto"


class TextFormat(NamedTuple):
    """The wanted format, and how the answer repeats it."""

    wanted: WantedFormat
    shown: Json


class TextConfig(NamedTuple):
    """What is wanted of text."""

    format: TextFormat
    verbosity: str | None


class ReasoningConfig(NamedTuple):
    """What is wanted of reasoning."""

    effort: str | None
    summary: str | None
    generate_summary: str | None


class ResponsesBody(NamedTuple):
    """A Responses request as requested."""

    model: str
    input: str | list[InputItem | None] | None
    instructions: str | None
    stream: bool | None
    temperature: float | None
    top_p: float | None
    max_output_tokens: int | None
    top_logprobs: int | None
    tools: list[ResponsesTool] | None
    tool_choice: ResponsesChoice | None
    reasoning: ReasoningConfig | None
    text: TextConfig | None
    user: str | None


_PLAIN_TEXT: Final = TextFormat(WantedFormat(), {"type": "text"})


def _json_schema(name: str, schema: Json, strict: bool | None) -> TextFormat:
    shown = {"type": "json_schema", "name": name, "schema": schema, "strict": strict}
    return TextFormat(WantedFormat("json_schema", schema, bool(strict)), shown)


_format: Final = tagged(
    "ResponsesTextFormat",
    "type",
    {
        "text": Variant(lambda: _PLAIN_TEXT, {}),
        "json_schema": Variant(
            _json_schema,
            {"name": Field(string), "schema": Field(anything), "strict": may(boolean)},
        ),
        "json_object": Variant(lambda: TextFormat(WantedFormat("json_object"), {"type": "json_object"}), {}),
    },
)


def _named(kind: str) -> Json:
    def make(name: str) -> ResponsesChoice:
        return ResponsesChoice(RequestedChoice("named", name), shown={"type": kind, "name": name})

    return make, {"name": Field(string)}


def _web_search(kind: str) -> Json:
    return lambda: ResponsesChoice(web_search=True, shown={"type": kind}), {}


_choice_object: Final = tagged(
    "ResponsesToolChoice",
    "type",
    {
        "function": _named("function"),
        "web_search": _web_search("web_search"),
        "web_search_2025_08_26": _web_search("web_search_2025_08_26"),
        "custom": _named("custom"),
    },
)


def _choice(value: Json) -> ResponsesChoice:
    if value == "none" or value == "auto" or value == "required":
        return ResponsesChoice(RequestedChoice(value), shown=value)
    if not isinstance(value, dict) or "type" not in value:
        raise ShapeError("expected one of `none`, `auto`, `required` or a tool choice object")
    read: ResponsesChoice = _choice_object(value)
    return read


_SUMMARIES: Final = choice("auto", "concise", "detailed")

read_responses: Final = struct(
    "ResponsesRequest",
    ResponsesBody,
    {
        "model": Field(string),
        "input": may(read_input),
        "instructions": may(string),
        "stream": may(boolean),
        "temperature": may(f32),
        "top_p": may(f32),
        "max_output_tokens": may(u32),
        "top_logprobs": may(u8),
        "tools": may(list_of(read_tool)),
        "tool_choice": may(_choice),
        "reasoning": may(
            struct(
                "ResponsesReasoningConfig",
                ReasoningConfig,
                {"effort": may(EFFORTS), "summary": may(_SUMMARIES), "generate_summary": may(_SUMMARIES)},
            )
        ),
        "text": may(
            struct(
                "ResponsesTextConfig",
                TextConfig,
                {"format": Field(_format, _PLAIN_TEXT), "verbosity": may(choice("low", "medium", "high"))},
            )
        ),
        "user": may(string),
    },
)
"""Reads a Responses request exactly as the API does."""
