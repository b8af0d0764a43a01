"""Owns what a Messages request means: its conversion into a conversation, with every check in the API's order.

The shape of the request is in `messages_shape`, its messages are converted in `messages_history`.
"""

from deepseek_recipe.conversation import Message
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.generator_messages import MessagesChunkGenerator
from deepseek_recipe.messages_history import History
from deepseek_recipe.messages_shape import MessagesBody, read_messages
from deepseek_recipe.options import (
    ConversationRequest,
    ConversionOptions,
    InferenceOptions,
    ResponseContext,
    WebSearchBehavior,
)
from deepseek_recipe.request_body import OneUse, RequestBody, read_body
from deepseek_recipe.request_rules import (
    Conversion,
    WantedFormat,
    check_max_tokens,
    check_stops,
    check_temperature_and_top_p,
    fill_reasoning,
    parsing_options,
    sampling,
    start_conversion,
)
from deepseek_recipe.request_tools import (
    RequestedChoice,
    RequestedTool,
    announce,
    build_conversation,
    check_tool_name,
    check_tools,
    choose_tools,
    tool_constraint,
)

_BILLING_HEADER = "x-anthropic-billing-header"


class MessagesRequest:
    """A Messages request. It can be converted once; `model` is read before.

    Raises:
        ValueError: if the body is not JSON or not of the right shape.
    """

    def __init__(self, body: RequestBody) -> None:
        self._body = OneUse(read_body(body, read_messages), "protocol request")

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
    def chunk_generator(request: ConversationRequest, id: str, model: str) -> MessagesChunkGenerator:
        """A generator of the events that answer `request`."""
        return MessagesChunkGenerator(id, model, request.conversation.thinking_mode)


def _convert(body: MessagesBody, options: ConversionOptions) -> ConversationRequest:
    thinking_type = body.thinking.type if body.thinking else None
    conversion = start_conversion(options, body.model, thinking_type, body.output_config)
    requested = _requested_tools(body, conversion)
    if not body.messages:
        raise ConversionError("messages: at least one message is required")
    history = History(conversion, frozenset(tool.name for tool in requested))
    messages = fill_reasoning(
        conversion, _system(body) + history.convert(body.messages), bool(requested), "content[].thinking"
    )
    choice = _choice(body, conversion)
    chosen = choose_tools(conversion, check_tools(requested, choice), choice)
    stops = check_stops(body.stop_sequences or [])
    check_temperature_and_top_p(body.temperature, body.top_p)
    max_tokens = check_max_tokens(conversion, body.max_tokens, lower=True)
    conversation = build_conversation(conversion, announce(messages, chosen), chosen, WantedFormat())
    request = ConversationRequest(conversation, conversion.version)
    temperature, top_p = sampling(conversion, body.temperature, body.top_p, bool(chosen.tools))
    request.inference_options = InferenceOptions(
        max_tokens, temperature, top_p, output_constraint=tool_constraint(chosen)
    )
    request.parsing_options = parsing_options(conversation, options, stops)
    request.stream = bool(body.stream)
    request.context = ResponseContext("messages", null_usage=not body.stream)
    request.warnings = conversion.warnings
    return request


def _requested_tools(body: MessagesBody, conversion: Conversion) -> list[RequestedTool]:
    """Check names and server tools; return the tools to call."""
    drops = conversion.options.messages_web_search is WebSearchBehavior.Drop
    requested = []
    for index, entry in enumerate(body.tools or ()):
        if entry.tool is None:
            if drops and (entry.server_type or "").startswith("web_search"):
                continue
            raise ConversionError(f"tools[{index}]: server tools are not supported")
        check_tool_name(entry.tool.name, f"tools[{index}].name")
        requested.append(entry.tool)
    if not conversion.is_v41:
        return [RequestedTool(t.name, t.description, t.parameters, needs_schema=True) for t in requested]
    if requested and all(tool.defer_loading for tool in requested):
        raise ConversionError("tools: at least one tool must have defer_loading=false. All tools cannot be deferred.")
    return requested


def _choice(body: MessagesBody, conversion: Conversion) -> RequestedChoice:
    choice = body.tool_choice or RequestedChoice()
    drops = conversion.options.messages_web_search is WebSearchBehavior.Drop
    named = [entry.tool.name for entry in body.tools or () if entry.tool]
    if drops and choice.kind == "named" and choice.name == "web_search" and "web_search" not in named:
        return RequestedChoice()
    return choice


def _system(body: MessagesBody) -> list[Message]:
    """The message for the top-level system text; a billing header block is left out."""
    if body.system is None:
        return []
    if isinstance(body.system, str):
        return [Message("system", body.system)]
    texts = body.system
    if texts and texts[0].lower().startswith(_BILLING_HEADER):
        texts = texts[1:]
    return [Message("system", "\n\n".join(texts))]
