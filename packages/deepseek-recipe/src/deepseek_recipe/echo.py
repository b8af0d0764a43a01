"""Owns what a Responses answer repeats from its request.

Where it stands in the events is in `events_responses`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from deepseek_recipe.json_reader import Json

_PLAIN_TEXT: Final = {"type": "text"}


class EchoDetails(NamedTuple):
    """The repeated parts that are JSON values rather than scalars."""

    effort: str | None = None
    summary: str | None = None
    text_format: Json = _PLAIN_TEXT
    verbosity: str | None = None
    tool_choice: Json = "auto"
    tools: Sequence[Json] = ()


class ResponsesEcho(NamedTuple):
    """What a Responses answer repeats: as requested, not range-checked; absent is None or the default."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    user: str | None = None
    details: EchoDetails = EchoDetails()
