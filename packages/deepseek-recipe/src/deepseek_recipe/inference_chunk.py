"""Owns what an inference engine reports while it generates: readiness, text or token ids, and the end.

What becomes of it is in `stream_processor`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import index as as_int
from typing import Literal

type TokenLogprobs = tuple[float, list[tuple[int, float]]]
"""The log probability of a generated token, and those of the most likely tokens as (id, log probability)."""


class InferenceFinishReason(Enum):
    """Why generation ended."""

    Stop = "stop"
    Length = "length"
    ContentFilter = "content_filter"


def _u32(value: int, what: str) -> int:
    number = as_int(value)
    if not 0 <= number < 1 << 32:
        raise OverflowError(f"{what} must be in [0, 2^32), not {number}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUsage:
    """How long the prompt was, and how much of it was found in a cache."""

    prompt_tokens: int = 0
    prompt_cache_hit_tokens: int = 0

    def __post_init__(self) -> None:
        _u32(self.prompt_tokens, "prompt_tokens")
        _u32(self.prompt_cache_hit_tokens, "prompt_cache_hit_tokens")


class InferenceChunk:
    """One report of an engine. Make one with `ready`, `text`, `tokens` or `finish`."""

    __slots__ = (
        "content",
        "count",
        "finish_reason",
        "kind",
        "logprobs",
        "plain_ids",
        "prompt_usage",
        "system_fingerprint",
        "token_count",
        "token_ids",
    )

    def __init__(self, kind: Literal["ready", "text", "tokens", "finish"]) -> None:
        self.kind = kind
        self.content: str | None = None
        self.token_count: int | None = None
        self.count = 0
        """How many tokens this is, for text and for ids."""
        self.token_ids: list[int] | None = None
        self.plain_ids: list[int] | None = None
        """The ids, if they have no log probabilities."""
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: InferenceFinishReason | None = None
        self.prompt_usage: PromptUsage | None = None
        self.system_fingerprint: str | None = None

    @staticmethod
    def ready(*, prompt_usage: PromptUsage | None = None, system_fingerprint: str | None = None) -> "InferenceChunk":
        """The prompt has been processed; only the first chunk of a stream counts."""
        chunk = InferenceChunk("ready")
        chunk.prompt_usage = prompt_usage
        chunk.system_fingerprint = system_fingerprint
        return chunk

    @staticmethod
    def text(content: str, token_count: int = 0) -> "InferenceChunk":
        """Generated text, already decoded, and how many tokens it was.

        Raises:
            TypeError: for other types. OverflowError: for a count outside of [0, 2^32).
        """
        if not isinstance(content, str):
            raise TypeError(f"content must be str, not {type(content).__name__}")
        if not content.isascii():
            content.encode()
        chunk = InferenceChunk("text")
        chunk.content = content
        chunk.token_count = chunk.count = _u32(token_count, "token_count")
        return chunk

    @staticmethod
    def tokens(
        token_ids: Sequence[int], logprobs: Sequence[tuple[float, Sequence[tuple[int, float]]]] | None = None
    ) -> "InferenceChunk":
        """Generated token ids, and for each its log probability with those of the most likely tokens.

        Raises:
            TypeError: for other types. OverflowError: for ids outside of [0, 2^32).
        """
        chunk = InferenceChunk("tokens")
        ids = list(map(as_int, token_ids))
        if ids and not 0 <= min(ids) <= max(ids) < 1 << 32:
            raise OverflowError(f"token ids must be in [0, 2^32), not {min(ids)} to {max(ids)}")
        chunk.token_ids = ids
        chunk.count = len(ids)
        if logprobs is not None:
            chunk.logprobs = [
                (float(logprob), [(_u32(token_id, "a token id"), float(other)) for token_id, other in top])
                for logprob, top in logprobs
            ]
        else:
            chunk.plain_ids = ids
        return chunk

    @staticmethod
    def finish(finish_reason: InferenceFinishReason) -> "InferenceChunk":
        """Generation has ended."""
        if not isinstance(finish_reason, InferenceFinishReason):
            raise TypeError(f"finish_reason must be InferenceFinishReason, not {type(finish_reason).__name__}")
        chunk = InferenceChunk("finish")
        chunk.finish_reason = finish_reason
        return chunk
