"""Owns the life of a stream: chunks of an engine in, events of a protocol out.

How output is parsed is in `output_parser` and `repair_parser`, how events look in the three generators.
"""

from collections.abc import Callable
from typing import Any, cast

from deepseek_recipe.events import Account, Ending, Event, Generator
from deepseek_recipe.generator_chat import ChatCompletionChunk
from deepseek_recipe.generator_messages import MessagesStreamEvent
from deepseek_recipe.generator_responses import ResponsesStreamEvent
from deepseek_recipe.grammar import Action, Grammar
from deepseek_recipe.inference_chunk import InferenceChunk, InferenceFinishReason
from deepseek_recipe.json_writer import quote
from deepseek_recipe.output_parser import OutputParser, Part
from deepseek_recipe.parsing_options import ParsingOptions
from deepseek_recipe.pieces import Piece, TokenRuns
from deepseek_recipe.repair_parser import RepairParser
from deepseek_recipe.replay import CallRecorder, ReplayMemory
from deepseek_recipe.tokenizer import Tokenizer

_CUTS = (InferenceFinishReason.Length, InferenceFinishReason.ContentFilter)

type _Events = list[ChatCompletionChunk | ResponsesStreamEvent | MessagesStreamEvent]


def _never(text: str) -> object:
    """A search that always finds something: no text goes straight through."""
    return True


class _NoText(dict[int, str]):
    """The text of tokens where there is no tokenizer: none goes straight through."""

    def __missing__(self, token_id: int) -> str:
        return ""


class StreamProcessor:
    """Turns the chunks of one answer into the events of the generator's protocol.

    Args:
        generator: makes the events; it is used up.
        options: how the output is parsed; copied.
        tokenizer: needed for token ids, and to count reasoning tokens.
        replay: remembers complete tool calls as they were written.

    Raises:
        RuntimeError: if the generator was used before.
    """

    def __init__(
        self,
        generator: Generator,
        options: ParsingOptions,
        tokenizer: Tokenizer | None = None,
        *,
        replay: ReplayMemory | None = None,
    ) -> None:
        options = options.copy()
        self._writer = generator.take_writer()
        self._tokenizer = tokenizer
        counts_reasoning = tokenizer is not None and options.thinking_initial_stage is not None
        self._account = Account(tokenizer, counts_reasoning and self._writer.counts_reasoning)
        self._repair = options.repair
        self._parser = RepairParser(options) if options.repair else OutputParser(Grammar(options))
        self._runs = TokenRuns(tokenizer, lossless="R12" in options.repair) if tokenizer else None
        self._whole_text: dict[int, str] = tokenizer.whole_text if tokenizer else _NoText()
        self._plain_text: Callable[[list[int]], str] = self._runs.plain_text if self._runs else lambda ids: ""
        self._name: list[str] = []
        self._opened = False
        self._closed = False
        self._finished = False
        self._finds_danger: Callable[[str], object] = _never
        self._finds_run_danger: Callable[[str], object] = _never
        self._emit: Callable[[str], Any] = self._drop
        self._memory = replay
        self._recorder = CallRecorder(options.special_tokens, starts_in_calls=options.starts_in_tool_calls)
        self._on = self._actions()
        self._straight: dict[Action, Callable[[str], list[Event]]] = {
            Action.CONTENT: self._writer.content,
            Action.REASONING: self._writer.reasoning,
            Action.DROP: self._drop,
            Action.ESCAPED: self._escaped,
            Action.RAW: self._writer.arguments,
        }

    @property
    def warnings(self) -> list[str]:
        """What was repaired, as `name: detail`; empty without `repair`."""
        return self._parser.warnings if isinstance(self._parser, RepairParser) else []

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and the processor has not been closed."""
        return self._finished and not self._closed

    def push(self, chunk: InferenceChunk) -> _Events:
        """Take a chunk; return the events that follow from it.

        Raises:
            RuntimeError: after the end or after `close`, for token ids without a tokenizer, and for log probabilities
                that do not match the ids. The last two close the processor.
        """
        text = chunk.content
        if text:
            if self._finds_danger(text) is None:
                self._account.completion_tokens += chunk.count
                events: _Events = self._emit(text)
                return events
        elif chunk.plain_ids:
            ids = chunk.plain_ids
            text = self._whole_text[ids[0]] if len(ids) == 1 else self._plain_text(ids)
            if text and self._finds_run_danger(text) is None:
                self._account.completion_tokens += chunk.count
                events = self._emit(text)
                return events  # noqa: RET504 - a cast would be a call for every token
        return cast(_Events, self._push(chunk))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("stream processor is closed")

    def _open(self, chunk: InferenceChunk | None) -> list[Event]:
        if self._opened:
            return []
        self._opened = True
        if chunk is not None and chunk.kind == "ready":
            self._account.set_prompt(chunk.prompt_usage, chunk.system_fingerprint)
        return self._writer.open(self._account)

    def _push(self, chunk: InferenceChunk) -> list[Event]:
        self._check_open()
        if self._finished:
            raise RuntimeError("stream processor has finished")
        events = [] if self._opened else self._open(chunk)
        match chunk.kind:
            case "tokens":
                pieces = self._token_pieces(chunk)
            case "ready":
                return events
            case "finish":
                return events + self._end(chunk.finish_reason)
            case _:
                pieces = [Piece(chunk.content or "", chunk.token_count or 0)]
        return events + self._feed(pieces)

    def _token_pieces(self, chunk: InferenceChunk) -> list[Piece]:
        if self._runs is None:
            self.close()
            raise RuntimeError("token chunk received without a tokenizer")
        ids, logprobs = chunk.token_ids or [], chunk.logprobs
        if logprobs is not None and len(logprobs) != len(ids):
            self.close()
            raise RuntimeError(f"invalid log probabilities: {len(logprobs)} log probabilities for {len(ids)} token IDs")
        return self._runs.pieces(ids, logprobs)

    def _feed(self, pieces: list[Piece]) -> list[Event]:
        parser = self._parser
        for piece in pieces:
            self._account.completion_tokens += piece.count
            if self._memory is not None:
                self._recorder.add(piece)
            parser.feed(piece)
            if parser.stop_sequence is not None:
                return self._end(None)
        parts = parser.end_push()
        events = self._write(parts) if parts else []
        self._settle()
        return events

    def _end(self, reason: InferenceFinishReason | None) -> list[Event]:
        """Flush, then the closing events."""
        parser = self._parser
        self._finds_danger = self._finds_run_danger = _never
        self._finished = True
        has_calls = self._account.calls > 0
        if isinstance(parser, OutputParser):
            events = self._write(parser.finish())
        else:
            for piece in self._runs.last() if self._runs and parser.stop_sequence is None else ():
                self._account.completion_tokens += piece.count
                parser.feed(piece)
            events = self._write(parser.finish(reason in _CUTS))
            has_calls = self._account.calls > 0
            if reason is None and parser.stop_sequence is None and "R13" in self._repair:
                reason = InferenceFinishReason.Stop
        if self._memory is not None and self._account.calls and reason not in _CUTS:
            self._memory.remember(self._recorder.calls(self._account.call_ids), self._recorder.block())
        return events + self._writer.close(Ending(reason, parser.stop_sequence, has_calls))

    def _actions(self) -> dict[Action, Callable[[str, Piece], list[Event]]]:
        """What each action does with the text of a part."""
        content, arguments = self._writer.content, self._writer.arguments
        return {
            Action.CONTENT: content,
            Action.JSON_OPEN: content,
            Action.REASONING: self._writer.reasoning,
            Action.SPACE: lambda text, piece: content(" ", piece),
            Action.DROP: self._drop,
            Action.NAME: self._collect_name,
            Action.RAW: lambda text, piece: arguments(text),
            Action.ESCAPED: self._escaped,
            Action.FIXED: lambda text, piece: arguments(text) if text else [],
            Action.START_CALL: self._start_call,
        }

    def _write(self, parts: list[Part]) -> list[Event]:
        """The events of some parts."""
        events: list[Event] = []
        for action, text, piece in parts:
            events += self._on[action](text, piece)
            if self._memory is not None and action in (Action.RAW, Action.ESCAPED, Action.FIXED):
                self._recorder.arguments(quote(text)[1:-1] if action is Action.ESCAPED else text)
        return events

    def _escaped(self, text: str, piece: Piece | None = None) -> list[Event]:
        return self._writer.arguments(quote(text)[1:-1])

    def _drop(self, text: str, piece: Piece | None = None) -> list[Event]:
        return []

    def _collect_name(self, text: str, piece: Piece) -> list[Event]:
        self._name.append(text)
        return []

    def _start_call(self, text: str, piece: Piece) -> list[Event]:
        name, self._name = "".join(self._name), []
        self._recorder.start_call(name)
        return self._writer.start_call(name)

    def _settle(self) -> None:
        """Find out whether plain text can go straight through, and to where."""
        parser = self._parser
        if not isinstance(parser, OutputParser) or self._memory is not None:
            return
        state = parser.state
        emit = self._straight.get(state.default)
        if emit is None or not parser.is_idle():
            self._finds_danger = self._finds_run_danger = _never
            return
        self._emit = emit
        self._finds_danger, self._finds_run_danger = state.patterns.searches
        if self._runs is not None and self._runs.is_held():
            self._finds_run_danger = _never

    def finish(self) -> _Events:
        """End the answer without a reason from the engine; nothing if it has ended.

        Raises:
            RuntimeError: after `close`.
        """
        self._check_open()
        if self._finished:
            return []
        return cast(_Events, self._open(None) + self._end(None))

    def close(self) -> None:
        """Stop; what is held is dropped. May be repeated."""
        self._closed = True
        self._finds_danger = self._finds_run_danger = _never
