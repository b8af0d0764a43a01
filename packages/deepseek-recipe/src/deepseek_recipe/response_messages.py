"""Owns adding up the events of a Messages stream to the response without streaming.

The events are made in `generator_messages`.
"""

from io import StringIO

from deepseek_recipe.generator_messages import MessagesStreamEvent, usage_json
from deepseek_recipe.json_reader import parse_object
from deepseek_recipe.json_writer import compact_json, quote


class _Block:
    """One content block under construction."""

    def __init__(self, kind: str, call_id: str, name: str) -> None:
        self.kind = kind
        self.head = f'{{"type":"tool_use","id":{quote(call_id)},"name":{quote(name)},"input":'
        self.text = StringIO()
        self.signature = ""
        self.input = "{}"

    def json(self) -> str:
        if self.kind == "text":
            return f'{{"type":"text","text":{quote(self.text.getvalue())}}}'
        if self.kind == "tool_use":
            return f"{self.head}{self.input}}}"
        thoughts = quote(self.text.getvalue())
        return f'{{"type":"thinking","thinking":{thoughts},"signature":{quote(self.signature)}}}'


_TEXT_OF = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "tool_use"}


class MessagesResponse:
    """A Messages response under construction."""

    def __init__(self, id: str, model: str, created: int, prompt_tokens: int, prompt_cache_hit_tokens: int) -> None:
        self._id, self._model = id, model
        self._usage = usage_json(prompt_tokens, prompt_cache_hit_tokens, 0)
        self._blocks: list[_Block] = []
        self._stop_reason = self._stop_sequence = "null"

    def accumulate(self, chunk: MessagesStreamEvent) -> None:
        """Add an event, which is used up by it.

        Raises:
            TypeError: for an event of another protocol. RuntimeError: for an event that was used before.
        """
        if not isinstance(chunk, MessagesStreamEvent):
            raise TypeError(f"expected a MessagesStreamEvent, got {type(chunk).__name__}")
        text = chunk.text or ""
        frame = chunk.use()
        match frame.kind:
            case "message_start":
                self._id, self._model, self._usage = frame.data
                self._blocks = []
                self._stop_reason = self._stop_sequence = "null"
            case "content_block_start":
                index, *head = frame.data
                if index == len(self._blocks):
                    self._blocks.append(_Block(*head))
            case "message_delta":
                reason, self._stop_sequence, self._usage = frame.data
                self._stop_reason = quote(reason)
            case "ping" | "message_stop":
                pass
            case _:
                if frame.data < len(self._blocks):
                    self._change(self._blocks[frame.data], frame.kind, text)

    def _change(self, block: _Block, kind: str, text: str) -> None:
        if kind == "signature_delta":
            block.signature = text
        elif kind == "content_block_stop":
            if block.kind == "tool_use":
                block.input = compact_json(parse_object(block.text.getvalue()) or {})
        elif _TEXT_OF[kind] == block.kind:
            block.text.write(text)

    def to_json(self) -> str:
        """The response so far as compact JSON."""
        return (
            f'{{"id":{quote(self._id)},"type":"message","role":"assistant","model":{quote(self._model)},'
            f'"content":[{",".join(block.json() for block in self._blocks)}],"stop_reason":{self._stop_reason},'
            f'"stop_sequence":{self._stop_sequence},"usage":{self._usage}}}'
        )

    @staticmethod
    def sse_event_name(chunk: MessagesStreamEvent) -> str | None:
        """The type of the event."""
        return chunk.type()

    @staticmethod
    def sse_done_data() -> str | None:
        """None: nothing is sent after the last event."""
        return None
