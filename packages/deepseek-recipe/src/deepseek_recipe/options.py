"""Owns what steers the conversion of a request, and what a converted request holds.

The conversions are in `chat_request`, `messages_request` and `responses_request`.
"""

from collections.abc import Mapping
from copy import copy
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from deepseek_recipe.conversation import Conversation
from deepseek_recipe.echo import ResponsesEcho
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.parsing_options import ParsingOptions
from deepseek_recipe.special_tokens import SpecialTokens

MAX_TOKENS_BOUND: Final = 393_216


class WebSearchBehavior(Enum):
    """What to do with server-side web search: leave it out, or refuse the request."""

    Drop = "drop"
    Reject = "reject"


class ReasoningContentBehavior(Enum):
    """What to do when an earlier assistant message lacks its reasoning: take it as empty, or refuse the request."""

    FillEmpty = "fill_empty"
    Reject = "reject"


class ModelVersion(Enum):
    """A model family with its own prompt format."""

    DeepseekV4Pro = "v4"
    DeepseekV41Flash = "v4.1"


class ConversionOptions:
    """How requests are converted. `with_*` return changed copies.

    `lenient` accepts what the API refuses but users often send (`max_completion_tokens`, a lacking reasoning of an
    earlier turn; the `developer` role for requests made with `lenient=True`); what was mended is listed in
    `ConversationRequest.warnings`. It is off by default, and conversion then equals the API's.
    """

    def __init__(  # noqa: PLR0913 - a public constructor, all by keyword
        self,
        *,
        default_thinking_mode: bool = True,
        reasoning_content_behavior: ReasoningContentBehavior = ReasoningContentBehavior.FillEmpty,
        responses_web_search: WebSearchBehavior = WebSearchBehavior.Drop,
        messages_web_search: WebSearchBehavior = WebSearchBehavior.Reject,
        thinking_max_tokens_upper_bound: int = MAX_TOKENS_BOUND,
        non_thinking_max_tokens_upper_bound: int = MAX_TOKENS_BOUND,
        lenient: bool = False,
    ) -> None:
        self._default_thinking_mode = default_thinking_mode
        self._reasoning_content_behavior = reasoning_content_behavior
        self._responses_web_search = responses_web_search
        self._messages_web_search = messages_web_search
        self._thinking_bound = thinking_max_tokens_upper_bound
        self._non_thinking_bound = non_thinking_max_tokens_upper_bound
        self._lenient = lenient
        self._special_tokens = SpecialTokens()
        self._models = {
            "DeepSeek-V4-Pro": ModelVersion.DeepseekV4Pro,
            "DeepSeek-V4.1-Flash": ModelVersion.DeepseekV41Flash,
        }

    @property
    def default_thinking_mode(self) -> bool:
        """Whether requests that do not say think."""
        return self._default_thinking_mode

    @property
    def model_versions_by_name(self) -> dict[str, ModelVersion]:
        """The accepted model names."""
        return dict(self._models)

    @property
    def thinking_max_tokens_upper_bound(self) -> int:
        """The largest max_tokens in thinking mode."""
        return self._thinking_bound

    @property
    def non_thinking_max_tokens_upper_bound(self) -> int:
        """The largest max_tokens outside of thinking mode."""
        return self._non_thinking_bound

    @property
    def reasoning_content_behavior(self) -> ReasoningContentBehavior:
        """What happens when reasoning of an earlier message lacks."""
        return self._reasoning_content_behavior

    @property
    def responses_web_search(self) -> WebSearchBehavior:
        """What happens to web search in Responses requests."""
        return self._responses_web_search

    @property
    def messages_web_search(self) -> WebSearchBehavior:
        """What happens to web search in Messages requests."""
        return self._messages_web_search

    @property
    def lenient(self) -> bool:
        """Whether common deviations are mended instead of refused."""
        return self._lenient

    @property
    def special_tokens(self) -> SpecialTokens:
        """Spellings of the control tokens."""
        return self._special_tokens

    def _with(self, name: str, value: object) -> Self:
        twin = copy(self)
        setattr(twin, name, value)
        return twin

    def with_default_thinking_mode(self, default_thinking_mode: bool) -> Self:
        """A copy with another default thinking mode."""
        return self._with("_default_thinking_mode", default_thinking_mode)

    def with_reasoning_content_behavior(self, reasoning_content_behavior: ReasoningContentBehavior) -> Self:
        """A copy with another behaviour for lacking reasoning."""
        return self._with("_reasoning_content_behavior", reasoning_content_behavior)

    def with_responses_web_search(self, responses_web_search: WebSearchBehavior) -> Self:
        """A copy with another behaviour for web search in Responses requests."""
        return self._with("_responses_web_search", responses_web_search)

    def with_messages_web_search(self, messages_web_search: WebSearchBehavior) -> Self:
        """A copy with another behaviour for web search in Messages requests."""
        return self._with("_messages_web_search", messages_web_search)

    def with_special_tokens(self, special_tokens: SpecialTokens) -> Self:
        """A copy with other spellings of the control tokens."""
        return self._with("_special_tokens", special_tokens)

    def with_model_alias(self, model: str, model_version: ModelVersion) -> Self:
        """A copy that accepts one more model name."""
        return self._with("_models", self._models | {model: model_version})

    def with_model_versions_by_name(self, model_versions_by_name: dict[str, ModelVersion]) -> Self:
        """A copy that accepts just these model names."""
        return self._with("_models", dict(model_versions_by_name))

    def with_thinking_max_tokens_upper_bound(self, thinking_max_tokens_upper_bound: int) -> Self:
        """A copy with another bound of max_tokens in thinking mode."""
        return self._with("_thinking_bound", thinking_max_tokens_upper_bound)

    def with_non_thinking_max_tokens_upper_bound(self, non_thinking_max_tokens_upper_bound: int) -> Self:
        """A copy with another bound of max_tokens outside of thinking mode."""
        return self._with("_non_thinking_bound", non_thinking_max_tokens_upper_bound)

    def with_lenient(self, lenient: bool) -> Self:
        """A copy that mends common deviations, or does not."""
        return self._with("_lenient", lenient)

    def model_version(self, model: str) -> ModelVersion:
        """The version behind a model name.

        Raises:
            ConversionError: if the name is not accepted.
        """
        version = self._models.get(model)
        if version is None:
            names = ", ".join(sorted(self._models, key=lambda name: name.encode()))
            raise ConversionError(f"The supported API model names are {names}, but you passed {model}.")
        return version


class OutputConstraint(NamedTuple):
    """What generated text must match: `kind` is json, regex, tool_call or tool_call_required."""

    kind: str
    schema: str


class InferenceOptions(NamedTuple):
    """How the model is sampled; None where the request says nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    seed: int | None = None
    output_constraint: OutputConstraint | None = None


class ResponseContext(NamedTuple):
    """What the events of an answer take over from the request."""

    protocol: str = ""
    null_usage: bool = True
    """Chat Completions: whether events before the last one carry `"usage":null`."""
    echo: ResponsesEcho = ResponsesEcho()
    namespace_tools: Mapping[str, tuple[str, str]] = MappingProxyType({})
    custom_tools: frozenset[str] = frozenset()
    client_tool_search: bool = False


class ConversationRequest:
    """A conversation with all that is needed to run it: sampling, parsing, model version.

    A request built directly has no sampling options set and default parsing options.
    """

    def __init__(self, conversation: Conversation, model_version: ModelVersion) -> None:
        self.conversation = conversation
        self.model_version = model_version
        self.inference_options = InferenceOptions()
        self.parsing_options = ParsingOptions()
        self.stream = False
        self.context = ResponseContext()
        self.warnings: list[str] = []
        """What lenient conversion mended, as `kind: place`."""

    def resolve_max_tokens(self, prompt_tokens: int, context_limit: int) -> int:
        """How many tokens may be generated after a prompt of `prompt_tokens`.

        Raises:
            ConversionError: if prompt and requested tokens do not fit into `context_limit`.
        """
        requested = self.inference_options.max_tokens
        total = prompt_tokens + (requested or 0)
        if total > context_limit:
            raise ConversionError(
                f"This model's maximum context length is {context_limit} tokens. However, you requested {total} tokens "
                f"({prompt_tokens} in the messages, {requested or 0} in the completion). Please reduce the length of "
                "the messages or completion."
            )
        if requested is not None:
            return requested
        if not self.conversation.thinking_mode:
            default = 8_192
        else:
            default = 131_072 if self.conversation.reasoning_effort == "max" else 65_536
        return max(1, min(default, context_limit - prompt_tokens))
