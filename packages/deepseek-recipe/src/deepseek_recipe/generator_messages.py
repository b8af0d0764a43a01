"""Owns the events of a Messages answer.

What they add up to is in `response_messages`.
"""

from deepseek_recipe.events import Account, Ending, Event, Frame
from deepseek_recipe.json_writer import quote
from deepseek_recipe.pieces import Piece
from deepseek_recipe.request_body import OneUse

_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


class MessagesStreamEvent(Event):
    """An event of a Messages stream.

    The kinds of frames are the types of the protocol, deltas each with their own. Their data: message_start (id, model,
    usage), content_block_start (index, kind, id, name), the deltas and content_block_stop (index), message_delta (stop
    reason, stop sequence, usage).
    """

    __slots__ = ()

    def type(self) -> str:
        """The type of the event in the protocol.

        Raises:
            RuntimeError: if the event has been accumulated.
        """
        kind = self.frame().kind
        return "content_block_delta" if kind.endswith("_delta") and kind != "message_delta" else kind


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


def _fixed(kind: str, json: str, data: object = None) -> Event:
    return MessagesStreamEvent(Frame(kind, json, "", data))


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
        self._delta = Frame("", "")

    def open(self, account: Account) -> list[Event]:
        """The opening events; in thinking mode a thinking block is opened at once."""
        self._account = account
        usage = usage_json(account.prompt_tokens, account.cached_tokens, 0)
        data = (self._id, self._model, usage)
        json = (
            f'{{"type":"message_start","message":{{"id":{quote(self._id)},"type":"message","role":"assistant",'
            f'"model":{quote(self._model)},"content":[],"stop_reason":null,"stop_sequence":null,"usage":{usage}}}}}'
        )
        events: list[Event] = [_fixed("message_start", json, data)]
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
        prefix = f'{{"type":"content_block_delta","index":{self._index},"delta":{{"type":"{delta}","{member}":'
        self._delta = Frame(delta, prefix, "}}", self._index)
        json = f'{{"type":"content_block_start","index":{self._index},"content_block":{block}}}'
        data = (self._index, kind, call_id, name)
        events: list[Event] = [_fixed("content_block_start", json, data)]
        if not self._index:
            events.append(_fixed("ping", '{"type":"ping"}'))
        return events

    def _stop(self) -> list[Event]:
        """Close the open block, if any."""
        if not self._open_kind:
            return []
        index = self._index
        events: list[Event] = []
        if self._open_kind == "thinking":
            prefix = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"signature_delta","signature":'
            events.append(MessagesStreamEvent(Frame("signature_delta", prefix, "}}", index), self.signature))
        json = f'{{"type":"content_block_stop","index":{index}}}'
        events.append(_fixed("content_block_stop", json, index))
        self._open_kind = ""
        return events

    def content(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of the answer's text."""
        if self._open_kind == "text":
            return [MessagesStreamEvent(self._delta, text)]
        return [*self._stop(), *self._start("text"), MessagesStreamEvent(self._delta, text)]

    def reasoning(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of reasoning."""
        self._account.think(text)
        if self._open_kind == "thinking":
            return [MessagesStreamEvent(self._delta, text)]
        return [*self._stop(), *self._start("thinking"), MessagesStreamEvent(self._delta, text)]

    def start_call(self, name: str) -> list[Event]:
        """The start of a tool call."""
        return self._stop() + self._start("tool_use", self._account.next_call_id(self.thinking), name)

    def arguments(self, text: str) -> list[Event]:
        """A bit of the arguments of the last call."""
        return [MessagesStreamEvent(self._delta, text)]

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
        delta = f'{{"stop_reason":"{reason}","stop_sequence":{sequence}}}'
        json = f'{{"type":"message_delta","delta":{delta},"usage":{usage}}}'
        return [
            *self._stop(),
            _fixed("message_delta", json, (reason, sequence, usage)),
            _fixed("message_stop", '{"type":"message_stop"}'),
        ]
