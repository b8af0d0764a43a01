"""Owns the short way: messages to token ids in one call, output to a message in another, no server and no protocol.

It is made of the same parts as the long way: requests, encodings and the stream processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO
from typing import Any, Final, Literal

from deepseek_recipe.chat_request import ChatCompletionRequest
from deepseek_recipe.conversation import (
    AssistantMessage,
    Conversation,
    ImageSource,
    Message,
    ReasoningEffort,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from deepseek_recipe.encoding import DeepseekV4Encoding, DeepseekV41Encoding, encode_prompt
from deepseek_recipe.events import Account, Ending, Event
from deepseek_recipe.inference_chunk import InferenceChunk, InferenceFinishReason
from deepseek_recipe.options import ConversationRequest, ConversionOptions, ModelVersion
from deepseek_recipe.parsing_options import ParsingOptions, ThinkingInitialStage
from deepseek_recipe.pieces import Piece
from deepseek_recipe.replay import ReplayMemory
from deepseek_recipe.request_rules import effort_of, parsing_options
from deepseek_recipe.special_tokens import RELEASED_V41_IMAGE_TOKEN, SpecialToken, SpecialTokens
from deepseek_recipe.stream_processor import StreamProcessor
from deepseek_recipe.tokenizer import Tokenizer
from deepseek_recipe.vocabulary import Version

_MODELS: Final = {"v4": ModelVersion.DeepseekV4Pro, "v4.1": ModelVersion.DeepseekV41Flash}
_TOKENS: Final = {"v4": SpecialTokens(), "v4.1": SpecialTokens(image=RELEASED_V41_IMAGE_TOKEN)}
_MODEL_NAME: Final = "model"
_START: Final = ThinkingInitialStage.ReasoningStart


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt, ready to run: text, token ids, and how the answer to it is parsed."""

    text: str
    token_ids: list[int]
    special_ranges: list[tuple[int, int]] = field(repr=False)
    image_sources: list[ImageSource] = field(repr=False)
    parsing: ParsingOptions = field(repr=False)
    warnings: list[str] = field(default_factory=list)


def chat_options(version: Version, *, thinking: bool = True) -> ConversionOptions:
    """Conversion options of `encode_chat`: lenient, any model name is this version, released spellings."""
    options = ConversionOptions(default_thinking_mode=thinking, lenient=True)
    options = options.with_model_versions_by_name({_MODEL_NAME: _MODELS[_version(version)]})
    return options.with_special_tokens(_TOKENS[version])


def _version(version: str) -> str:
    if version not in _MODELS:
        raise ValueError(f'unknown version {version!r}; expected "v4" or "v4.1"')
    return version


def encode_chat(  # noqa: PLR0913 - the choices of a request, all by keyword
    messages: Sequence[dict[str, Any] | Message],
    tools: Sequence[dict[str, Any] | ToolDefinition] | None = None,
    *,
    version: Version = "v4.1",
    thinking: bool = True,
    reasoning_effort: ReasoningEffort | Literal["minimal", "medium", "ultra"] | None = None,
    tool_choice: ToolChoice = "auto",
    response_format: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> EncodedPrompt:
    """Turn a conversation into the prompt and the token ids that the DeepSeek API uses.

    Args:
        messages: Chat Completions messages as dicts (the role `developer` is taken as system), or `Message` objects.
            The two do not mix: with `Message` objects nothing is checked, and a message with a replay repeats its calls
            byte for byte.
        tools: Chat Completions tools as dicts, or `ToolDefinition` objects.
        version: the prompt format and, without `tokenizer`, the bundled vocabulary.
        thinking: whether the model reasons before it answers.
        reasoning_effort: how long; used in thinking mode only.
        tool_choice: auto, none or required (only without thinking).
        response_format: as in Chat Completions.
        tokenizer: another vocabulary.

    Raises:
        ConversionError: if the API would refuse the request. ValueError: if a dict has the wrong shape.
    """
    spoken = [message for message in messages if isinstance(message, Message)]
    if spoken:
        if len(spoken) != len(messages):
            raise TypeError("messages must be all dicts or all Message objects")
        defined = [tool for tool in tools or () if isinstance(tool, ToolDefinition)]
        if len(defined) != len(tools or ()):
            raise TypeError("with Message objects, tools must be ToolDefinition objects")
        conversation = Conversation(
            spoken,
            thinking_mode=thinking,
            tools=defined,
            tool_choice=tool_choice,
            reasoning_effort=effort_of(reasoning_effort) if thinking else None,
        )
        request = ConversationRequest(conversation, _MODELS[_version(version)])
        request.parsing_options = parsing_options(conversation, chat_options(version), [])
        return encode_request(request, version, tokenizer)
    body: dict[str, Any] = {"model": _MODEL_NAME, "messages": list(messages)}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    given = {"reasoning_effort": reasoning_effort, "response_format": response_format, "tools": tools}
    body |= {name: value for name, value in given.items() if value is not None}
    if tools:
        body["tool_choice"] = tool_choice
    request = ChatCompletionRequest(body, lenient=True).convert(chat_options(version, thinking=thinking))
    return encode_request(request, version, tokenizer)


def encode_request(request: ConversationRequest, version: Version, tokenizer: Tokenizer | None = None) -> EncodedPrompt:
    """Encode a converted request."""
    encoding = DeepseekV4Encoding() if version == "v4" else DeepseekV41Encoding()
    tokens = request.parsing_options.special_tokens
    rendered = encoding.with_special_tokens(tokens).render_conversation(request.conversation)
    return EncodedPrompt(
        rendered.prompt,
        encode_prompt(rendered, tokenizer or Tokenizer.bundled(version)),
        rendered.special_ranges,
        rendered.image_sources,
        request.parsing_options,
        request.warnings,
    )


class IncrementKind(Enum):
    """What an increment adds to."""

    Reasoning = "reasoning"
    Content = "content"
    Call = "call"
    Arguments = "arguments"


@dataclass(frozen=True, slots=True)
class Increment:
    """What a bit of output adds: text of the reasoning, content or arguments, or the name of a new call."""

    kind: IncrementKind
    text: str
    call_index: int | None = None
    call_id: str | None = None


class _IncrementEvent(Event):
    __slots__ = ("increment",)

    def __init__(self, increment: Increment) -> None:
        self.increment = increment


class _MessageWriter:
    """Collects a message; stands where a protocol's writer stands."""

    counts_reasoning = False

    def __init__(self, thinking: bool) -> None:
        self.thinking = thinking
        self.content_text = StringIO()
        self.reasoning_text = StringIO()
        self.calls: list[tuple[str, str, StringIO]] = []
        self._account = Account()

    def open(self, account: Account) -> list[Event]:
        self._account = account
        return []

    def content(self, text: str, piece: Piece | None = None) -> list[Event]:
        self.content_text.write(text)
        return self._event(IncrementKind.Content, text)

    def reasoning(self, text: str, piece: Piece | None = None) -> list[Event]:
        self._account.think(text)
        self.reasoning_text.write(text)
        return self._event(IncrementKind.Reasoning, text)

    def start_call(self, name: str) -> list[Event]:
        call_id = self._account.next_call_id(self.thinking)
        self.calls.append((call_id, name, StringIO()))
        return [_IncrementEvent(Increment(IncrementKind.Call, name, len(self.calls) - 1, call_id))]

    def arguments(self, text: str) -> list[Event]:
        call_id, _, arguments = self.calls[-1]
        arguments.write(text)
        return [_IncrementEvent(Increment(IncrementKind.Arguments, text, len(self.calls) - 1, call_id))]

    def close(self, ending: Ending) -> list[Event]:
        return []

    def _event(self, kind: IncrementKind, text: str) -> list[Event]:
        return [_IncrementEvent(Increment(kind, text))] if text else []

    def message(self) -> Message:
        calls = [ToolCall(call_id, name, text.getvalue()) for call_id, name, text in self.calls]
        reasoning = self.reasoning_text.getvalue() if self.thinking else None
        return AssistantMessage(self.content_text.getvalue(), reasoning, calls or None)


class _MessageGenerator:
    """Gives its writer to a stream processor."""

    def __init__(self, writer: _MessageWriter) -> None:
        self._writer = writer

    def take_writer(self) -> _MessageWriter:
        return self._writer


class CompletionParser:
    """Parses one answer bit by bit: `push` output, get increments, `finish` to get the message.

    Args:
        parsing: how the output is parsed; `EncodedPrompt.parsing`, or options of your own.
        tokenizer: for token ids; the bundled one of V4.1 if none is given (the ids of text are those of V4).
        exact_replay: give the message its calls as they were written, so that the next prompt repeats them.
    """

    def __init__(
        self, parsing: ParsingOptions, *, tokenizer: Tokenizer | None = None, exact_replay: bool = False
    ) -> None:
        self._writer = _MessageWriter(parsing.thinking_initial_stage is not None)
        self._memory = ReplayMemory(1) if exact_replay else None
        self._eos = parsing.special_tokens.token(SpecialToken.Eos)
        self._tokenizer = tokenizer or Tokenizer.bundled()
        self._processor = StreamProcessor(
            _MessageGenerator(self._writer),
            parsing,
            self._tokenizer,
            replay=self._memory,
        )

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, by a stop sequence or by `finish`."""
        return self._processor.finished

    @property
    def warnings(self) -> list[str]:
        """What was repaired."""
        return self._processor.warnings

    def push(self, output: str | Sequence[int]) -> list[Increment]:
        """Take text or token ids; end-of-sentence tokens are left out.

        Raises:
            RuntimeError: after the end.
        """
        if isinstance(output, str):
            chunk = InferenceChunk.text(output.replace(self._eos, "") if self._eos else output)
        else:
            eos_id = self._tokenizer.added_token_id(self._eos)
            chunk = InferenceChunk.tokens([token_id for token_id in output if token_id != eos_id])
        return self._increments(self._processor.push(chunk))

    def finish(self, reason: InferenceFinishReason = InferenceFinishReason.Stop) -> tuple[list[Increment], Message]:
        """End the answer; return the last increments and the message."""
        increments = []
        if not self._processor.finished:
            increments = self._increments(self._processor.push(InferenceChunk.finish(reason)))
        message = self._writer.message()
        return increments, message if self._memory is None else self._memory.recall([message])[0]

    def _increments(self, events: Sequence[object]) -> list[Increment]:
        return [event.increment for event in events if isinstance(event, _IncrementEvent)]


def parse_completion(
    output: str | Sequence[int],
    prompt: EncodedPrompt | None = None,
    *,
    parsing: ParsingOptions | None = None,
    tokenizer: Tokenizer | None = None,
    exact_replay: bool = False,
) -> Message:
    """Turn what the model generated, as text or token ids, into a message with reasoning, content and tool calls.

    Args:
        output: all of it; an end-of-sentence token is left out.
        prompt: the prompt it answers, which says how to parse it.
        parsing: how to parse it if there is no prompt; by default as an answer in thinking mode with tools.
        tokenizer: for token ids; the bundled one by default.
        exact_replay: give the message its calls as they were written, so that the next prompt repeats them.
    """
    if parsing is None:
        parsing = prompt.parsing if prompt is not None else ParsingOptions(thinking_initial_stage=_START)
    parser = CompletionParser(parsing, tokenizer=tokenizer, exact_replay=exact_replay)
    parser.push(output)
    return parser.finish()[1]
