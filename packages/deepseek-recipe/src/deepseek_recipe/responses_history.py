"""Owns converting the input items of a Responses request: assembling assistant messages, matching calls and outputs.

The shape of the items is in `responses_items`; the rest of the request is converted in `responses_request`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepseek_recipe.conversation import Message, ToolCall, ToolDefinition
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_reader import Json
from deepseek_recipe.json_writer import compact_json
from deepseek_recipe.request_images import FILE_ID_TEXT, BlockText, is_link, too_long, url_image
from deepseek_recipe.request_rules import Conversion
from deepseek_recipe.responses_items import InputItem, Part
from deepseek_recipe.responses_tool_shape import ResponsesTool
from deepseek_recipe.responses_tools import TOOL_SEARCH, ToolNames

_CALLS = ("function_call", "custom_tool_call", "tool_search_call")
_OUTPUTS = ("output", "tool_search_output")
_UNSUPPORTED_DOCUMENT = "[Unsupported Document]"


@dataclass
class _Turn:
    """One assistant message under assembly, with the outputs of its calls."""

    thoughts: list[str] | None = None
    texts: BlockText | None = None
    calls: list[ToolCall] = field(default_factory=list)
    outputs: dict[str, Message] = field(default_factory=dict)
    announced: dict[str, list[str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every call has its output."""
        return len(self.outputs) == len(self.calls)


@dataclass
class History:
    """Converts items in order. `announced_names` has the full names of the tools of each search output, by index."""

    conversion: Conversion
    names: ToolNames
    announced_names: dict[int, list[str]]
    messages: list[Message] = field(default_factory=list)
    turn: _Turn | None = None
    call_ids: set[str] = field(default_factory=set)

    def convert(self, items: list[InputItem | None]) -> list[Message]:
        """All messages, announced tools by name only.

        Raises:
            ConversionError: at the first item that is out of place.
        """
        for index, item in enumerate(items):
            if item is None or (item.kind.startswith("tool_search") and not self.conversion.is_v41):
                continue
            if item.kind in _CALLS:
                self._call(item)
            elif item.kind in _OUTPUTS:
                self._output(index, item)
            elif item.kind == "web_search_call":
                if self.turn is not None and self.turn.calls:
                    self._close()
            elif item.kind == "reasoning":
                self._reasoning(item)
            elif item.role == "assistant":
                self._assistant(index, item)
            else:
                self._close()
                self.messages.append(self._plain(index, item))
        self._close()
        return self.messages

    def _close(self) -> None:
        """End the assistant message under assembly.

        Raises:
            ConversionError: if one of its calls has no output.
        """
        turn, self.turn = self.turn, None
        if turn is None:
            return
        for call in turn.calls:
            if call.id not in turn.outputs:
                raise ConversionError(f"No tool output found for tool call {call.id}.")
        content = turn.texts.joined() if turn.texts else ""
        thoughts = None if turn.thoughts is None else "\n".join(text for text in turn.thoughts if text)
        self.messages.append(Message("assistant", content, thoughts, turn.calls or None))
        self.messages += [turn.outputs[call.id] for call in turn.calls]
        announced = [name for call in turn.calls for name in turn.announced.get(call.id, ())]
        if announced:
            self.messages.append(Message("system", "", tools=[ToolDefinition(name) for name in announced]))

    def _reasoning(self, item: InputItem) -> None:
        if self.turn is None or self.turn.texts is not None or self.turn.calls:
            self._close()
            self.turn = _Turn()
        if item.texts:
            self.turn.thoughts = [*(self.turn.thoughts or ()), *item.texts]

    def _assistant(self, index: int, item: InputItem) -> None:
        if self.turn is None or self.turn.calls:
            self._close()
            self.turn = _Turn()
        blocks = self._blocks(index, item.content, in_assistant=True)
        if self.turn.texts is None:
            self.turn.texts = BlockText(self.conversion)
        self.turn.texts.text(blocks.joined())

    def _call(self, item: InputItem) -> None:
        if self.turn is None or (self.turn.calls and self.turn.complete):
            self._close()
            self.turn = _Turn()
        if item.call_id in self.call_ids:
            raise ConversionError(f"Duplicate 'call_id': {item.call_id}.")
        self.call_ids.add(item.call_id)
        if item.kind == "function_call":
            call = ToolCall(item.call_id, self.names.called(item.namespace, item.name), item.arguments)
        elif item.kind == "custom_tool_call":
            call = ToolCall(item.call_id, item.name, compact_json({"input": item.arguments}))
        else:
            call = ToolCall(item.call_id, TOOL_SEARCH, compact_json(item.arguments))
        self.turn.calls.append(call)

    def _output(self, index: int, item: InputItem) -> None:
        turn = self.turn
        if turn is None or item.call_id not in {call.id for call in turn.calls}:
            raise ConversionError(f"No tool call found for tool output with call_id {item.call_id}.")
        if item.call_id in turn.outputs:
            raise ConversionError(f"Duplicate tool output for call_id: {item.call_id}.")
        message = Message("tool", "", tool_call_id=item.call_id)
        if item.kind == "tool_search_output":
            message = message.changed(content=_search_result(index, item.tools))
            turn.announced[item.call_id] = self.announced_names[index]
        else:
            message = message.changed(**self._blocks(index, item.content).fields())
        turn.outputs[item.call_id] = message

    def _plain(self, index: int, item: InputItem) -> Message:
        """A user, system or developer message."""
        role = item.role
        if role == "developer":
            role = "system" if self.conversion.is_v41 else "user"
        assert role == "user" or role == "system"
        return Message(role, "").changed(**self._blocks(index, item.content).fields())

    def _blocks(self, index: int, content: str | list[Part], *, in_assistant: bool = False) -> BlockText:
        text = BlockText(self.conversion)
        if isinstance(content, str):
            text.text(content)
            return text
        for position, part in enumerate(content):
            if part.kind == "text":
                text.text(part.text)
            elif part.kind == "file":
                text.text(_UNSUPPORTED_DOCUMENT)
            elif not self.conversion.is_v41:
                text.image(None)
            elif in_assistant:
                raise ConversionError(f"input[{index}]: Image in assistant message is unsupported")
            else:
                url = _image_url(part, f"input[{index}].content[{position}]")
                text.image(url_image(url, part.detail or "high", f"input[{index}]", link_error=""))
        return text


def _image_url(part: Part, path: str) -> str:
    """The URL of an image part.

    Raises:
        ConversionError: if it has none, or a file id, or a link that is too long.
    """
    if not part.image_url and not part.file_id:
        raise ConversionError(f"{path}: input_image must have image_url or file_id")
    if part.image_url and part.file_id:
        raise ConversionError(f"{path}: input_image cannot have both image_url and file_id")
    if not part.image_url:
        raise ConversionError(f"{path}: {FILE_ID_TEXT}")
    problem = too_long(part.image_url) if is_link(part.image_url) else ""
    if problem:
        raise ConversionError(f"{path}: image_url {problem}")
    return part.image_url


def _search_result(index: int, tools: Sequence[ResponsesTool]) -> str:
    """The found tools as the model sees them: compact JSON, members of namespaces one by one."""
    shown: list[Json] = []
    for tool in tools:
        if not tool.is_known:
            raise ConversionError(f"input[{index}]: the enum variant ResponsesTool::Unsupported cannot be serialized")
        if tool.kind == "namespace":
            namespace = {"name": tool.name, "description": tool.description}
            shown += [member.shown() | {"namespace": namespace} for member in tool.members]
        else:
            shown.append(tool.shown())
    return compact_json(shown)
