"""The tool calls of DeepSeek-V4 and V4.1 as EBNF: text, and blocks of calls whose arguments obey the tools' schemas.

The markup's one special token stands in a grammar as that token, so that no text can spell it; JSON values in arguments
are `json_schema.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.engine.grammar.ebnf import EMPTY, Rules, literal, one_of
from deepinfer.engine.grammar.json_schema import SchemaGrammar
from deepinfer.engine.grammar.json_text import any_character
from deepinfer.engine.grammar.schema_algebra import Schema, child, refuse, types_of
from deepinfer.errors import RequestError

MARKUP_TOKEN = "｜DSML｜"
MOST_TOOLS = 512
_UNREADABLE = frozenset('" \n<>')
"""Characters of a name at which a reader of calls would end it."""


@dataclass(frozen=True, kw_only=True)
class ToolCalls:
    """Tools that the output may call, or must.

    tools     Chat Completions tools: {"type": "function", "function": {"name": ..., "parameters": schema}}
    required  the output is calls and nothing else; otherwise text, calls, or text and then calls
    opened    the prompt ends with the opener of the block
    version   whose markup
    """

    tools: Sequence[Mapping[str, Any]]
    required: bool = False
    opened: bool = False
    version: Literal["v4", "v4.1"] = "v4.1"


def tool_grammar(calls: ToolCalls, rules: Rules, markup: int) -> str:
    """Outputs that `calls` allows, as an expression; `markup` is the id of MARKUP_TOKEN. Raises RequestError."""
    if not calls.tools or len(calls.tools) > MOST_TOOLS:
        raise RequestError(f"tool_calls need 1 to {MOST_TOOLS} tools, got {len(calls.tools)}")
    writer = _Calls(rules, f"Token({markup})", "" if calls.version == "v4" else " ")
    choices = [writer.call(tool) for tool in calls.tools]
    block = "tool_calls" if calls.version == "v4" else "calls"
    rules.define("call", " | ".join(choices))
    inside = f"call call* {writer.tag('/', block)}"
    if calls.opened:
        return inside
    opener = f'{writer.tag("", block)} "\\n"'
    if calls.required:
        return f'"\\n\\n" {opener} {inside}'
    text = f"{any_character([(0, 0x10FFFF)])}*"
    return f"{text} ({opener} {inside})?"


class _Calls:
    """Writes calls with the tags of one version."""

    def __init__(self, rules: Rules, token: str, gap: str) -> None:
        self._rules = rules
        self._token = token
        self._gap = gap

    def tag(self, slash: str, name: str, attributes: str = "") -> str:
        """An opening or closing tag; `attributes` are an expression."""
        inner = literal(self._gap + name)
        return f'{literal("<" + slash)} {self._token} {inner} {attributes or EMPTY} ">"'

    def call(self, tool: Mapping[str, Any]) -> str:
        """One call of one tool, up to its line break."""
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, got {tool!r}')
        name = _readable(function["name"], "tool")
        try:
            arguments = self._arguments(function.get("parameters") or {})
        except RequestError as error:
            raise RequestError(f"tool {name!r}: {error}") from None
        opening = self.tag("", "invoke", literal(f' name="{name}"'))
        return f'{opening} "\\n" {arguments} {self.tag("/", "invoke")} "\\n"'

    def _arguments(self, schema: Schema) -> str:
        grammar = SchemaGrammar(schema, self._rules)
        if schema is True or not schema:
            schema = {"type": "object", "additionalProperties": True} if schema else {"properties": {}}
        if not isinstance(schema, Mapping) or types_of(schema, "#") != ["object"]:
            raise RequestError("parameters must be the schema of an object")
        for keyword in schema:
            if keyword in ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "minProperties", "maxProperties"):
                raise refuse("#", keyword, "arguments are written one by one: name them under properties")
            if keyword in ("patternProperties", "propertyNames"):
                raise refuse("#", keyword, "the names of arguments must be known")
        grammar.check(schema)
        return self._parameters(grammar, schema)

    def _parameters(self, grammar: SchemaGrammar, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", "properties" not in schema)
        parts: list[str] = []
        for name in dict.fromkeys([*properties, *required]):
            if name not in properties and others is False:
                raise refuse("#", "required", f"{name!r} is none of the properties, and others are not allowed")
            value = properties.get(name, others)
            text = self._parameter(
                literal(_readable(name, "parameter")), grammar, value, child("#", "properties", name)
            )
            parts.append(text if name in required else f"({text})?")
        if "properties" not in schema and others is not False:
            free = self._parameter("[a-zA-Z_] [a-zA-Z0-9_]{0,63}", grammar, others, "#/additionalProperties")
            parts.append(f"({free})*")
        # A call without arguments has an empty line in V4.1, none in V4; either is read.
        some = " ".join(parts)
        nothing = '"\\n"?' if self._gap else EMPTY
        return f"({some} | {nothing})" if parts and not required else f"({some or nothing})"

    def _parameter(self, name: str, grammar: SchemaGrammar, schema: Schema, path: str) -> str:
        """One argument with its line break: strings as they are, everything else as JSON."""
        texts, value = grammar.split_strings(schema, path)
        forms = [f'"true\\">" {text}' for text in texts] + ([f'"false\\">" {value}'] if value is not None else [])
        if not forms:
            raise refuse(path, "type", "no value is allowed")
        opening = (
            f'{literal("<")} {self._token} {literal(self._gap + "parameter name=" + chr(34))} {name} "\\" string=\\""'
        )
        closing = f'{self.tag("/", "parameter")} "\\n"'
        return self._rules.add("argument", f"{opening} {one_of(forms)} {closing}")


def _readable(name: str, what: str) -> str:
    if not name or _UNREADABLE & set(name):
        raise RequestError(f"the {what} name {name!r} cannot be read back from a call: use letters, digits, _ and -")
    return name
