"""Owns the shape of the input items of a Responses request.

What a series of items becomes is in `responses_history`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from deepseek_recipe.conversation import ImageDetail
from deepseek_recipe.json_reader import Json
from deepseek_recipe.responses_tool_shape import ResponsesTool, read_tool
from deepseek_recipe.shapes import (
    Field,
    Reader,
    ShapeError,
    Variant,
    choice,
    list_of,
    mapping,
    may,
    string,
    struct,
    tagged,
    text_or_list,
)


class Part(NamedTuple):
    """One content part: text, an image or a file."""

    kind: str
    text: str = ""
    image_url: str | None = None
    file_id: str | None = None
    detail: ImageDetail | None = None


class InputItem(NamedTuple):
    """One input item; which members count depends on its kind."""

    kind: str
    role: Literal["", "user", "assistant", "system", "developer"] = ""
    content: str | list[Part] = ""
    texts: Sequence[str] = ()
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: Json = None
    tools: Sequence[ResponsesTool] = ()


_INPUT_TEXT: Final = Variant(lambda text: Part("text", text), {"text": Field(string)})
_IMAGE: Final = Variant(
    lambda **members: Part("image", **members),
    {
        "image_url": may(string),
        "file_id": may(string),
        "detail": may(choice("low", "high", "original", "auto")),
    },
)
_FILE: Final = Variant(lambda: Part("file"), {})
_content: Final = text_or_list(
    tagged(
        "ResponsesContentPart",
        "type",
        {"input_text": _INPUT_TEXT, "output_text": _INPUT_TEXT, "input_image": _IMAGE, "input_file": _FILE},
    ),
    "content should be a string or a list of content parts",
)
_output: Final = text_or_list(
    tagged(
        "ResponsesOutputContentPart",
        "type",
        {"input_text": _INPUT_TEXT, "input_image": _IMAGE, "input_file": _FILE},
    ),
    "output should be a string or a list of output content parts",
)
_text_of: Final = struct("ResponsesReasoningContent", lambda text: text, {"text": Field(string)})

_message: Final[Reader[InputItem]] = struct(
    "ResponsesInputMessage",
    lambda role, content: InputItem("message", role, content),
    {"role": Field(choice("user", "assistant", "system", "developer")), "content": Field(_content)},
)


def _custom_tool_call(call_id: str, name: str, input: str) -> InputItem:
    return InputItem("custom_tool_call", call_id=call_id, name=name, arguments=input)


_ITEMS: Final[Mapping[str, Reader[InputItem]]] = {
    "message": _message,
    "reasoning": struct(
        "ResponsesReasoningItem",
        lambda content: InputItem("reasoning", texts=content or ()),
        {"content": may(list_of(_text_of))},
    ),
    "function_call": struct(
        "ResponsesFunctionCall",
        lambda **members: InputItem("function_call", **members),
        {
            "call_id": Field(string),
            "name": Field(string),
            "arguments": Field(string),
            "namespace": may(string),
        },
    ),
    "function_call_output": struct(
        "ResponsesFunctionCallOutput",
        lambda call_id, output: InputItem("output", call_id=call_id, content=output),
        {"call_id": Field(string), "output": Field(_output)},
    ),
    "custom_tool_call": struct(
        "ResponsesCustomToolCall",
        _custom_tool_call,
        {"call_id": Field(string), "name": Field(string), "input": Field(string)},
    ),
    "custom_tool_call_output": struct(
        "ResponsesCustomToolCallOutput",
        lambda call_id, output: InputItem("output", call_id=call_id, content=output),
        {"call_id": Field(string), "output": Field(_output)},
    ),
    "tool_search_call": struct(
        "ResponsesToolSearchCall",
        lambda call_id, arguments: InputItem("tool_search_call", call_id=call_id, arguments=arguments),
        {"call_id": Field(string), "arguments": Field(mapping)},
    ),
    "tool_search_output": struct(
        "ResponsesToolSearchOutput",
        lambda call_id, tools: InputItem("tool_search_output", call_id=call_id, tools=tools),
        {"call_id": Field(string), "tools": Field(list_of(read_tool))},
    ),
    "web_search_call": lambda value: InputItem("web_search_call"),
}


def _item(value: Json) -> InputItem | None:
    """Read one item; None for items of a type that is not known."""
    if not isinstance(value, dict):
        raise ShapeError("invalid input item")
    kind = value.get("type")
    if kind is None:
        if "role" not in value:
            raise ShapeError("invalid input item")
        return _message(value)
    reader = _ITEMS.get(string(kind))
    return None if reader is None else reader(value)


read_input: Final = text_or_list(_item, "input should be a string or a list of input items")
"""Reads the input: a text, or items in order."""
