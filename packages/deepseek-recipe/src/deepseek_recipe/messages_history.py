"""Owns converting the messages of a Messages request: blocks into messages, calls and results, announced tools.

The rest of the request is converted in `messages_request`.
"""

import binascii
from dataclasses import dataclass, field

from deepseek_recipe.conversation import (
    DataUrlImageSource,
    ImageSource,
    Message,
    ToolCall,
    ToolDefinition,
    UrlImageSource,
)
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_writer import debug_string, spaced_json
from deepseek_recipe.messages_shape import Block, MessagesMessage, Source
from deepseek_recipe.options import WebSearchBehavior
from deepseek_recipe.request_images import FILE_ID_TEXT, BlockText, is_link, too_long
from deepseek_recipe.request_rules import Conversion

_UNANSWERED = (
    "`tool_use` ids were found without `tool_result` blocks immediately after: {ids}. Each `tool_use` block must have "
    "a corresponding `tool_result` block in the next message."
)
_HOME = {
    "tool_use": "assistant",
    "server_tool_use": "assistant",
    "web_search_tool_result": "assistant",
    "tool_result": "user",
    "tool_addition": "system",
}
"""The role whose messages a block may be in."""


@dataclass
class History:
    """Converts messages in order and keeps the account of calls and results."""

    conversion: Conversion
    tool_names: frozenset[str]
    open_calls: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    caller: int = 0

    def convert(self, requested: list[MessagesMessage]) -> list[Message]:
        """All messages, announced tools still by name only.

        Raises:
            ConversionError: at the first block that is out of place.
        """
        messages: list[Message] = []
        for index, message in enumerate(requested):
            blocks = [Block("text", message.content)] if isinstance(message.content, str) else message.content
            if not blocks and message.role != "system":
                raise ConversionError(f"messages.{index}: all messages must have non-empty content")
            match message.role:
                case "user":
                    messages += self._user(index, blocks)
                case "assistant":
                    messages.append(self._assistant(index, blocks))
                case _:
                    messages += self._system(index, blocks)
        self._close()
        return messages

    def _unanswered(self, place: str) -> ConversionError:
        return ConversionError(place + _UNANSWERED.format(ids=", ".join(sorted(self.open_calls))))

    def _close(self) -> None:
        """Check at the end of a message that no call is left without a result."""
        if self.open_calls:
            raise self._unanswered(f"messages.{self.caller}:")

    def _check_place(self, index: int, block: Block, role: str) -> None:
        if _HOME.get(block.kind, role) != role:
            kind = "tool_use" if block.kind == "server_tool_use" else block.kind
            raise ConversionError(f"messages.{index}: `{kind}` blocks can only be in `{_HOME[block.kind]}` messages")
        if block.kind == "thinking" and role != "assistant":
            raise ConversionError(f"messages.{index}.content: thinking blocks may only be in `assistant` messages")

    def _user(self, index: int, blocks: list[Block]) -> list[Message]:
        messages: list[Message] = []
        referenced: list[str] = []
        self.answered = set()
        had_calls = bool(self.open_calls)
        for position, block in enumerate(blocks):
            self._check_place(index, block, "user")
            if block.kind == "tool_result":
                messages.append(self._result(index, position, block, referenced))
                continue
            if self.open_calls:
                raise self._unanswered(f"messages.{index}: ")
            text = BlockText(self.conversion)
            self._add(text, block, f"messages.{index}.content[{position}]")
            messages.append(Message("user", "").changed(**text.fields()))
        if had_calls:
            self._close()
        if referenced and self.conversion.is_v41:
            messages.append(Message("system", "", tools=[ToolDefinition(name) for name in referenced]))
        return messages

    def _result(self, index: int, position: int, block: Block, referenced: list[str]) -> Message:
        if block.id in self.answered:
            raise ConversionError(
                f"messages.{index}.content.{position}: each tool_use must have a single result. Found multiple "
                f"`tool_result` blocks with id: {block.id}"
            )
        if block.id not in self.open_calls:
            raise ConversionError(
                f"unexpected `messages.{index}.content.{position}: tool_use_id` found in `tool_result` blocks: "
                f"{block.id}. Each `tool_result` block must have a corresponding `tool_use` block in the previous "
                "message."
            )
        self.open_calls.remove(block.id)
        self.answered.add(block.id)
        text = BlockText(self.conversion)
        for part in block.content:
            if part.kind == "tool_reference":
                if part.text not in self.tool_names:
                    raise ConversionError(
                        f"messages.{index}.content.{position}: tool reference '{part.text}' not found in available "
                        "tools"
                    )
                referenced.append(part.text)
                text.text(part.text)
            else:
                self._add(text, part, f"messages.{index}.content.{position}.tool_result")
        return Message("tool", "", tool_call_id=block.id).changed(**text.fields())

    def _assistant(self, index: int, blocks: list[Block]) -> Message:
        if self.open_calls:
            raise self._unanswered(f"messages.{index}: ")
        text = BlockText(self.conversion)
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for position, block in enumerate(blocks):
            self._check_place(index, block, "assistant")
            if block.kind == "thinking":
                thoughts.append(block.text)
            elif block.kind == "tool_use":
                if block.id in self.open_calls:
                    raise ConversionError(f"messages.{index}.content.{position}: `tool_use` ids must be unique")
                self.open_calls.add(block.id)
                calls.append(ToolCall(block.id, block.name, spaced_json(block.input, python_floats=False)))
            elif block.kind in ("server_tool_use", "web_search_tool_result"):
                if self.conversion.options.messages_web_search is WebSearchBehavior.Reject:
                    raise ConversionError("Unsupported content block: server tools are not supported")
            elif block.kind == "image" and self.conversion.is_v41:
                raise ConversionError("Image in assistant message is unsupported")
            elif self.open_calls:
                raise self._unanswered(f"messages.{index}.{position}: ")
            else:
                self._add(text, block, "")
        self.caller = index
        return Message("assistant", text.joined(), "\n\n".join(thoughts) if thoughts else None, calls or None)

    def _system(self, index: int, blocks: list[Block]) -> list[Message]:
        text = BlockText(self.conversion)
        announced: list[ToolDefinition] = []
        for position, block in enumerate(blocks):
            self._check_place(index, block, "system")
            if block.kind != "tool_addition":
                self._add(text, block, f"messages.{index}")
                continue
            if block.text not in self.tool_names:
                raise ConversionError(
                    f"messages.{index}.content.{position}: `tool_addition` references unknown tool '{block.text}'"
                )
            announced.append(ToolDefinition(block.text))
        if self.open_calls:
            raise self._unanswered(f"messages.{index}: ")
        if self.conversion.is_v41:
            return [Message("system", "", tools=announced or None).changed(**text.fields())]
        content = text.joined()
        return [Message("user", f"<system-reminder>\n{content}\n</system-reminder>")] if content else []

    def _add(self, text: BlockText, block: Block, path: str) -> None:
        """Add a text, image or document block."""
        if block.kind == "text":
            text.text(block.text)
        elif block.kind == "document":
            text.text(f"[Unsupported document type: {block.text}]")
        else:
            assert block.source is not None
            text.image(_image(block.source, path) if self.conversion.is_v41 else None)


def _image(source: Source, path: str) -> ImageSource:
    if source.kind == "file":
        raise ConversionError(f"{path}: {FILE_ID_TEXT}")
    if source.kind == "url":
        if not is_link(source.value):
            raise ConversionError(f"{path}: invalid url: {debug_string(source.value)}")
        problem = too_long(source.value)
        if problem:
            raise ConversionError(f"{path}: {problem}")
        return UrlImageSource(source.value, path=path)
    try:
        data = binascii.a2b_base64(source.value.encode(), strict_mode=True)
    except binascii.Error:
        data = None
    if data is None or binascii.b2a_base64(data, newline=False) != source.value.encode():
        raise ConversionError(f"{path}: base64 decode error")
    media_type = "image/jpeg" if source.media_type == "image/jpg" else source.media_type
    return DataUrlImageSource(f"data:{media_type};base64,{source.value}", path=path)
