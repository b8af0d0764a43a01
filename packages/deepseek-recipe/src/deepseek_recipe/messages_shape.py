"""Owns the shape of a Messages request: which members it has and of what types.

What the members mean is checked in `messages_request`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from deepseek_recipe.json_reader import Json
from deepseek_recipe.request_rules import EFFORTS, THINKING_TYPES
from deepseek_recipe.request_tools import RequestedChoice, RequestedTool
from deepseek_recipe.shapes import (
    Field,
    Variant,
    anything,
    boolean,
    choice,
    f32,
    list_of,
    mapping,
    may,
    missing,
    optional,
    prefixed,
    string,
    struct,
    tagged,
    text_or_list,
    u32,
    u64,
)


class Source(NamedTuple):
    """The source of an image: kind is base64, url or file."""

    kind: str
    value: str
    media_type: str = ""


class Block(NamedTuple):
    """One content block; `text` is its text, thoughts, media type or the name of a referenced tool."""

    kind: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: Json = None
    source: Source | None = None
    content: "Sequence[Block]" = ()


class MessagesMessage(NamedTuple):
    """One message as requested."""

    role: str
    content: str | list[Block]


class MessagesTool(NamedTuple):
    """A tool as requested: one to call, or a server tool of some type."""

    server_type: str | None
    tool: RequestedTool | None


class Thinking(NamedTuple):
    """The thinking switch; the budget is ignored."""

    type: str
    budget_tokens: int | None


class MessagesBody(NamedTuple):
    """A Messages request as requested."""

    model: str
    messages: list[MessagesMessage]
    max_tokens: int | None
    system: str | list[str] | None
    stream: bool | None
    temperature: float | None
    top_p: float | None
    stop_sequences: list[str] | None
    tools: list[MessagesTool] | None
    tool_choice: RequestedChoice | None
    thinking: Thinking | None
    output_config: str | None
    metadata: str | None


_source: Final = tagged(
    "MessagesImageSource",
    "type",
    {
        "base64": Variant(
            lambda media_type, data: Source("base64", data, media_type),
            {
                "media_type": Field(choice("image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp")),
                "data": Field(string),
            },
        ),
        "url": Variant(lambda url: Source("url", url), {"url": Field(string)}),
        "file": Variant(lambda file_id: Source("file", file_id), {"file_id": Field(string)}),
    },
)
_TEXT: Final = Variant(lambda text: Block("text", text), {"text": Field(string)})
_IMAGE: Final = Variant(lambda source: Block("image", source=source), {"source": Field(_source)})
_DOCUMENT: Final = Variant(
    lambda source: Block("document", source or "unknown"),
    {"source": Field(struct("MessagesDocumentSource", lambda media_type: media_type, {"media_type": may(string)}))},
)
_result_block: Final = tagged(
    "MessagesToolResultBlock",
    "type",
    {
        "text": _TEXT,
        "image": _IMAGE,
        "document": _DOCUMENT,
        "tool_reference": Variant(
            lambda tool_name: Block("tool_reference", tool_name),
            {"tool_name": Field(string)},
        ),
    },
)


def _server_tool_use(id: str) -> Block:
    return Block("server_tool_use", id=id)


def _tool_use(id: str, name: str, input: Json) -> Block:
    return Block("tool_use", id=id, name=name, input=input)


def _tool_result(tool_use_id: str, content: str | list[Block] | None, is_error: bool | None) -> Block:
    blocks = [Block("text", content)] if isinstance(content, str) else content
    return Block("tool_result", id=tool_use_id, content=blocks or ())


_tool_reference: Final = tagged(
    "MessagesToolReference", "type", {"tool_reference": Variant(lambda name: name, {"name": Field(string)})}
)
_block: Final = tagged(
    "MessagesContentBlock",
    "type",
    {
        "text": _TEXT,
        "image": _IMAGE,
        "document": _DOCUMENT,
        "thinking": Variant(
            lambda thinking, signature: Block("thinking", thinking),
            {"thinking": Field(string), "signature": may(string)},
        ),
        "server_tool_use": Variant(_server_tool_use, {"id": Field(string)}),
        "tool_use": Variant(
            _tool_use,
            {"id": Field(string), "name": Field(string), "input": Field(anything)},
        ),
        "tool_result": Variant(
            _tool_result,
            {
                "tool_use_id": Field(string),
                "content": may(text_or_list(_result_block, "expected a string or a list")),
                "is_error": may(boolean),
            },
        ),
        "web_search_tool_result": Variant(
            lambda tool_use_id: Block("web_search_tool_result", id=tool_use_id),
            {"tool_use_id": Field(string)},
        ),
        "tool_addition": Variant(lambda tool: Block("tool_addition", tool), {"tool": Field(_tool_reference)}),
    },
)
_message: Final = struct(
    "MessagesMessage",
    MessagesMessage,
    {
        "role": Field(choice("user", "assistant", "system")),
        "content": Field(text_or_list(_block, "expected a string or a list")),
    },
)


def _same(text: str) -> str:
    return text


_system_block: Final = tagged(
    "MessagesSystemBlock", "type", {"text": Variant(lambda text: text, {"text": Field(string)})}
)


def _tool(value: Json) -> MessagesTool:
    """A tool: anything with a `type` is a server tool and is not looked at further."""
    members = mapping(value)
    kind = prefixed("type", optional(string))(members.get("type"))
    if kind is not None:
        return MessagesTool(kind, None)
    if "name" not in members:
        raise missing("name")
    tool = RequestedTool(
        prefixed("name", string)(members["name"]),
        prefixed("description", optional(string))(members.get("description")),
        members.get("input_schema"),
        defer_loading=bool(prefixed("defer_loading", optional(boolean))(members.get("defer_loading"))),
        needs_schema=True,
    )
    return MessagesTool(None, tool)


_PARALLEL: Final = {"disable_parallel_tool_use": may(boolean)}
_choice: Final = tagged(
    "MessagesToolChoice",
    "type",
    {
        "auto": Variant(lambda **_: RequestedChoice("auto"), _PARALLEL),
        "any": Variant(lambda **_: RequestedChoice("auto"), _PARALLEL),
        "tool": Variant(lambda name, **_: RequestedChoice("named", name), {"name": Field(string), **_PARALLEL}),
        "none": Variant(lambda: RequestedChoice("none"), {}),
    },
)

read_messages: Final = struct(
    "MessagesRequest",
    MessagesBody,
    {
        "model": Field(string),
        "messages": Field(list_of(_message)),
        "max_tokens": may(u32),
        "system": may(text_or_list(_system_block, "expected a string or a list")),
        "stream": may(boolean),
        "temperature": may(f32),
        "top_p": may(f32),
        "stop_sequences": may(list_of(string)),
        "tools": may(list_of(_tool)),
        "tool_choice": may(_choice),
        "thinking": may(
            struct("MessagesThinking", Thinking, {"type": Field(THINKING_TYPES), "budget_tokens": may(u64)})
        ),
        "output_config": may(struct("MessagesOutputConfig", lambda effort: effort, {"effort": may(EFFORTS)})),
        "metadata": may(struct("MessagesMetadata", lambda user_id: user_id, {"user_id": may(string)})),
    },
)
"""Reads a Messages request exactly as the API does."""
