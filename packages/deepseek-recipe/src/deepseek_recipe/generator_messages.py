"""Owns the events of a Messages answer.

What they add up to is in `response_messages`.
"""

from deepseek_recipe.events import Account, Ending, Event
from deepseek_recipe.json_writer import quote
from deepseek_recipe.pieces import Piece
from deepseek_recipe.request_body import OneUse

_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


class MessagesStreamEvent(Event):
    """An event of a Messages stream.

    Kinds are the types of the protocol, deltas with their own: message_start (data: the message), content_block_start
    (data: index, kind, id, name), thinking_delta, text_delta, input_json_delta (data: index), signature_delta,
    content_block_stop (data: index), ping, message_delta (data: stop reason, stop sequence, usage), message_stop.
    """

    __slots__ = ()

    @property
    def type(self) -> str:
        """The type of the event in the protocol."""
        return "content_block_delta" if self.kind.endswith("_delta") and self.kind != "message_delta" else self.kind


class MessagesChunkGenerator:
    """Makes the events of an answer; used by one `StreamProcessor`."""

    def __init__(self, id: str, model: str, thinking_mode: bool) -> None:
        self._writer = OneUse(MessagesWriter(id, model, thinking_mode), "chunk generator")

    def with_signature(self, signature: str) -> "MessagesChunkGenerator":
        """A generator that signs thoughts with `signature` instead of the id; this one is used up."""
        writer = self._writer.take()
        writer.signature = signature
        twin = MessagesChunkGenerator.__new__(MessagesChunkGenerator)
        twin._writer = OneUse(writer, "chunk generator")
        return twin

    def take_writer(self) -> "MessagesWriter":
        """The writer of the events, once.

        Raises:
            RuntimeError: if it was taken before.
        """
        return self._writer.take()


def usage_json(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> str:
    """The usage object of the protocol."""
    return (
        f'{{"input_tokens":{max(0, prompt_tokens - cached_tokens)},"cache_creation_input_tokens":0,'
        f'"cache_read_input_tokens":{cached_tokens},"output_tokens":{output_tokens},"service_tier":"standard"}}'
    )


class MessagesWriter:
    """Writes the events of one answer: blocks that open with the first part of a new kind and close with the next."""

    counts_reasoning = False

    def __init__(self, id: str, model: str, thinking: bool) -> None:
        self._id, self._model = id, model
        self.signature = id
        self.thinking = thinking
        self._account = Account()
        self._index = -1
        self._open_kind = ""
        self._prefix = ""

    def open(self, account: Account) -> list[Event]:
        """The opening events; in thinking mode a thinking block is opened at once."""
        self._account = account
        usage = usage_json(account.prompt_tokens, account.cached_tokens, 0)
        data = (self._id, self._model, usage)
        json = (
            f'{{"type":"message_start","message":{{"id":{quote(self._id)},"type":"message","role":"assistant",'
            f'"model":{quote(self._model)},"content":[],"stop_reason":null,"stop_sequence":null,"usage":{usage}}}}}'
        )
        events: list[Event] = [MessagesStreamEvent("message_start", None, json, "", data)]
        return events + self._start("thinking") if self.thinking else events

    def _start(self, kind: str, call_id: str = "", name: str = "") -> list[Event]:
        self._index += 1
        self._open_kind = kind
        block = {
            "thinking": '{"type":"thinking","thinking":"","signature":""}',
            "text": '{"type":"text","text":""}',
        }.get(kind, f'{{"type":"tool_use","id":{quote(call_id)},"name":{quote(name)},"input":{{}}}}')
        delta, member = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}.get(
            kind, ("input_json_delta", "partial_json")
        )
        self._prefix = (
            f'{{"type":"content_block_delta","index":{self._index},"delta":{{"type":"{delta}","{member}":'
        )
        json = f'{{"type":"content_block_start","index":{self._index},"content_block":{block}}}'
        data = (self._index, kind, call_id, name)
        events: list[Event] = [MessagesStreamEvent("content_block_start", None, json, "", data)]
        if not self._index:
            events.append(MessagesStreamEvent("ping", None, '{"type":"ping"}', ""))
        return events

    def _stop(self) -> list[Event]:
        """Close the open block, if any."""
        if not self._open_kind:
            return []
        index = self._index
        events: list[Event] = []
        if self._open_kind == "thinking":
            prefix = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"signature_delta","signature":'
            events.append(MessagesStreamEvent("signature_delta", self.signature, prefix, "}}", index))
        json = f'{{"type":"content_block_stop","index":{index}}}'
        events.append(MessagesStreamEvent("content_block_stop", None, json, "", index))
        self._open_kind = ""
        return events

    def content(self, text: str, piece: Piece | None) -> list[Event]:
        """A bit of the answer's text."""
        event = MessagesStreamEvent
        if self._open_kind == "text":
            return [event("text_delta", text, self._prefix, "}}", self._index)]
        events = self._stop() + self._start("text")
        return [*events, event("text_delta", text, self._prefix, "}}", self._index)]

    def reasoning(self, text: str, piece: Piece | None) -> list[Event]:
        """A bit of reasoning."""
        self._account.think(text)
        event = MessagesStreamEvent
        if self._open_kind == "thinking":
            return [event("thinking_delta", text, self._prefix, "}}", self._index)]
        events = self._stop() + self._start("thinking")
        return [*events, event("thinking_delta", text, self._prefix, "}}", self._index)]

    def start_call(self, name: str) -> list[Event]:
        """The start of a tool call."""
        return self._stop() + self._start("tool_use", self._account.next_call_id(self.thinking), name)

    def arguments(self, text: str) -> list[Event]:
        """A bit of the arguments of the last call."""
        return [MessagesStreamEvent("input_json_delta", text, self._prefix, "}}", self._index)]

    def close(self, ending: Ending) -> list[Event]:
        """The last events."""
        account = self._account
        if ending.stop_sequence is not None:
            reason = "stop_sequence"
        elif ending.cut is not None:
            reason = _STOP_REASONS[ending.cut]
        else:
            reason = "tool_use" if ending.is_call else "end_turn"
        sequence = "null" if ending.stop_sequence is None else quote(ending.stop_sequence)
        usage = usage_json(account.prompt_tokens, account.cached_tokens, account.completion_tokens)
        json = (
            f'{{"type":"message_delta","delta":{{"stop_reason":"{reason}","stop_sequence":{sequence}}},"usage":{usage}}}'
        )
        return [
            *self._stop(),
            MessagesStreamEvent("message_delta", None, json, "", (reason, sequence, usage)),
            MessagesStreamEvent("message_stop", None, '{"type":"message_stop"}', ""),
        ]
