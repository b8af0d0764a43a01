"""Owns a conversation as the model sees it: messages, tools, tool calls and image sources.

How it becomes a prompt is in `render_v4` and `render_v41`; how a request becomes a conversation is in `requests`.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, Self, override

from deepseek_recipe.special_tokens import SpecialToken

type ToolChoice = Literal["auto", "none", "required"]
type ReasoningEffort = Literal["low", "high", "xhigh", "max"]
type ResponseFormat = Literal["text", "json_object", "json_schema", "regex"]
type ImageDetail = Literal["low", "high", "original", "auto"]
type Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
type Replay = tuple[tuple[str, bool], ...]
"""A block of calls as the model wrote it: bits of text, each with whether it is a control token."""
type ImageSourceKind = Literal["data_url", "url", "bytes"]


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        quoted = [f'"{choice}"' for choice in allowed]
        separator = ", or " if len(quoted) > 2 else " or "
        raise ValueError(f'invalid {name} "{value}"; expected {", ".join(quoted[:-1])}{separator}{quoted[-1]}')


def check_json_value(value: Any, depth: int = 1) -> Any:
    """Return a copy of a Python value as JSON: tuples become lists.

    Raises:
        ValueError: for NaN and infinities. OverflowError: for integers outside [-2^63, 2^64).
        TypeError: for other types and keys that are not str. UnicodeEncodeError: for lone surrogates.
        RecursionError: for more than 128 nested containers.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not value.isascii():
            value.encode()
        return str(value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise OverflowError("integer is outside the JSON number range")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{'NaN' if math.isnan(value) else value} is not a finite JSON number")
        return float(value)
    if not isinstance(value, dict | list | tuple):
        raise TypeError(f"{type(value).__name__} is not a JSON value")
    if depth > 128:
        raise RecursionError("JSON input exceeds the maximum nesting depth of 128")
    if not isinstance(value, dict):
        return [check_json_value(item, depth + 1) for item in value]
    members = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError("JSON object keys must be str")
        members[check_json_value(key)] = check_json_value(item, depth + 1)
    return members


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the assistant made; `arguments` is the text it wrote, usually a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool the model may call; `parameters` is a JSON schema, `defer_loading` hides it until it is announced."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    defer_loading: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", check_json_value(self.parameters))


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where an image comes from; exactly one of `data_url`, `url` and `data` is set, as `kind` says."""

    kind: ImageSourceKind
    detail: ImageDetail = "high"
    path: str = ""
    data_url: str | None = None
    url: str | None = None
    data: bytes | None = None

    def __post_init__(self) -> None:
        _check_choice("detail", self.detail, ("low", "high", "original", "auto"))


class DataUrlImageSource(ImageSource):
    """An image given as a `data:` URL."""

    __slots__ = ()

    def __init__(self, data_url: str, detail: ImageDetail = "high", *, path: str = "") -> None:
        super().__init__("data_url", detail, path, data_url=data_url)


class UrlImageSource(ImageSource):
    """An image that has to be fetched."""

    __slots__ = ()

    def __init__(self, url: str, detail: ImageDetail = "high", *, path: str = "") -> None:
        super().__init__("url", detail, path, url=url)


class BytesImageSource(ImageSource):
    """An image given as the bytes of its file."""

    __slots__ = ()

    def __init__(self, data: bytes, detail: ImageDetail = "high", *, path: str = "") -> None:
        super().__init__("bytes", detail, path, data=bytes(data))


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `image_spans` says which parts of the content are image tokens (start, end in code points), `replay` how the model
    wrote the calls, if the prompt is to repeat that byte for byte.
    """

    role: Role
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    image_sources: list[ImageSource] = field(default_factory=list)
    prefix: bool = False
    tools: list[ToolDefinition] | None = None
    image_spans: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    replay: Replay = field(default=(), repr=False, compare=False)

    def changed(self, **changes: object) -> Self:
        """A copy of the same class with some fields changed, none of them checked."""
        twin = copy(self)
        for name, value in changes.items():
            object.__setattr__(twin, name, value)
        return twin


def _image_spans(
    content: str, sources: Sequence[ImageSource] | None, image_token: str | None
) -> tuple[tuple[int, int], ...]:
    """The first non-overlapping occurrences of the image token, one for each source."""
    if image_token == "":
        raise ValueError("image_token must not be empty")
    token = SpecialToken.Image.default_str() if image_token is None else image_token
    spans: list[tuple[int, int]] = []
    start = 0
    for _ in sources or ():
        found = content.find(token, start)
        if found < 0:
            break
        start = found + len(token)
        spans.append((found, start))
    return tuple(spans)


def _as_list[T](items: Sequence[T] | None) -> list[T] | None:
    return None if items is None else list(items)


class SystemMessage(Message):
    """A system message; `tools` are tools that it announces (V4.1 only)."""

    __slots__ = ()

    def __init__(
        self,
        content: str,
        image_sources: Sequence[ImageSource] | None = None,
        tools: Sequence[ToolDefinition] | None = None,
        *,
        image_token: str | None = None,
    ) -> None:
        spans = _image_spans(content, image_sources, image_token)
        super().__init__(
            "system", content, image_sources=list(image_sources or ()), tools=_as_list(tools), image_spans=spans
        )


class UserMessage(Message):
    """A user message."""

    __slots__ = ()

    def __init__(
        self, content: str, image_sources: Sequence[ImageSource] | None = None, *, image_token: str | None = None
    ) -> None:
        spans = _image_spans(content, image_sources, image_token)
        super().__init__("user", content, image_sources=list(image_sources or ()), image_spans=spans)


class AssistantMessage(Message):
    """An assistant message; with `prefix` the model goes on writing it."""

    __slots__ = ()

    def __init__(
        self,
        content: str,
        reasoning_content: str | None = None,
        tool_calls: Sequence[ToolCall] | None = None,
        prefix: bool = False,
    ) -> None:
        super().__init__("assistant", content, reasoning_content, _as_list(tool_calls), prefix=prefix)


class ToolMessage(Message):
    """The result of a tool call."""

    __slots__ = ()

    def __init__(
        self,
        content: str,
        tool_call_id: str | None = None,
        image_sources: Sequence[ImageSource] | None = None,
        *,
        image_token: str | None = None,
    ) -> None:
        spans = _image_spans(content, image_sources, image_token)
        super().__init__(
            "tool",
            content,
            tool_call_id=tool_call_id,
            image_sources=list(image_sources or ()),
            image_spans=spans,
        )


class LatestReminderMessage(Message):
    """A reminder that the application adds near the end of the conversation."""

    __slots__ = ()

    def __init__(self, content: str) -> None:
        super().__init__("latest_reminder", content)


class Conversation:
    """All that decides a prompt: messages, tools, thinking and the wanted format of the answer."""

    def __init__(  # noqa: PLR0913 - a public constructor, by keyword
        self,
        messages: Sequence[Message] | None = None,
        *,
        thinking_mode: bool = True,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: ReasoningEffort | None = None,
        response_format: Literal["text", "json_object"] = "text",
        response_schema: Any | None = None,
        response_regex: str | None = None,
    ) -> None:
        _check_choice("tool_choice", tool_choice, ("auto", "none", "required"))
        if reasoning_effort is not None:
            _check_choice("reasoning_effort", reasoning_effort, ("low", "high", "xhigh", "max"))
        _check_choice("response_format", response_format, ("text", "json_object"))
        if response_schema is not None and response_regex is not None:
            raise ValueError("response_schema and response_regex cannot be combined")
        if response_format == "json_object" and (response_schema is not None or response_regex is not None):
            raise ValueError('response_format "json_object" cannot be combined with response_schema or response_regex')
        self.messages: list[Message] = list(messages or ())
        self.thinking_mode = thinking_mode
        self.tools: list[ToolDefinition] = list(tools or ())
        self.tool_choice = tool_choice
        self.reasoning_effort = reasoning_effort
        self.response_schema = check_json_value(response_schema)
        self.response_regex = response_regex
        self._plain_format = response_format

    @property
    def response_format(self) -> ResponseFormat:
        """`json_schema` with a schema, `regex` with a regex, else what was given."""
        if self.response_schema is not None:
            return "json_schema"
        return "regex" if self.response_regex is not None else self._plain_format

    @property
    def active_tools(self) -> bool:
        """Whether the prompt shows a tool block: there are tools and the choice is not `none`."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def requires_call(self) -> bool:
        """Whether the prompt ends inside an opened tool-call block."""
        return self.tool_choice == "required" and self.active_tools

    @override
    def __repr__(self) -> str:
        return (
            f"Conversation(messages={self.messages!r}, thinking_mode={self.thinking_mode}, tools={self.tools!r}, "
            f"tool_choice={self.tool_choice!r}, reasoning_effort={self.reasoning_effort!r}, "
            f"response_format={self.response_format!r})"
        )


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt: its text, which ranges of it are control tokens (code points), and its images in order."""

    prompt: str
    special_ranges: list[tuple[int, int]]
    image_sources: list[ImageSource]
