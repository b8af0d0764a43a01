"""Owns the events of a Chat Completions answer.

What they add up to is in `response_chat`.
"""

import time

from deepseek_recipe.events import Account, Ending, Event, Frame
from deepseek_recipe.json_writer import quote
from deepseek_recipe.options import ConversationRequest
from deepseek_recipe.pieces import Piece
from deepseek_recipe.request_body import OneUse


class ChatCompletionChunk(Event):
    """An event of a Chat Completions stream.

    The data of a frame is a pair of the system fingerprint and, by kind: open (content, reasoning), content and
    reasoning (log probabilities), call (index, id, name), arguments (index of the call), finish (reason, usage).
    """

    __slots__ = ()


class ChatCompletionChunkGenerator:
    """Makes the events that answer a request; used by one `StreamProcessor`."""

    def __init__(self, request: ConversationRequest, id: str, model: str) -> None:
        self._writer = OneUse(ChatWriter(request, id, model), "chunk generator")

    def take_writer(self) -> "ChatWriter":
        """The writer of the events, once.

        Raises:
            RuntimeError: if it was taken before.
        """
        return self._writer.take()


class ChatWriter:
    """Writes the events of one answer."""

    counts_reasoning = True

    def __init__(self, request: ConversationRequest, id: str, model: str) -> None:
        self.thinking = request.conversation.thinking_mode
        stage = request.parsing_options.thinking_initial_stage
        self._starts_in_reasoning = stage is not None and stage.starts_in_reasoning()
        self._usage_null = ',"usage":null}' if request.context.null_usage else "}"
        self._id, self._model = id, model
        self._account = Account()
        self._head = self._tail = self._content_tail = ""
        self._content = self._reasoning = self._arguments = Frame("", "")

    def open(self, account: Account) -> list[Event]:
        """The opening event."""
        self._account = account
        fingerprint = "null" if account.system_fingerprint is None else quote(account.system_fingerprint)
        self._head = (
            f'{{"id":{quote(self._id)},"object":"chat.completion.chunk","created":{int(time.time())},'
            f'"model":{quote(self._model)},"system_fingerprint":{fingerprint},"choices":[{{"index":0,"delta":'
        )
        self._tail = f',"logprobs":null,"finish_reason":null}}]{self._usage_null}'
        self._content_tail = ',"reasoning_content":null}' if self.thinking else "}"
        self._content = self._frame("content", '{"content":', self._content_tail + self._tail)
        self._reasoning = self._frame("reasoning", '{"content":null,"reasoning_content":', "}" + self._tail)
        data: tuple[str | None, str | None] = ("", None)
        if not self.thinking:
            delta = '{"role":"assistant","content":""}'
        elif self._starts_in_reasoning:
            delta, data = '{"role":"assistant","content":null,"reasoning_content":""}', (None, "")
        else:
            delta = '{"role":"assistant","content":"","reasoning_content":null}'
        return [ChatCompletionChunk(self._frame("open", delta + self._tail, "", data))]

    def _frame(self, kind: str, delta: str, suffix: str, data: object = None) -> Frame:
        return Frame(kind, self._head + delta, suffix, (self._account.system_fingerprint, data))

    def _with_logprobs(self, frame: Frame, end: str, name: str, piece: Piece) -> Frame:
        entries = self._account.logprobs(piece.logprobs)
        suffix = f'{end},"logprobs":{{"{name}":[{entries}]}},"finish_reason":null}}]{self._usage_null}'
        return Frame(frame.kind, frame.prefix, suffix, (self._account.system_fingerprint, entries))

    def content(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of the answer's text."""
        frame = self._content
        if piece is not None and piece.logprobs:
            frame = self._with_logprobs(frame, self._content_tail, "content", piece)
        return [ChatCompletionChunk(frame, text)]

    def reasoning(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of reasoning."""
        self._account.think(text)
        frame = self._reasoning
        if piece is not None and piece.logprobs:
            frame = self._with_logprobs(frame, "}", "reasoning_content", piece)
        return [ChatCompletionChunk(frame, text)]

    def start_call(self, name: str) -> list[Event]:
        """The start of a tool call."""
        index = self._account.calls
        call_id = self._account.next_call_id(self.thinking)
        arguments = f'{{"tool_calls":[{{"index":{index},"function":{{"arguments":'
        self._arguments = self._frame("arguments", arguments, f"}}}}]}}{self._tail}", index)
        delta = (
            f'{{"tool_calls":[{{"index":{index},"id":{quote(call_id)},"type":"function","function":'
            f'{{"name":{quote(name)},"arguments":""}}}}]}}'
        )
        return [ChatCompletionChunk(self._frame("call", delta + self._tail, "", (index, call_id, name)))]

    def arguments(self, text: str) -> list[Event]:
        """A bit of the arguments of the last call."""
        return [ChatCompletionChunk(self._arguments, text)]

    def close(self, ending: Ending) -> list[Event]:
        """The last event."""
        reason = ending.cut or ("tool_calls" if ending.is_call else "stop")
        usage = self._usage()
        delta = f'{{"content":""{self._content_tail},"logprobs":null,"finish_reason":"{reason}"}}],"usage":{usage}}}'
        return [ChatCompletionChunk(self._frame("finish", delta, "", (reason, usage)))]

    def _usage(self) -> str:
        account = self._account
        reasoning = account.reasoning_tokens() if self.thinking else None
        details = "" if reasoning is None else f'"completion_tokens_details":{{"reasoning_tokens":{reasoning}}},'
        return (
            f'{{"prompt_tokens":{account.prompt_tokens},"completion_tokens":{account.completion_tokens},'
            f'"total_tokens":{account.prompt_tokens + account.completion_tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{account.cached_tokens}}},{details}'
            f'"prompt_cache_hit_tokens":{account.cached_tokens},"prompt_cache_miss_tokens":{account.missed_tokens}}}'
        )
