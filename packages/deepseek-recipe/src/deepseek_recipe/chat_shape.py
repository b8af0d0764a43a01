"""Owns the shape of a Chat Completions request: which members it has and of what types.

What the members mean is checked in `chat_request`.
"""

from typing import Final, Literal, NamedTuple

from deepseek_recipe.conversation import ImageDetail, Role
from deepseek_recipe.json_reader import Json
from deepseek_recipe.request_rules import EFFORTS, THINKING_TYPES, WantedFormat
from deepseek_recipe.request_tools import RequestedChoice, RequestedTool
from deepseek_recipe.shapes import (
    Field,
    Reader,
    ShapeError,
    Variant,
    anything,
    boolean,
    choice,
    f32,
    list_of,
    may,
    prefixed,
    string,
    struct,
    tagged,
    text_or_list,
    u8,
    u32,
    u64,
)


class ChatBlock(NamedTuple):
    """One block of message content: text, an image link or a file."""

    kind: str
    text: str = ""
    url: str = ""
    detail: ImageDetail | None = None
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


class ChatCall(NamedTuple):
    """One tool call of history."""

    id: str
    name: str
    arguments: str


class ChatMessage(NamedTuple):
    """One message as requested."""

    role: Role | Literal["developer"]
    content: str | list[ChatBlock] | None
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] | None = None
    tool_call_id: str = ""
    prefix: bool = False


class ChatBody(NamedTuple):
    """A Chat Completions request as requested."""

    messages: list[ChatMessage]
    model: str
    frequency_penalty: float | None
    presence_penalty: float | None
    logprobs: bool | None
    top_logprobs: int | None
    max_tokens: int | None
    n: int | None
    stream: bool | None
    stream_options: "StreamOptions | None"
    temperature: float | None
    top_p: float | None
    response_format: WantedFormat | None
    tools: list[RequestedTool] | None
    tool_choice: RequestedChoice | None
    parallel_tool_calls: bool | None
    thinking: "Thinking | None"
    reasoning_effort: str | None
    stop: str | list[str] | None
    seed: int | None
    max_completion_tokens: Json = None


class StreamOptions(NamedTuple):
    """Options of streaming."""

    include_usage: bool | None


class Thinking(NamedTuple):
    """The thinking switch; the budget is ignored."""

    type: str
    budget_tokens: int | None


class _Link(NamedTuple):
    url: str
    detail: ImageDetail | None


_DETAILS: Final = choice("low", "high", "original", "auto")

_block: Final = tagged(
    "ChatCompletionRequestContentBlock",
    "type",
    {
        "text": Variant(lambda text: ChatBlock("text", text), {"text": Field(string)}),
        "image_url": Variant(
            lambda image_url: ChatBlock("image_url", url=image_url.url, detail=image_url.detail),
            {
                "image_url": Field(
                    struct("ChatCompletionImageUrl", _Link, {"url": Field(string), "detail": may(_DETAILS)})
                )
            },
        ),
        "file": Variant(
            lambda **fields: ChatBlock("file", **fields),
            {"file_id": may(string), "file_data": may(string), "filename": may(string)},
        ),
    },
)
_content: Final = text_or_list(_block, "content should be a string or a list")


def _make_call(id: str, type: str, function: tuple[str, str]) -> ChatCall:
    return ChatCall(id, *function)


_call: Final = struct(
    "ChatCompletionMessageToolCall",
    _make_call,
    {
        "id": Field(string),
        "type": Field(choice("function")),
        "function": Field(
            struct(
                "ChatCompletionMessageToolCallFunction",
                lambda name, arguments: (name, arguments),
                {"name": Field(string), "arguments": Field(string)},
            )
        ),
    },
)


def _plain_message(role: Role | Literal["developer"]) -> Variant[ChatMessage]:
    def make(content: str | list[ChatBlock], name: str | None) -> ChatMessage:
        return ChatMessage(role, content)

    return Variant(make, {"content": Field(_content), "name": may(string)})


def _assistant(
    content: str | list[ChatBlock] | None,
    name: str | None,
    prefix: bool | None,
    reasoning_content: str | None,
    tool_calls: list[ChatCall] | None,
) -> ChatMessage:
    return ChatMessage("assistant", content, reasoning_content, tool_calls, prefix=bool(prefix))


_VARIANTS: Final[dict[str, Variant[ChatMessage]]] = {
    "system": _plain_message("system"),
    "user": _plain_message("user"),
    "assistant": Variant(
        _assistant,
        {
            "content": may(_content),
            "name": may(string),
            "prefix": may(boolean),
            "reasoning_content": may(string),
            "tool_calls": may(list_of(_call)),
        },
    ),
    "tool": Variant(
        lambda content, tool_call_id: ChatMessage("tool", content, tool_call_id=tool_call_id),
        {"content": Field(_content), "tool_call_id": Field(string)},
    ),
    "latest_reminder": Variant(
        lambda content: ChatMessage("latest_reminder", content),
        {"content": Field(string)},
    ),
}
_MESSAGE_NAME: Final = "ChatCompletionRequestMessage"
_strict_message: Reader[ChatMessage] = tagged(_MESSAGE_NAME, "role", _VARIANTS)
_lenient_message: Reader[ChatMessage] = tagged(
    _MESSAGE_NAME, "role", _VARIANTS | {"developer": _plain_message("developer")}
)


def _make_tool(type: str, function: RequestedTool) -> RequestedTool:
    return function


_tool: Final = struct(
    "ChatCompletionTool",
    _make_tool,
    {
        "type": Field(choice("function")),
        "function": Field(
            struct(
                "ChatCompletionToolFunction",
                RequestedTool,
                {
                    "name": Field(string),
                    "description": may(string),
                    "parameters": Field(anything, None),
                    "strict": may(boolean),
                },
            )
        ),
    },
)
_choice_function: Final = struct("ChatCompletionToolChoiceFunction", lambda name: name, {"name": Field(string)})


def _tool_choice(value: Json) -> RequestedChoice:
    if value == "none" or value == "auto" or value == "required":
        return RequestedChoice(value)
    if not isinstance(value, dict) or "type" not in value:
        raise ShapeError("expected one of `none`, `auto`, `required` or a tool")
    prefixed("type", choice("function"))(value["type"])
    return RequestedChoice("named", prefixed("function", _choice_function)(value.get("function")))


_format: Final = tagged(
    "ChatCompletionResponseFormat",
    "type",
    {
        "json_object": Variant(lambda: WantedFormat("json_object"), {}),
        "json_schema": Variant(
            lambda json_schema: json_schema,
            {
                "json_schema": Field(
                    struct(
                        "ChatCompletionResponseFormatJsonSchema",
                        lambda schema, strict, **_: WantedFormat("json_schema", schema, bool(strict)),
                        {
                            "name": may(string),
                            "description": may(string),
                            "schema": Field(anything),
                            "strict": may(boolean),
                        },
                    )
                )
            },
        ),
        "regex": Variant(lambda regex: WantedFormat("regex", regex=regex), {"regex": Field(string)}),
        "text": Variant(lambda: WantedFormat("text"), {}),
    },
)


def _body(message: Reader[ChatMessage], **more: Field[Json]) -> Reader[ChatBody]:
    fields: dict[str, Field[Json]] = {
        "messages": Field(list_of(message)),
        "model": Field(string),
        "frequency_penalty": may(f32),
        "presence_penalty": may(f32),
        "logprobs": may(boolean),
        "top_logprobs": may(u8),
        "max_tokens": may(u32),
        "n": may(u8),
        "stream": may(boolean),
        "stream_options": may(struct("ChatCompletionStreamOptions", StreamOptions, {"include_usage": may(boolean)})),
        "temperature": may(f32),
        "top_p": may(f32),
        "response_format": may(_format),
        "tools": may(list_of(_tool)),
        "tool_choice": may(_tool_choice),
        "parallel_tool_calls": may(boolean),
        "thinking": may(
            struct("ChatCompletionThinking", Thinking, {"type": Field(THINKING_TYPES), "budget_tokens": may(u64)})
        ),
        "reasoning_effort": may(EFFORTS),
        "stop": may(text_or_list(string, "expected a string or a list")),
        "seed": may(u64),
    }
    return struct("ChatCompletionRequest", ChatBody, fields | more)


read_chat: Final = _body(_strict_message, max_completion_tokens=Field(anything, None))
"""Reads a Chat Completions request exactly as the API does."""
read_chat_leniently: Final = _body(_lenient_message, max_completion_tokens=may(u32))
"""Reads a Chat Completions request that may have `developer` messages."""
