"""Owns the rules that the three protocols share: thinking, sampling, stops, lacking reasoning and wanted formats.

Rules about tools are in `request_tools`, about images in `request_images`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from deepseek_recipe.conversation import Conversation, Message, ReasoningEffort
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_reader import Json
from deepseek_recipe.json_writer import compact_json, to_f32
from deepseek_recipe.options import (
    ConversionOptions,
    ModelVersion,
    OutputConstraint,
    ReasoningContentBehavior,
)
from deepseek_recipe.parsing_options import ParsingOptions, ThinkingInitialStage
from deepseek_recipe.schema_check import check_compiles
from deepseek_recipe.schema_strict import StrictSchemaError, normalise_schema
from deepseek_recipe.schema_vocabulary import SchemaError
from deepseek_recipe.shapes import Reader, choice

EFFORTS: Final[Reader[str]] = choice("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
THINKING_TYPES: Final[Reader[str]] = choice("adaptive", "enabled", "disabled")
_EFFORT_OF: Final[dict[str | None, ReasoningEffort]] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "none": "high",
    None: "high",
    "xhigh": "xhigh",
    "max": "max",
    "ultra": "max",
}
_LOWEST_TOP_P: Final = to_f32(0.95)


def effort_of(requested: str | None) -> ReasoningEffort:
    """The effort that the prompt knows for a requested one."""
    return _EFFORT_OF[requested]


@dataclass
class Conversion:
    """One conversion under way: the options, the version, thinking, and what was mended."""

    options: ConversionOptions
    version: ModelVersion
    thinking: bool
    effort: ReasoningEffort | None
    warnings: list[str] = field(default_factory=list)

    @property
    def is_v41(self) -> bool:
        """Whether the prompt will be in V4.1's format."""
        return self.version is ModelVersion.DeepseekV41Flash


def start_conversion(
    options: ConversionOptions, model: str, thinking_type: str | None, effort: str | None
) -> Conversion:
    """Decide version, thinking mode and effort.

    Raises:
        ConversionError: if the model name is not accepted.
    """
    version = options.model_version(model)
    if thinking_type is not None:
        thinking = thinking_type != "disabled"
    else:
        thinking = options.default_thinking_mode if effort is None else effort != "none"
    return Conversion(options, version, thinking, _EFFORT_OF[effort] if thinking else None)


def check_stops(stops: Sequence[str], single: bool = False) -> list[str]:
    """Check stop sequences; return them as a list.

    Raises:
        ConversionError: for more than 16 or an empty one.
    """
    if len(stops) > 16:
        raise ConversionError(f"Stop string array too long: {len(stops)}")
    for index, stop in enumerate(stops):
        if not stop:
            raise ConversionError(empty_string("stop" if single else f"stop[{index}]"))
    return list(stops)


def empty_string(path: str) -> str:
    """The text of the error for an empty string."""
    return f"Invalid '{path}': empty string. Expected a string with minimum length 1, but got an empty string instead."


def check_range(name: str, value: float | None, holds: Callable[[float], bool], shown: str) -> None:
    """Check a sampling parameter.

    Raises:
        ConversionError: if it is given and does not hold.
    """
    if value is not None and not holds(value):
        raise ConversionError(f"Invalid {name} value, the valid range of {name} is {shown}")


def check_temperature_and_top_p(temperature: float | None, top_p: float | None) -> None:
    """Check both.

    Raises:
        ConversionError: if one is out of range.
    """
    check_range("temperature", temperature, lambda value: 0 <= value <= 2, "[0, 2]")
    check_range("top_p", top_p, lambda value: 0 < value <= 1, "(0, 1.0]")


def check_max_tokens(conversion: Conversion, requested: int | None, *, lower: bool = False) -> int | None:
    """Check max_tokens against the bound of the mode; with `lower`, larger values become the bound.

    Raises:
        ConversionError: if it is out of range.
    """
    options = conversion.options
    bound = (
        options.thinking_max_tokens_upper_bound if conversion.thinking else options.non_thinking_max_tokens_upper_bound
    )
    if requested is None:
        return None
    if lower:
        requested = min(requested, bound)
    check_range("max_tokens", requested, lambda value: 1 <= value <= bound, f"[1, {bound}]")
    return requested


def check_top_logprobs(top_logprobs: int | None) -> None:
    """Check top_logprobs.

    Raises:
        ConversionError: if it is larger than 20.
    """
    if top_logprobs is not None and top_logprobs > 20:
        raise ConversionError("Invalid top_logprobs value, the valid range of top_logprobs is [0, 20].")


def sampling(
    conversion: Conversion, temperature: float | None, top_p: float | None, has_tools: bool
) -> tuple[float, float]:
    """The temperature and top_p that are used."""
    if not conversion.thinking:
        kept = 1.0 if conversion.is_v41 or top_p is None else top_p
        return (1.0 if temperature is None else temperature), kept
    if conversion.is_v41:
        return 1.0, max(1.0 if top_p is None else top_p, _LOWEST_TOP_P)
    return 1.0, _LOWEST_TOP_P if has_tools else 1.0


def fill_reasoning(conversion: Conversion, messages: list[Message], has_tools: bool, field_name: str) -> list[Message]:
    """Drop the reasoning of history outside of thinking mode; in it, take lacking reasoning as empty or refuse it.

    Raises:
        ConversionError: with Reject, if an assistant message of the current turn lacks the reasoning it needs.
    """
    start = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1) + 1
    reject = conversion.options.reasoning_content_behavior is ReasoningContentBehavior.Reject
    filled = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            if not conversion.thinking:
                message = message.changed(reasoning_content=None)
            elif message.reasoning_content is None:
                if reject and index >= start and (message.tool_calls or has_tools):
                    if not conversion.options.lenient:
                        raise ConversionError(
                            f"The `{field_name}` in the thinking mode must be passed back to the API."
                        )
                    conversion.warnings.append(f"missing_reasoning: messages[{index}]")
                message = message.changed(reasoning_content="")
        filled.append(message)
    return filled


def mentions_json(messages: Iterable[Message]) -> bool:
    """Whether the content of some message has the word json."""
    return any("json" in message.content.lower() for message in messages)


class WantedFormat(NamedTuple):
    """The format asked for: text, json_object, json_schema or regex."""

    kind: str = "text"
    schema: Json = None
    strict: bool = False
    regex: str | None = None

    def constraint(self) -> OutputConstraint | None:
        """Check a schema; return what the output must match.

        Raises:
            ConversionError: if the schema is not valid.
        """
        match self.kind:
            case "json_object":
                return OutputConstraint("json", "")
            case "regex":
                return OutputConstraint("regex", self.regex or "")
            case "json_schema":
                return OutputConstraint("json", compact_json(self._checked_schema()))
        return None

    def _checked_schema(self) -> Json:
        try:
            if self.strict:
                return normalise_schema(
                    self.schema,
                    shape_prefix="Invalid json schema: ",
                    top_message="The top level of the json schema must be an object.",
                    empty_top=False,
                )
            check_compiles(self.schema)
        except StrictSchemaError as error:
            raise ConversionError(str(error)) from None
        except SchemaError as error:
            raise ConversionError(f"Invalid json schema: {error}") from None
        return self.schema


def initial_stage(conversation: Conversation) -> ThinkingInitialStage | None:
    """Where in the answer generation begins after the prompt of this conversation."""
    if not conversation.thinking_mode:
        return None
    last = conversation.messages[-1] if conversation.messages else None
    if last is not None and last.role == "assistant" and last.prefix:
        if last.content:
            return ThinkingInitialStage.ContentContinuation
        if last.reasoning_content:
            return ThinkingInitialStage.ReasoningContinuation
    return ThinkingInitialStage.ReasoningStart


def parsing_options(conversation: Conversation, options: ConversionOptions, stops: Sequence[str]) -> ParsingOptions:
    """How the answer to a converted conversation is parsed."""
    return ParsingOptions(
        parse_tool_calls=bool(conversation.tools),
        starts_in_tool_calls=conversation.tool_choice == "required",
        parse_json_output=conversation.response_format == "json_object",
        thinking_initial_stage=initial_stage(conversation),
        stop_sequences=stops,
        special_tokens=options.special_tokens,
    )
