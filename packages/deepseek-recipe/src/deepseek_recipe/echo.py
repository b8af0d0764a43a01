"""Owns what a Responses answer repeats from its request.

Where it stands in the events is in `events_responses`.
"""

from dataclasses import dataclass, field

from deepseek_recipe.json_reader import Json


@dataclass(frozen=True, slots=True)
class EchoDetails:
    """The repeated parts that are JSON values rather than scalars."""

    effort: str | None = None
    summary: str | None = None
    text_format: Json = field(default_factory=lambda: {"type": "text"})
    verbosity: str | None = None
    tool_choice: Json = "auto"
    tools: list[Json] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ResponsesEcho:
    """What a Responses answer repeats: as requested, not range-checked; absent is None or the default."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    user: str | None = None
    details: EchoDetails = field(default_factory=EchoDetails)
