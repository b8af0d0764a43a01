"""Owns the events of a Chat Completions answer.

What they add up to is in `response_chat`.
"""

import time

from deepseek_recipe.events import Account, Ending, Event
from deepseek_recipe.json_writer import quote
from deepseek_recipe.options import ConversationRequest
from deepseek_recipe.pieces import Piece
from deepseek_recipe.request_body import OneUse


class ChatCompletionChunk(Event):
    """An event of a Chat Completions stream.

    Kinds: open (data: content and reasoning), content and reasoning (data: log probabilities), call (data: index, id,
    name), arguments (data: index of the call), finish (data: reason, usage).
    """

    __slots__ = ("fingerprint",)

    def __init__(
        self, kind: str, text: str | None, prefix: str, suffix: str, data: object = None, fingerprint: str | None = None
    ) -> None:
        # Spelled out instead of calling the base class: one of these is made for every token.
        self.kind = kind
        self.text = text
        self.prefix = prefix
        self.suffix = suffix
        self.data = data
        self._used = False
        self.fingerprint = fingerprint


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
        direct = request.context.protocol != "chat"
        self._usage_null = ',"usage":null}' if direct or request.context.null_usage else "}"
        self._id, self._model = id, model
        self._account = Account()
        self._fingerprint: str | None = None
        self._head = self._plain_tail = self._plain_content = self._plain_reasoning = ""
        self._arguments = self._arguments_tail = ""
        self._content = self._reasoning = self._content_tail = self._reasoning_tail = ""

    def open(self, account: Account) -> list[Event]:
        """The opening event."""
        self._account = account
        self._fingerprint = account.system_fingerprint
        fingerprint = "null" if account.system_fingerprint is None else quote(account.system_fingerprint)
        self._head = (
            f'{{"id":{quote(self._id)},"object":"chat.completion.chunk","created":{int(time.time())},'
            f'"model":{quote(self._model)},"system_fingerprint":{fingerprint},"choices":[{{"index":0,"delta":'
        )
        self._plain_tail = f',"logprobs":null,"finish_reason":null}}]{self._usage_null}'
        self._content = f'{self._head}{{"content":'
        self._content_tail = ',"reasoning_content":null}' if self.thinking else "}"
        self._reasoning = f'{self._head}{{"content":null,"reasoning_content":'
        self._plain_content = self._content_tail + self._plain_tail
        self._plain_reasoning = "}" + self._plain_tail
        if not self.thinking:
            delta, data = '{"role":"assistant","content":""}', ("", None)
        elif self._starts_in_reasoning:
            delta, data = '{"role":"assistant","content":null,"reasoning_content":""}', (None, "")
        else:
            delta, data = '{"role":"assistant","content":"","reasoning_content":null}', ("", None)
        return [self._fixed("open", delta, data)]

    def _fixed(self, kind: str, delta: str, data: object) -> Event:
        return ChatCompletionChunk(
            kind, None, f"{self._head}{delta}{self._plain_tail}", "", data, self._fingerprint
        )

    def _logprobs(self, name: str, entries: str) -> str:
        return f',"logprobs":{{"{name}":[{entries}]}},"finish_reason":null}}]{self._usage_null}'

    def content(self, text: str, piece: Piece | None) -> list[Event]:
        """A bit of the answer's text."""
        if piece is None or not piece.logprobs:
            return [ChatCompletionChunk("content", text, self._content, self._plain_content, None, self._fingerprint)]
        entries = self._account.logprobs(piece.logprobs)
        suffix = self._content_tail + self._logprobs("content", entries)
        return [ChatCompletionChunk("content", text, self._content, suffix, entries, self._fingerprint)]

    def reasoning(self, text: str, piece: Piece | None) -> list[Event]:
        """A bit of reasoning."""
        self._account.think(text)
        if piece is None or not piece.logprobs:
            return [ChatCompletionChunk("reasoning", text, self._reasoning, self._plain_reasoning, None, self._fingerprint)]
        entries = self._account.logprobs(piece.logprobs)
        suffix = "}" + self._logprobs("reasoning_content", entries)
        return [ChatCompletionChunk("reasoning", text, self._reasoning, suffix, entries, self._fingerprint)]

    def start_call(self, name: str) -> list[Event]:
        """The start of a tool call."""
        index = self._account.calls
        call_id = self._account.next_call_id(self.thinking)
        self._arguments = f'{self._head}{{"tool_calls":[{{"index":{index},"function":{{"arguments":'
        self._arguments_tail = f"}}}}]}}{self._plain_tail}"
        delta = (
            f'{{"tool_calls":[{{"index":{index},"id":{quote(call_id)},"type":"function","function":'
            f'{{"name":{quote(name)},"arguments":""}}}}]}}'
        )
        return [self._fixed("call", delta, (index, call_id, name))]

    def arguments(self, text: str) -> list[Event]:
        """A bit of the arguments of the last call."""
        index = self._account.calls - 1
        return [
            ChatCompletionChunk("arguments", text, self._arguments, self._arguments_tail, index, self._fingerprint)
        ]

    def close(self, ending: Ending) -> list[Event]:
        """The last event."""
        reason = ending.cut or ("tool_calls" if ending.is_call else "stop")
        delta = f'{{"content":""{self._content_tail}'
        usage = self._usage()
        json = f'{self._head}{delta},"logprobs":null,"finish_reason":"{reason}"}}],"usage":{usage}}}'
        return [ChatCompletionChunk("finish", None, json, "", (reason, usage), self._fingerprint)]

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
