"""Owns the rules about tools that the three protocols share: names, schemas, the choice, strictness, the constraint.

What a tool looks like in a request is the business of the protocol's module.
"""

import re
from typing import Final, Literal, NamedTuple

from deepseek_recipe.conversation import Conversation, Message, ToolDefinition
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_reader import Json
from deepseek_recipe.json_writer import compact_json
from deepseek_recipe.options import OutputConstraint
from deepseek_recipe.request_rules import Conversion, WantedFormat, empty_string
from deepseek_recipe.schema_check import check_function_schema
from deepseek_recipe.schema_strict import EMPTY_OBJECT, StrictSchemaError, normalise_schema
from deepseek_recipe.schema_vocabulary import SchemaError

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]+")
_MAX_NAME_BYTES: Final = 128


class RequestedTool(NamedTuple):
    """A tool as the request has it; `needs_schema` is whether absent parameters are an error."""

    name: str
    description: str | None = None
    parameters: Json = None
    strict: bool | None = None
    defer_loading: bool = False
    needs_schema: bool = False


class RequestedChoice(NamedTuple):
    """The tool choice: auto, none, required, or the name of a tool."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""


class ChosenTools(NamedTuple):
    """The tools and the choice of a conversation."""

    tools: list[ToolDefinition]
    choice: Literal["auto", "none", "required"]

    @property
    def all_strict(self) -> bool:
        """Whether there are tools, and all are strict."""
        return bool(self.tools) and all(tool.strict for tool in self.tools)


def check_tool_name(name: str, path: str) -> None:
    """Check the name of a tool.

    Raises:
        ConversionError: if it is empty, longer than 128 bytes or has other characters than letters, digits, _ and -.
    """
    if not name:
        raise ConversionError(empty_string(path))
    length = len(name.encode())
    if length > _MAX_NAME_BYTES:
        raise ConversionError(
            f"Invalid '{path}': string too long. Expected a string with maximum length {_MAX_NAME_BYTES}, but got a "
            f"string with length {length} instead."
        )
    if not _NAME.fullmatch(name):
        raise ConversionError(
            f"Invalid '{path}': string does not match pattern. Expected a string that matches the pattern "
            "'^[a-zA-Z0-9_-]+$'."
        )


def check_tools(requested: list[RequestedTool], choice: RequestedChoice) -> list[ToolDefinition]:
    """Check names for repeats and schemas, tool by tool; return the tools as definitions, none for the choice none.

    Raises:
        ConversionError: at the first tool that is not allowed.
    """
    if choice.kind == "none":
        return []
    names: set[str] = set()
    tools = []
    for tool in requested:
        if tool.name in names:
            raise ConversionError("Tool names must be unique.")
        names.add(tool.name)
        tools.append(
            ToolDefinition(tool.name, tool.description, _checked_parameters(tool), tool.strict, tool.defer_loading)
        )
    return tools


def _checked_parameters(tool: RequestedTool) -> Json:
    if tool.parameters is None and not tool.needs_schema:
        return EMPTY_OBJECT if tool.strict else {}
    try:
        if tool.strict:
            return normalise_schema(
                tool.parameters,
                shape_prefix="Invalid tool parameters schema : ",
                top_message="The top level of the function parameters schema must be an object.",
                empty_top=True,
            )
        check_function_schema(tool.parameters)
    except StrictSchemaError as error:
        raise ConversionError(str(error)) from None
    except SchemaError as error:
        raise ConversionError(f"Invalid schema for function '{tool.name}': {error}") from None
    return tool.parameters


def choose_tools(conversion: Conversion, tools: list[ToolDefinition], choice: RequestedChoice) -> ChosenTools:
    """Apply the choice: a named tool becomes the only one, and required.

    Raises:
        ConversionError: for a name that is not there, and for a required call in thinking mode.
    """
    if choice.kind == "none" or not tools:
        return ChosenTools([], "none" if choice.kind == "none" else "auto")
    if choice.kind == "auto":
        return ChosenTools(tools, "auto")
    if choice.kind == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise ConversionError(
                f"Invalid value for 'tool_call': no function named '{choice.name}' was specified in the 'tools' "
                "parameter."
            )
    if conversion.thinking:
        raise ConversionError("Thinking mode does not support this tool_choice")
    return ChosenTools(tools, "required")


def check_strictness(chosen: ChosenTools, has_format: bool) -> None:
    """Check that tools are all strict or none, and that strict tools come without a response format.

    Raises:
        ConversionError: if not.
    """
    if any(tool.strict for tool in chosen.tools):
        if not chosen.all_strict:
            raise ConversionError("Cannot use strict tool with non-strict tool in the same request")
        if has_format:
            raise ConversionError("response_format should not be used with tools")


def tool_constraint(chosen: ChosenTools) -> OutputConstraint | None:
    """What calls must match: the tools as compact JSON; None without tools."""
    if not chosen.tools:
        return None
    shown = [_shown(tool) for tool in chosen.tools]
    return OutputConstraint("tool_call_required" if chosen.choice == "required" else "tool_call", compact_json(shown))


def _shown(tool: ToolDefinition) -> Json:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    shown: Json = {"type": "function", "function": function}
    return shown | {"defer_loading": True} if tool.defer_loading else shown


def announce(messages: list[Message], chosen: ChosenTools) -> list[Message]:
    """Replace the announced names of system messages by the tools that are left; drop messages left with nothing."""
    tools = {tool.name: tool for tool in chosen.tools}
    kept = []
    for message in messages:
        if message.tools:
            announced = [tools[tool.name] for tool in message.tools if tool.name in tools]
            if not announced and not message.content:
                continue
            message = message.changed(tools=announced)
        kept.append(message)
    return kept


def build_conversation(
    conversion: Conversion, messages: list[Message], chosen: ChosenTools, wanted: WantedFormat
) -> Conversation:
    """Put together what has been converted and checked."""
    return Conversation(
        messages,
        thinking_mode=conversion.thinking,
        tools=chosen.tools,
        tool_choice=chosen.choice,
        reasoning_effort=conversion.effort,
        response_format="json_object" if wanted.kind == "json_object" else "text",
        response_schema=wanted.schema,
        response_regex=wanted.regex,
    )
