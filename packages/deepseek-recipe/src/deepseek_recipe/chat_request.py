"""Owns what a Chat Completions request means: its conversion into a conversation, with every check in the API's order.

The shape of the request is in `chat_shape`; rules of all protocols are in `request_rules` and `request_tools`.
"""

from dataclasses import dataclass, field

from deepseek_recipe.chat_shape import ChatBlock, ChatBody, ChatMessage, read_chat, read_chat_leniently
from deepseek_recipe.conversation import ImageSource, Message, ToolCall
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.generator_chat import ChatCompletionChunkGenerator
from deepseek_recipe.options import (
    ConversationRequest,
    ConversionOptions,
    InferenceOptions,
    OutputConstraint,
    ResponseContext,
)
from deepseek_recipe.request_body import OneUse, RequestBody, read_body
from deepseek_recipe.request_images import (
    FILE_ID_TEXT,
    UNSUPPORTED_FILE_TEXT,
    BlockText,
    data_url_parts,
    is_image_type,
    url_image,
)
from deepseek_recipe.request_rules import (
    Conversion,
    WantedFormat,
    check_max_tokens,
    check_range,
    check_stops,
    check_temperature_and_top_p,
    check_top_logprobs,
    fill_reasoning,
    mentions_json,
    parsing_options,
    sampling,
    start_conversion,
)
from deepseek_recipe.request_tools import (
    ChosenTools,
    RequestedChoice,
    build_conversation,
    check_strictness,
    check_tool_name,
    check_tools,
    choose_tools,
    tool_constraint,
)

_CALLS = "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'"
_PREFIX = (
    "Invalid completion message: prefix set true with message which is not final message or message role is not "
    "assistant"
)


class ChatCompletionRequest:
    """A Chat Completions request. It can be converted once; `model` is read before.

    Args:
        body: the request as bytes, str or dict.
        lenient: also read messages of the role `developer`, as system messages.

    Raises:
        ValueError: if the body is not JSON or not of the right shape.
    """

    def __init__(self, body: RequestBody, *, lenient: bool = False) -> None:
        self._body = OneUse(read_body(body, read_chat_leniently if lenient else read_chat), "protocol request")

    @property
    def model(self) -> str:
        """The requested model name."""
        return self._body.look(lambda body: body.model)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert the request; this uses it up, also if it fails.

        Raises:
            ConversionError: if the API would refuse the request. RuntimeError: if it was converted before.
        """
        return _convert(self._body.take(), options)

    @staticmethod
    def chunk_generator(request: ConversationRequest, id: str, model: str) -> ChatCompletionChunkGenerator:
        """A generator of the events that answer `request`."""
        return ChatCompletionChunkGenerator(request, id, model)


def _convert(body: ChatBody, options: ConversionOptions) -> ConversationRequest:
    thinking_type = body.thinking.type if body.thinking else None
    conversion = start_conversion(options, body.model, thinking_type, body.reasoning_effort)
    requested = body.tools or []
    for index, tool in enumerate(requested):
        check_tool_name(tool.name, f"tools[{index}].function.name")
    if not body.messages:
        raise ConversionError("Empty input messages")
    messages = fill_reasoning(
        conversion, _History(conversion).convert(body.messages), bool(requested), "reasoning_content"
    )
    wanted = body.response_format or WantedFormat()
    prefixed = _check_prefix(messages)
    if wanted.kind == "json_object":
        _check_json_object(messages, prefixed)
    choice = body.tool_choice or RequestedChoice()
    chosen = choose_tools(conversion, check_tools(requested, choice), choice)
    uses_tools = requested or any(m.tool_calls or m.role == "tool" for m in messages)
    if prefixed and uses_tools:
        raise ConversionError("Function call should not be used with prefix")
    stop = body.stop
    stops = check_stops([stop], single=True) if isinstance(stop, str) else check_stops(stop or [])
    if body.stream_options is not None and not body.stream:
        raise ConversionError("stream_options should be set along with stream = true")
    constraint = wanted.constraint()
    check_strictness(chosen, body.response_format is not None)
    conversation = build_conversation(conversion, messages, chosen, wanted)
    request = ConversationRequest(conversation, conversion.version)
    request.inference_options = _inference(body, conversion, chosen, tool_constraint(chosen) or constraint)
    request.parsing_options = parsing_options(conversation, options, stops)
    request.stream = bool(body.stream)
    includes_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    request.context = ResponseContext("chat", null_usage=includes_usage or not body.stream)
    request.warnings = conversion.warnings
    return request


def _check_prefix(messages: list[Message]) -> bool:
    """Check that only the last message is a prefix; return whether it is."""
    if any(message.prefix for message in messages[:-1]):
        raise ConversionError(_PREFIX)
    return bool(messages) and messages[-1].prefix


def _check_json_object(messages: list[Message], prefixed: bool) -> None:
    if not mentions_json(messages):
        raise ConversionError(
            "Prompt must contain the word 'json' in some form to use 'response_format' of type 'json_object'."
        )
    if prefixed:
        raise ConversionError("response_format json_object should not be used with prefix")


def _inference(
    body: ChatBody, conversion: Conversion, chosen: ChosenTools, constraint: OutputConstraint | None
) -> InferenceOptions:
    """Check the sampling parameters in the API's order."""
    if body.n is not None and body.n != 1:
        raise ConversionError("Invalid n value (currently only n = 1 is supported)")
    for name, penalty in (("presence_penalty", body.presence_penalty), ("frequency_penalty", body.frequency_penalty)):
        check_range(name, penalty, lambda value: -2 <= value <= 2, "[-2, 2]")
    check_temperature_and_top_p(body.temperature, body.top_p)
    if body.top_logprobs is not None and not body.logprobs:
        raise ConversionError(
            "Invalid top_logprobs and logprobs value, logprobs must be set to true if top_logprobs is used."
        )
    check_top_logprobs(body.top_logprobs)
    max_tokens = body.max_tokens
    if max_tokens is None and conversion.options.lenient and isinstance(body.max_completion_tokens, int):
        max_tokens = body.max_completion_tokens
        conversion.warnings.append("max_completion_tokens: max_completion_tokens")
    max_tokens = check_max_tokens(conversion, max_tokens)
    if body.seed is not None and body.seed >= 1 << 63:
        raise ConversionError("Invalid seed value, the valid range of seed is [0, 2^63)")
    temperature, top_p = sampling(conversion, body.temperature, body.top_p, bool(chosen.tools))
    return InferenceOptions(
        max_tokens, temperature, top_p, bool(body.logprobs), body.top_logprobs, body.seed, constraint
    )


@dataclass
class _History:
    """Converts messages in order and keeps the account of calls and results."""

    conversion: Conversion
    open_calls: list[str] = field(default_factory=list)
    in_results: bool = False

    def convert(self, requested: list[ChatMessage]) -> list[Message]:
        messages = []
        for index, message in enumerate(requested):
            converted = self.message(index, message)
            if not (converted.role == "system" and not converted.content):
                messages.append(converted)
        self.close_calls()
        return messages

    def close_calls(self) -> None:
        """Check that no call is left without a result."""
        if self.open_calls:
            raise ConversionError(f"{_CALLS}. (insufficient tool messages following tool_calls message)")

    def message(self, index: int, message: ChatMessage) -> Message:
        if message.role == "tool":
            return self.result(index, message)
        self.close_calls()
        self.in_results = False
        if message.role == "assistant":
            return self.assistant(index, message)
        role = message.role
        if role == "developer":
            self.conversion.warnings.append(f"developer_role: messages[{index}]")
            role = "system"
        return Message(role, "").changed(**self.blocks(index, message.content).fields())

    def result(self, index: int, message: ChatMessage) -> Message:
        if not self.in_results:
            raise ConversionError(
                "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
            )
        if message.tool_call_id not in self.open_calls:
            raise ConversionError(
                f"{_CALLS}, The following tool_call_ids did not have response messages: {message.tool_call_id}"
            )
        self.open_calls.remove(message.tool_call_id)
        self.in_results = bool(self.open_calls)
        blocks = self.blocks(index, message.content)
        return Message("tool", "", tool_call_id=message.tool_call_id).changed(**blocks.fields())

    def assistant(self, index: int, message: ChatMessage) -> Message:
        if message.content is None and message.tool_calls is None:
            raise ConversionError("Invalid assistant message: content or tool_calls must be set")
        calls = message.tool_calls
        if calls is not None and not calls:
            raise ConversionError(
                f"Invalid 'messages[{index}].tool_calls': empty array. Expected an array with minimum length 1, but "
                "got an empty array instead."
            )
        for call in calls or ():
            if call.id in self.open_calls:
                raise ConversionError(f"Duplicate value for 'tool_call_id' of {call.id} in message[{index}]")
            self.open_calls.append(call.id)
        self.in_results = bool(calls)
        blocks = self.blocks(index, message.content, in_assistant=True)
        return Message(
            "assistant",
            blocks.joined(),
            message.reasoning_content,
            None if calls is None else [ToolCall(call.id, call.name, call.arguments) for call in calls],
            prefix=message.prefix,
        )

    def blocks(self, index: int, content: str | list[ChatBlock] | None, *, in_assistant: bool = False) -> BlockText:
        text = BlockText(self.conversion)
        if isinstance(content, str):
            text.text(content)
        for block in content if isinstance(content, list) else ():
            if block.kind == "text":
                text.text(block.text)
            elif not self.conversion.is_v41:
                text.image(None)
            elif in_assistant:
                raise ConversionError("Image in assistant message is not supported")
            elif block.kind == "image_url":
                path = f".messages[{index}]"
                link_error = f"{path}.image_url.url[0]: image_url.url "
                text.image(url_image(block.url, block.detail or "high", path, link_error=link_error))
            else:
                text.image(_file(block, f".messages[{index}]"))
        return text


def _file(block: ChatBlock, path: str) -> ImageSource:
    """The image in a file block."""
    if block.file_id is None and block.file_data is None:
        raise ConversionError(f"{path}: file must have a file_id or file_data")
    if block.file_id is not None and block.file_data is not None:
        raise ConversionError(f"{path}: file cannot have both file_id and file_data")
    if block.file_id is not None and block.filename is not None:
        raise ConversionError(f"{path}: file cannot have filename when file_id is present")
    if block.file_id is not None or block.file_data is None:
        raise ConversionError(f"{path}: {FILE_ID_TEXT}")
    parts = data_url_parts(block.file_data)
    if parts is None:
        raise ConversionError(f"{path}: file_data is not a valid base64 data url")
    if not is_image_type(parts[0]):
        raise ConversionError(f"{path}: {UNSUPPORTED_FILE_TEXT}")
    return url_image(block.file_data, "high", path, link_error="")
