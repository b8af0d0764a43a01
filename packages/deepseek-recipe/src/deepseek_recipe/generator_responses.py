"""Owns the events of a Responses answer.

The JSON of items and responses is in `responses_output`, what the events add up to in `response_responses`.
"""

import time
from collections.abc import Callable
from io import StringIO
from typing import override

from deepseek_recipe.echo import ResponsesEcho
from deepseek_recipe.events import Account, Ending, Event, Frame
from deepseek_recipe.json_reader import parse_object
from deepseek_recipe.json_writer import quote
from deepseek_recipe.options import ConversationRequest, ResponseContext
from deepseek_recipe.patch_input import PatchInput
from deepseek_recipe.pieces import Piece
from deepseek_recipe.request_body import OneUse
from deepseek_recipe.responses_output import Item, ItemHead, ResponseHead, part_json
from deepseek_recipe.responses_tools import TOOL_SEARCH

_PREFIXES = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
_DELTAS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesStreamEvent(Event):
    """An event of a Responses stream.

    The kind of a frame is the type without `response.`; its data are (head of the response, its output) for created,
    in_progress, completed and incomplete, and (index of the item, details) for the others. The numbers of deltas are
    not part of their frames.
    """

    __slots__ = ("_number",)

    def __init__(self, frame: Frame, text: str | None = None, number: int = 0) -> None:
        self._frame = frame
        self.text = text
        self._number = number

    @override
    def to_json(self) -> str:
        """The event as compact JSON.

        Raises:
            RuntimeError: if it has been accumulated.
        """
        frame = self._frame
        if frame is None:
            raise RuntimeError("protocol chunk has been consumed")
        text = self.text
        return frame.prefix if text is None else f"{frame.prefix}{quote(text)}{frame.suffix}{self._number}}}"


class ResponsesChunkGenerator:
    """Makes the events of an answer; used by one `StreamProcessor`. What it repeats comes from the request."""

    def __init__(self, request: ConversationRequest, id: str, model: str) -> None:
        self._writer = OneUse(ResponsesWriter(request, id, model), "chunk generator")

    def _with(self, **changes: object) -> "ResponsesChunkGenerator":
        writer = self._writer.take()
        for name, value in changes.items():
            setattr(writer, name, value)
        twin = ResponsesChunkGenerator.__new__(ResponsesChunkGenerator)
        twin._writer = OneUse(writer, "chunk generator")
        return twin

    def with_namespace_tool_map(self, namespace_tool_map: dict[str, tuple[str, str]]) -> "ResponsesChunkGenerator":
        """A generator with another map from full names to (namespace, local name); this one is used up."""
        return self._with(namespaces={name: (pair[0], pair[1]) for name, pair in namespace_tool_map.items()})

    def with_echo(self, echo: ResponsesEcho) -> "ResponsesChunkGenerator":
        """A generator that repeats `echo`; this one is used up."""
        return self._with(echo=echo)

    def take_writer(self) -> "ResponsesWriter":
        """The writer of the events, once.

        Raises:
            RuntimeError: if it was taken before.
        """
        return self._writer.take()


class ResponsesWriter:
    """Writes the events of one answer: items that open with the first part of a new kind and close with the next."""

    counts_reasoning = True

    def __init__(self, request: ConversationRequest, id: str, model: str) -> None:
        context = request.context if request.context.protocol == "responses" else ResponseContext()
        self.thinking = request.conversation.thinking_mode
        self.echo = context.echo
        self.namespaces = context.namespace_tools
        self._custom = context.custom_tools
        self._client_search = context.client_tool_search
        self._id, self._model = id, model
        self._head = ResponseHead(id, model, 0)
        self._account = Account()
        self._sequence = 0
        self._item: Item | None = None
        self._open_kind = ""
        self._write: Callable[[str], int] = StringIO().write
        self._done: list[str] = []
        self._delta = Frame("", "")
        self._patch = PatchInput()

    def open(self, account: Account) -> list[Event]:
        """The two opening events."""
        self._account = account
        self._head = ResponseHead(self._id, self._model, int(time.time()), self.echo)
        return [self._response("created"), self._response("in_progress")]

    def _number(self) -> int:
        number, self._sequence = self._sequence, self._sequence + 1
        return number

    def _response(self, kind: str) -> Event:
        output = ",".join(self._done)
        json = f'{{"type":"response.{kind}","response":{self._head.json(output)},"sequence_number":{self._number()}}}'
        return ResponsesStreamEvent(Frame(kind, json, "", (self._head, list(self._done))))

    def _event(self, kind: str, members: str, data: object, after: str = "") -> Event:
        json = f'{{"type":"response.{kind}",{members},"sequence_number":{self._number()}{after}}}'
        return ResponsesStreamEvent(Frame(kind, json, "", data))

    def _start(self, kind: str, call_id: str = "", name: str = "", namespace: str | None = None) -> list[Event]:
        """Close the open item, then open one of another kind."""
        events = self._close_item("completed")
        index = len(self._done)
        head = ItemHead(kind, f"{_PREFIXES[kind]}_{self._id}_{index}", call_id, name, namespace, f"{self._id}-{index}")
        self._item = item = Item(head)
        self._open_kind, self._write = kind, item.text.write
        events.append(self._event("output_item.added", f'"item":{item.json()},"output_index":{index}', (index, head)))
        place = f'"item_id":{quote(head.id)}'
        if kind in ("reasoning", "message"):
            item.has_part = True
            part = part_json(kind, '""', "")
            members = f'"content_index":0,{place},"output_index":{index},"part":{part}'
            events.append(self._event("content_part.added", members, (index, None)))
        if kind != "tool_search_call":
            content = '"content_index":0,' if item.has_part else ""
            delta = f"{_DELTAS[kind]}.delta"
            logprobs = ',"logprobs":[]' if kind == "message" else ""
            suffix = f',{place}{logprobs},"output_index":{index},"sequence_number":'
            self._delta = Frame(delta, f'{{"type":"response.{delta}",{content}"delta":', suffix, (index, ""))
        return events

    def content(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of the answer's text."""
        if self._open_kind != "message":
            return self._start("message") + self.content(text, piece)
        self._write(text)
        number = self._sequence
        self._sequence = number + 1
        if piece is None or not piece.logprobs or self._item is None:
            return [ResponsesStreamEvent(self._delta, text, number)]
        entries = self._account.logprobs(piece.logprobs)
        self._item.logprobs.append(entries)
        suffix = self._delta.suffix.replace('"logprobs":[]', f'"logprobs":[{entries}]', 1)
        frame = Frame(self._delta.kind, self._delta.prefix, suffix, (len(self._done), entries))
        return [ResponsesStreamEvent(frame, text, number)]

    def reasoning(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of reasoning."""
        if self._open_kind != "reasoning":
            return self._start("reasoning") + self.reasoning(text, piece)
        self._write(text)
        number = self._sequence
        self._sequence = number + 1
        return [ResponsesStreamEvent(self._delta, text, number)]

    def start_call(self, name: str) -> list[Event]:
        """The start of a tool call: a function, the patch tool if it was declared, or a tool search of the client."""
        events = self._close_item("completed", before_call=True)
        call_id = self._account.next_call_id(self.thinking)
        if name in self._custom:
            self._patch = PatchInput()
            return events + self._start("custom_tool_call", call_id=call_id, name=name)
        if self._client_search and name == TOOL_SEARCH:
            return events + self._start("tool_search_call", call_id=call_id)
        namespace, local = self.namespaces.get(name, (None, name))
        return events + self._start("function_call", call_id=call_id, name=local, namespace=namespace)

    def arguments(self, text: str) -> list[Event]:
        """A bit of the arguments of the last call."""
        kind = self._open_kind
        if kind == "custom_tool_call":
            text = self._patch.feed(text)
            if not text:
                return []
        self._write(text)
        if kind == "tool_search_call":
            return []
        number = self._sequence
        self._sequence = number + 1
        return [ResponsesStreamEvent(self._delta, text, number)]

    def _close_item(self, status: str, *, before_call: bool = False, cut: bool = False) -> list[Event]:
        item, self._item, self._open_kind = self._item, None, ""
        if item is None:
            return []
        kind, index = item.head.kind, len(self._done)
        item.status = status
        if kind == "reasoning":
            self._account.think(item.text.getvalue())
        events = self._text_done(item, index)
        if kind == "message" and before_call:
            item.phase = "commentary"
        if kind == "tool_search_call":
            _close_search(item, cut)
        json = item.json()
        self._done.append(json)
        events.append(self._event("output_item.done", f'"item":{json},"output_index":{index}', (index, json)))
        return events

    def _text_done(self, item: Item, index: int) -> list[Event]:
        """The events that repeat the whole text of an item."""
        kind = item.head.kind
        place = f'"item_id":{quote(item.head.id)}'
        data = (index, None)
        if kind == "custom_tool_call":
            rest = self._patch.finish()
            item.text.write(rest)
            events: list[Event] = [ResponsesStreamEvent(self._delta, rest, self._number())] if rest else []
            members = f'"input":{item.value()},{place},"output_index":{index}'
            return [*events, self._event("custom_tool_call_input.done", members, data)]
        if kind == "function_call":
            members = f'"arguments":{item.value()},{place},"output_index":{index}'
            return [self._event("function_call_arguments.done", members, data)]
        if kind == "tool_search_call":
            return []
        logprobs = f',"logprobs":[{",".join(item.logprobs)}]' if kind == "message" else ""
        done = f'"content_index":0,{place}{logprobs},"output_index":{index}'
        part = f'"content_index":0,{place},"output_index":{index},"part":{item.part()}'
        return [
            self._event(f"{_DELTAS[kind]}.done", done, data, f',"text":{item.value()}'),
            self._event("content_part.done", part, data),
        ]

    def close(self, ending: Ending) -> list[Event]:
        """The last events."""
        cut = ending.cut
        events = self._close_item("incomplete" if cut else "completed", cut=cut is not None)
        self._head = self._head._replace(
            status="incomplete" if cut else "completed",
            completed_at=int(time.time()),
            incomplete_reason=_INCOMPLETE[cut] if cut else None,
            usage=self._usage(),
        )
        return [*events, self._response("incomplete" if cut else "completed")]

    def _usage(self) -> str:
        account = self._account
        return (
            f'{{"input_tokens":{account.prompt_tokens},"input_tokens_details":{{"cached_tokens":'
            f'{account.cached_tokens}}},"output_tokens":{account.completion_tokens},"output_tokens_details":'
            f'{{"reasoning_tokens":{account.reasoning_tokens() or 0}}},'
            f'"total_tokens":{account.prompt_tokens + account.completion_tokens}}}'
        )


def _close_search(item: Item, cut: bool) -> None:
    """A tool search that was cut or whose arguments cannot be read has none and is incomplete."""
    if cut or parse_object(item.text.getvalue()) is None:
        item.text.truncate(0)
        item.text.seek(0)
        item.status = "incomplete"
