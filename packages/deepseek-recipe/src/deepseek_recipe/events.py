"""Owns what the three protocols' events share: single use, JSON text, the account of an answer, log probabilities.

The events themselves are made in `generator_chat`, `generator_messages` and `generator_responses`.
"""

import random
import string
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Final, Protocol

from deepseek_recipe.inference_chunk import InferenceFinishReason, PromptUsage, TokenLogprobs
from deepseek_recipe.json_writer import f32_text, quote
from deepseek_recipe.pieces import Piece
from deepseek_recipe.tokenizer import Tokenizer


class Frame:
    """What surrounds the text of an event: its kind, the JSON before and after, and what an accumulator needs to know.

    Events of one kind share a frame, so that an event for every token is cheap.
    """

    __slots__ = ("data", "kind", "prefix", "suffix")

    def __init__(self, kind: str, prefix: str, suffix: str = "", data: Any = None) -> None:
        self.kind = kind
        self.prefix = prefix
        self.suffix = suffix
        self.data = data


class Event:
    """One event of a stream. Its text, if it has any, stands inside its frame as a JSON string."""

    __slots__ = ("_frame", "text")

    def __init__(self, frame: Frame, text: str | None = None) -> None:
        self._frame: Frame | None = frame
        self.text = text

    def frame(self) -> Frame:
        """What surrounds the text.

        Raises:
            RuntimeError: if the event has been accumulated.
        """
        if self._frame is None:
            raise RuntimeError("protocol chunk has been consumed")
        return self._frame

    def to_json(self) -> str:
        """The event as compact JSON.

        Raises:
            RuntimeError: if it has been accumulated.
        """
        frame = self._frame
        if frame is None:
            raise RuntimeError("protocol chunk has been consumed")
        text = self.text
        return frame.prefix if text is None else frame.prefix + quote(text) + frame.suffix

    def use(self) -> Frame:
        """The frame, for the event's single use by an accumulator.

        Raises:
            RuntimeError: if it has been accumulated.
        """
        frame = self.frame()
        self._frame = None
        return frame


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended; `reason` is None where the engine gave none."""

    reason: InferenceFinishReason | None
    stop_sequence: str | None
    has_calls: bool

    @property
    def is_call(self) -> bool:
        """Whether the answer ended with a call of tools."""
        return self.has_calls and self.reason is InferenceFinishReason.Stop and self.stop_sequence is None

    @property
    def cut(self) -> str | None:
        """Why the answer is not complete: length or content_filter."""
        if self.reason is None or self.reason is InferenceFinishReason.Stop:
            return None
        return str(self.reason.value)


@dataclass(slots=True)
class Account:
    """What is counted while an answer is generated."""

    tokenizer: Tokenizer | None = None
    counts_reasoning: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    system_fingerprint: str | None = None
    thoughts: StringIO = field(default_factory=StringIO)
    thought: bool = False
    """Whether any reasoning that is not empty has been given out."""
    call_ids: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """How many calls have been started."""
        return len(self.call_ids)

    def set_prompt(self, usage: PromptUsage | None, fingerprint: str | None) -> None:
        """Note what the engine says of the prompt."""
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens
            self.cached_tokens = usage.prompt_cache_hit_tokens
        self.system_fingerprint = fingerprint

    def think(self, text: str) -> None:
        """Note reasoning that is given out."""
        if text:
            self.thought = True
            if self.counts_reasoning:
                self.thoughts.write(text)

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were not found in a cache."""
        return max(0, self.prompt_tokens - self.cached_tokens)

    def reasoning_tokens(self) -> int | None:
        """How many tokens all reasoning text makes; None if that is not counted."""
        if not self.counts_reasoning or self.tokenizer is None:
            return None
        return self.tokenizer.count(self.thoughts.getvalue())

    def next_call_id(self, thinking: bool) -> str:
        """A fresh id: index of the call, a mark for calls without any thought, and random characters."""
        early = "ET_" if thinking and not self.thought else ""
        letters = "".join(_RANDOM.choices(_ID_CHARACTERS, k=20))
        call_id = f"call_{self.calls:02d}_{early}{letters}{_RANDOM.randrange(10_000):04d}"
        self.call_ids.append(call_id)
        return call_id

    def logprobs(self, entries: list[tuple[int, TokenLogprobs]] | None) -> str:
        """Log probabilities as the inside of a JSON list."""
        if not entries or self.tokenizer is None:
            return ""
        return ",".join(self._entry(token_id, logprob, top) for token_id, (logprob, top) in entries)

    def _entry(self, token_id: int, logprob: float, top: list[tuple[int, float]]) -> str:
        others = ",".join(f"{{{self._token(other, value)}}}" for other, value in top)
        return f'{{{self._token(token_id, logprob)},"top_logprobs":[{others}]}}'

    def _token(self, token_id: int, logprob: float) -> str:
        assert self.tokenizer is not None
        data = self.tokenizer.token_bytes[token_id]
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "".join(f"\\x{byte:02x}" for byte in data)
        return f'"token":{quote(text)},"logprob":{f32_text(logprob)},"bytes":[{",".join(map(str, data))}]'


class Writer(Protocol):
    """What turns parts of an answer into the events of a protocol."""

    counts_reasoning: bool
    """Whether the events say how many tokens the reasoning has."""

    def open(self, account: Account) -> list[Event]:
        """The opening events."""

    def content(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of the answer's text."""

    def reasoning(self, text: str, piece: Piece | None = None) -> list[Event]:
        """A bit of reasoning."""

    def start_call(self, name: str) -> list[Event]:
        """The start of a tool call."""

    def arguments(self, text: str) -> list[Event]:
        """A bit of the arguments of the last call."""

    def close(self, ending: Ending) -> list[Event]:
        """The last events."""


class Generator(Protocol):
    """What gives a stream processor its writer, once."""

    def take_writer(self) -> Writer:
        """The writer of the events."""


_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_RANDOM: Final = random.SystemRandom()
