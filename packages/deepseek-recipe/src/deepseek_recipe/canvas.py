"""Owns what both prompt formats share: writing text and control tokens side by side, tool lines and effort of JSON.

The order of the parts is the business of `render_v4` and `render_v41`.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from deepseek_recipe.conversation import Conversation, ImageSource, Message, RenderedPrompt, ToolCall, ToolDefinition
from deepseek_recipe.json_reader import parse_object
from deepseek_recipe.json_writer import quote, spaced_json
from deepseek_recipe.special_tokens import GROUNDING_TOKENS, SpecialToken, SpecialTokens


class Dialect(NamedTuple):
    """Where V4 and V4.1 spell the same thing differently."""

    calls: str
    invoke: str
    parameter: str
    python_floats: bool
    """Whether floats are printed as Python prints them, or as `json_writer.float_text` does."""
    empty_arguments: str
    """What stands between the invoke tags of a call without arguments."""
    line_ends: bool
    """Whether every tool line ends in a newline of its own, or lines are joined and the list ends in one."""


V4 = Dialect("tool_calls", "invoke", "parameter", python_floats=False, empty_arguments="", line_ends=True)
V41 = Dialect(" calls", " invoke", " parameter", python_floats=True, empty_arguments="\n", line_ends=False)

_TOOL_TEXT = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{D}{calls}>" block like the following:

<{D}{calls}>
<{D}{invoke} name="$TOOL_NAME">
<{D}{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{D}{parameter}>
...
</{D}{invoke}>
<{D}{invoke} name="$TOOL_NAME2">
...
</{D}{invoke}>
</{D}{calls}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END} \
BEFORE any tool calls or final response.

Otherwise, output directly after {END} with tool calls or final response.

### Available Tool Schemas

{lines}
You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_TOOL_TEXT_MARKS = {
    "{D}": SpecialToken.Dsml,
    "{THINK}": SpecialToken.ThinkingStart,
    "{END}": SpecialToken.ThinkingEnd,
}
_TOOL_TEXT_PARTS = re.split(r"(\{\w+\})", _TOOL_TEXT)

SCHEMA_HEADER = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


@dataclass
class Canvas:
    """Collects a prompt: text, control tokens with their ranges, image sources."""

    dialect: Dialect
    tokens: SpecialTokens
    parts: list[str] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    images: list[ImageSource] = field(default_factory=list)
    length: int = 0

    def text(self, text: str) -> None:
        """Write text that is never a control token."""
        self.parts.append(text)
        self.length += len(text)

    def spelled(self, spelling: str) -> None:
        """Write `spelling` as one control token; nothing if it is empty."""
        if spelling:
            start = self.length
            self.parts.append(spelling)
            self.length = start + len(spelling)
            self.ranges.append((start, self.length))

    def token(self, token: SpecialToken) -> None:
        """Write a control token."""
        self.spelled(self.tokens.token(token))

    def tag(self, before: str, after: str) -> None:
        """Write the token of tool markup between two texts."""
        start = self.length + len(before)
        dsml = self.tokens.token(SpecialToken.Dsml)
        self.parts += before, dsml, after
        self.length = start + len(dsml) + len(after)
        if dsml:
            self.ranges.append((start, start + len(dsml)))

    def finish(self) -> RenderedPrompt:
        """The prompt so far."""
        return RenderedPrompt("".join(self.parts), self.ranges, self.images)

    def content(self, message: Message) -> None:
        """Write the content of a system, user or tool message with its image tokens; list its images."""
        done = 0
        for start, end in message.image_spans:
            self.text(message.content[done:start])
            self.spelled(message.content[start:end])
            done = end
        self.text(message.content[done:])
        self.images.extend(message.image_sources)

    def grounded(self, text: str) -> None:
        """Write assistant text, in which grounding tokens are control tokens."""
        spellings = [s for kind in GROUNDING_TOKENS if (s := self.tokens.token(kind))]
        if not any(spelling in text for spelling in spellings):
            self.text(text)
            return
        for index, part in enumerate(re.split(f"({'|'.join(map(re.escape, spellings))})", text)):
            if index % 2:
                self.spelled(part)
            else:
                self.text(part)

    def json(self, value: object) -> str:
        """JSON as this prompt format prints it."""
        return spaced_json(value, python_floats=self.dialect.python_floats)

    def tool_lines(self, tools: list[ToolDefinition]) -> list[str]:
        """One JSON object for each tool: name, description, parameters."""
        return [
            f'{{"name": {quote(tool.name)}, "description": {quote(tool.description or "")}, '
            f'"parameters": {self.json(tool.parameters)}}}'
            for tool in tools
        ]

    def tool_block(self, tools: list[ToolDefinition]) -> None:
        """Write the text that explains tool calls and lists the tools that are not deferred."""
        lines = self.tool_lines([tool for tool in tools if not tool.defer_loading])
        joined = "".join(f"{line}\n" for line in lines) if self.dialect.line_ends else "\n".join(lines) + "\n"
        words = {
            "{calls}": self.dialect.calls,
            "{invoke}": self.dialect.invoke,
            "{parameter}": self.dialect.parameter,
            "{lines}": joined,
        }
        for index, part in enumerate(_TOOL_TEXT_PARTS):
            if index % 2 and part in _TOOL_TEXT_MARKS:
                self.token(_TOOL_TEXT_MARKS[part])
            else:
                self.text(words.get(part, part) if index % 2 else part)

    def schema_format(self, conversation: Conversation) -> None:
        """Write the schema the answer must follow, if the conversation has one."""
        if conversation.response_format == "json_schema":
            self.text(SCHEMA_HEADER + self.json(conversation.response_schema))

    def opener(self) -> None:
        """Open a block of tool calls."""
        self.tag("\n\n<", f"{self.dialect.calls}>\n")

    def calls(self, message: Message) -> None:
        """Write the block of a message's tool calls, as the model wrote it if that is known."""
        for text, is_special in message.replay:
            if is_special:
                self.spelled(text)
            else:
                self.text(text)
        if message.replay:
            return
        self.opener()
        for call in message.tool_calls or ():
            self.call(call)
        self.tag("</", f"{self.dialect.calls}>")

    def call(self, call: ToolCall) -> None:
        """Write one call: a parameter for each argument, or `arguments` whole if they are no JSON object."""
        arguments = parse_object(call.arguments)
        if arguments is None:
            arguments = {"arguments": call.arguments}
        invoke, parameter = self.dialect.invoke, self.dialect.parameter
        self.tag("<", f'{invoke} name="{call.name}">\n')
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            text = value if is_string else self.json(value)
            self.tag("<", f'{parameter} name="{key}" string="{"true" if is_string else "false"}">{text}')
            self.tag("</", f"{parameter}>\n")
        self.tag("</" if arguments else f"{self.dialect.empty_arguments}</", f"{invoke}>\n")

    def tail(self, conversation: Conversation) -> None:
        """Write the header after which the model writes."""
        self.token(SpecialToken.Assistant)
        self.token(SpecialToken.ThinkingStart if conversation.thinking_mode else SpecialToken.ThinkingEnd)
        if conversation.requires_call:
            self.opener()
