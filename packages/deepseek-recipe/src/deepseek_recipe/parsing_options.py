"""Owns what a parser of model output must know beforehand.

Parsing itself is in `stream_processor`.
"""

from collections.abc import Sequence
from enum import Enum

from deepseek_recipe.special_tokens import SpecialTokens

REPAIR_RULES = tuple(f"R{number}" for number in range(1, 15))
"""The names of the repairs, as the page on repairs lists them."""


class ThinkingInitialStage(Enum):
    """Where in the answer generation begins, in thinking mode."""

    ReasoningStart = "reasoning_start"
    ReasoningContinuation = "reasoning_continuation"
    ContentContinuation = "content_continuation"

    def starts_in_reasoning(self) -> bool:
        """Whether the first thing the model writes is reasoning."""
        return self is not ThinkingInitialStage.ContentContinuation


class ParsingOptions:
    """How model output is parsed. `repair` is off by default, and parsing then equals the API's byte for byte.

    Args:
        parse_tool_calls: whether blocks of tool calls are recognised.
        starts_in_tool_calls: whether the prompt has opened such a block already.
        parse_json_output: whether only the JSON in the answer is wanted.
        thinking_initial_stage: where in the answer generation begins; None outside of thinking mode.
        stop_sequences: texts that end the answer; empty ones are kept and ignored.
        special_tokens: spellings of the control tokens.
        repair: True for all repairs, or the names of some (`R1` to `R14`).
    """

    def __init__(  # noqa: PLR0913 - a public constructor, all by keyword
        self,
        *,
        parse_tool_calls: bool = True,
        starts_in_tool_calls: bool = False,
        parse_json_output: bool = False,
        thinking_initial_stage: ThinkingInitialStage | None = None,
        stop_sequences: Sequence[str] | None = None,
        special_tokens: SpecialTokens | None = None,
        repair: bool | Sequence[str] = False,
    ) -> None:
        self.parse_tool_calls = parse_tool_calls
        self.starts_in_tool_calls = starts_in_tool_calls
        self.parse_json_output = parse_json_output
        self.thinking_initial_stage = thinking_initial_stage
        self.stop_sequences = stop_sequences or []
        self.special_tokens = special_tokens if special_tokens is not None else SpecialTokens()
        self.repair = repair

    @property
    def stop_sequences(self) -> list[str]:
        """Texts that end the answer."""
        return list(self._stop_sequences)

    @stop_sequences.setter
    def stop_sequences(self, value: Sequence[str]) -> None:
        if isinstance(value, str):
            raise TypeError("stop_sequences must be a sequence of strings, not one string")
        self._stop_sequences = list(value)

    @property
    def repair(self) -> frozenset[str]:
        """The names of the repairs that are on."""
        return self._repair

    @repair.setter
    def repair(self, value: bool | Sequence[str] | frozenset[str]) -> None:
        if isinstance(value, bool):
            self._repair = frozenset(REPAIR_RULES if value else ())
            return
        unknown = sorted(set(value) - set(REPAIR_RULES))
        if unknown:
            raise ValueError(
                f"unknown repair {unknown[0]!r}; expected True, False or some of {', '.join(REPAIR_RULES)}"
            )
        self._repair = frozenset(value)

    def copy(self) -> "ParsingOptions":
        """An independent copy."""
        return ParsingOptions(
            parse_tool_calls=self.parse_tool_calls,
            starts_in_tool_calls=self.starts_in_tool_calls,
            parse_json_output=self.parse_json_output,
            thinking_initial_stage=self.thinking_initial_stage,
            stop_sequences=self._stop_sequences,
            special_tokens=self.special_tokens,
            repair=tuple(self._repair),
        )
