"""Owns what a Responses request means: its conversion into a conversation, with every check in the API's order.

The shape of the request is in `responses_shape`, its items are converted in `responses_history`.
"""

from deepseek_recipe.conversation import Message
from deepseek_recipe.echo import EchoDetails, ResponsesEcho
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.generator_responses import ResponsesChunkGenerator
from deepseek_recipe.options import (
    ConversationRequest,
    ConversionOptions,
    InferenceOptions,
    ModelVersion,
    ResponseContext,
    WebSearchBehavior,
)
from deepseek_recipe.request_body import OneUse, RequestBody, read_body
from deepseek_recipe.request_rules import (
    Conversion,
    WantedFormat,
    check_max_tokens,
    check_temperature_and_top_p,
    check_top_logprobs,
    fill_reasoning,
    mentions_json,
    parsing_options,
    sampling,
    start_conversion,
)
from deepseek_recipe.request_tools import (
    RequestedTool,
    announce,
    build_conversation,
    check_strictness,
    check_tools,
    choose_tools,
    tool_constraint,
)
from deepseek_recipe.responses_history import History
from deepseek_recipe.responses_items import InputItem
from deepseek_recipe.responses_shape import ResponsesBody, ResponsesChoice, read_responses
from deepseek_recipe.responses_tools import ToolNames, check_static


class ResponsesRequest:
    """A Responses request. It can be converted once; all else is read before.

    Raises:
        ValueError: if the body is not JSON or not of the right shape.
    """

    def __init__(self, body: RequestBody) -> None:
        self._body = OneUse(read_body(body, read_responses), "protocol request")

    @property
    def model(self) -> str:
        """The requested model name."""
        return self._body.look(lambda body: body.model)

    def namespace_tool_map(self, options: ConversionOptions) -> dict[str, tuple[str, str]]:
        """Namespace and local name of each namespaced tool, by its full name.

        Raises:
            ConversionError: if the model name is not accepted.
        """
        return self._body.look(lambda body: _Tools(body, options.model_version(body.model)).names.origin)

    def echo(self) -> ResponsesEcho:
        """What the answer repeats from this request."""
        return self._body.look(_echo)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert the request; this uses it up, also if it fails.

        Raises:
            ConversionError: if the API would refuse the request. RuntimeError: if it was converted before.
        """
        return _convert(self._body.take(), options)

    @staticmethod
    def chunk_generator(request: ConversationRequest, id: str, model: str) -> ResponsesChunkGenerator:
        """A generator of the events that answer `request`."""
        return ResponsesChunkGenerator(request, id, model)


class _Tools:
    """The tools of a request, and of its tool search outputs, with full names."""

    def __init__(self, body: ResponsesBody, version: ModelVersion) -> None:
        self.names = ToolNames(version)
        self.requested: list[RequestedTool] = self.names.requested(body.tools or [])
        self.announced: dict[int, list[str]] = {}
        for index, item in _search_outputs(body, version):
            found = self.names.requested(item.tools, deferred=True)
            self.requested += found
            self.announced[index] = [tool.name for tool in found if tool.defer_loading]


def _search_outputs(body: ResponsesBody, version: ModelVersion) -> list[tuple[int, InputItem]]:
    if version is not ModelVersion.DeepseekV41Flash or not isinstance(body.input, list):
        return []
    return [(i, item) for i, item in enumerate(body.input) if item and item.kind == "tool_search_output"]


def _echo(body: ResponsesBody) -> ResponsesEcho:
    reasoning, text, choice = body.reasoning, body.text, body.tool_choice
    details = EchoDetails(
        effort=reasoning.effort if reasoning else None,
        summary=(reasoning.summary or reasoning.generate_summary) if reasoning else None,
        text_format=text.format.shown if text else {"type": "text"},
        verbosity=text.verbosity if text else None,
        tool_choice=choice.shown if choice else "auto",
        tools=[tool.shown() for tool in body.tools or () if tool.is_known],
    )
    return ResponsesEcho(
        body.instructions,
        body.max_output_tokens,
        1.0 if body.temperature is None else body.temperature,
        1.0 if body.top_p is None else body.top_p,
        body.top_logprobs or 0,
        body.user,
        details,
    )


def _check_static(body: ResponsesBody, conversion: Conversion) -> None:
    web_search = conversion.options.responses_web_search
    check_static(body.tools or [], web_search)
    if not body.instructions and body.input is None:
        raise ConversionError("Either input or instructions must be provided")
    if body.input == []:
        raise ConversionError("Input items array must not be empty")
    for index, item in _search_outputs(body, conversion.version):
        check_static(item.tools, web_search, f"input[{index}].")


def _messages(body: ResponsesBody, conversion: Conversion, tools: _Tools) -> list[Message]:
    messages = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(Message("user", body.input))
    elif body.input is not None:
        messages += History(conversion, tools.names, tools.announced).convert(body.input)
    return fill_reasoning(conversion, messages, bool(tools.requested), "reasoning_text")


def _convert(body: ResponsesBody, options: ConversionOptions) -> ConversationRequest:
    conversion = start_conversion(options, body.model, None, body.reasoning.effort if body.reasoning else None)
    _check_static(body, conversion)
    tools = _Tools(body, conversion.version)
    messages = _messages(body, conversion, tools)
    choice = body.tool_choice or ResponsesChoice()
    if choice.web_search and options.responses_web_search is WebSearchBehavior.Reject:
        raise ConversionError("Server tools are not supported")
    chosen = choose_tools(conversion, check_tools(tools.requested, choice.choice), choice.choice)
    wanted = body.text.format.wanted if body.text else WantedFormat()
    if wanted.kind == "json_object" and not mentions_json(messages):
        raise ConversionError(
            "Response input messages must contain the word 'json' in some form to use 'text.format' of type "
            "'json_object'."
        )
    constraint = wanted.constraint()
    check_strictness(chosen, wanted.kind != "text")
    check_temperature_and_top_p(body.temperature, body.top_p)
    check_top_logprobs(body.top_logprobs)
    max_tokens = check_max_tokens(conversion, body.max_output_tokens)
    conversation = build_conversation(conversion, announce(messages, chosen), chosen, wanted)
    request = ConversationRequest(conversation, conversion.version)
    temperature, top_p = sampling(conversion, body.temperature, body.top_p, bool(chosen.tools))
    request.inference_options = InferenceOptions(
        max_tokens,
        temperature,
        top_p,
        body.top_logprobs is not None,
        body.top_logprobs,
        output_constraint=tool_constraint(chosen) or constraint,
    )
    request.parsing_options = parsing_options(conversation, options, [])
    request.stream = bool(body.stream)
    request.context = _context(body, tools.names)
    request.warnings = conversion.warnings
    return request


def _context(body: ResponsesBody, names: ToolNames) -> ResponseContext:
    declared = body.tools or []
    return ResponseContext(
        "responses",
        null_usage=not body.stream,
        echo=_echo(body),
        namespace_tools=names.origin,
        custom_tools=frozenset(tool.name for tool in declared if tool.kind == "custom"),
        client_tool_search=any(tool.is_client_search for tool in declared),
    )
