"""Owns the order of a V4.1 prompt: a head, then turns, with system messages where they stand.

Tool blocks, calls and control tokens are written by `canvas`.
"""

from itertools import groupby
from typing import Final

from deepseek_recipe.canvas import SCHEMA_HEADER, V41, Canvas
from deepseek_recipe.conversation import Conversation, Message, RenderedPrompt, ToolCall
from deepseek_recipe.special_tokens import SpecialToken, SpecialTokens

_EFFORT: Final = {"low": 50, None: 75, "high": 75, "xhigh": 75, "max": 100}


def render_v41(conversation: Conversation, tokens: SpecialTokens) -> RenderedPrompt:
    """Render a conversation as a V4.1 prompt."""
    canvas = Canvas(V41, tokens)
    canvas.token(SpecialToken.Bos)
    messages = conversation.messages
    has_head = conversation.active_tools or conversation.response_format in ("json_object", "json_schema")
    if not messages and not has_head:
        canvas.tail(conversation)
        return canvas.finish()
    done = _head(canvas, conversation, has_head)
    rest = messages[done:]
    calls: list[ToolCall] | None = None
    for kind, run in groupby(rest, key=lambda m: "user" if m.role == "tool" else m.role):
        group = list(run)
        if kind == "user":
            _turn(canvas, group if calls is None else _sort_results(group, calls))
        elif kind == "latest_reminder":
            canvas.token(SpecialToken.LatestReminder)
            canvas.text(group[0].content)
        elif kind == "system":
            for message in group:
                canvas.token(SpecialToken.System)
                canvas.content(message)
                _announce(canvas, message)
        else:
            for message in group:
                _assistant(canvas, conversation, message, is_first=done == 0 and not has_head)
                calls = message.tool_calls or calls
                done += 1
            continue
        done += len(group)
    if not (rest and rest[-1].role == "assistant" and rest[-1].prefix):
        canvas.tail(conversation)
    elif conversation.requires_call:
        canvas.opener()
    return canvas.finish()


def _head(canvas: Canvas, conversation: Conversation, has_head: bool) -> int:
    """Write effort, first system message, tools and format; return how many messages that used up."""
    first = conversation.messages[0] if conversation.messages else None
    system = first if first is not None and first.role == "system" else None
    if not (system or has_head or conversation.thinking_mode):
        return 0
    canvas.token(SpecialToken.System)
    if conversation.thinking_mode:
        canvas.text(
            f"Reasoning Effort: {_EFFORT[conversation.reasoning_effort]} "
            "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        )
    if system is not None:
        canvas.content(system)
    if conversation.active_tools:
        canvas.text("\n\n")
        canvas.tool_block(conversation.tools)
    if conversation.response_format == "json_object":
        canvas.text(SCHEMA_HEADER + '{"type": "json_object"}')
    canvas.schema_format(conversation)
    if system is None:
        return 0
    _announce(canvas, system)
    return 1


def _announce(canvas: Canvas, message: Message) -> None:
    """Write the tools that a system message announces."""
    if message.tools:
        canvas.text("\n\n### Updated Tool Schemas\n\n" + "\n".join(canvas.tool_lines(message.tools)))


def _turn(canvas: Canvas, group: list[Message]) -> None:
    canvas.token(SpecialToken.User)
    for index, message in enumerate(group):
        if index:
            canvas.text("\n\n")
        if message.role == "tool":
            canvas.text("<tool_result>")
            canvas.content(message)
            canvas.text("</tool_result>")
        else:
            canvas.content(message)


def _sort_results(group: list[Message], calls: list[ToolCall]) -> list[Message]:
    """Bring the tool results that have an id into the order of the calls; the others keep their places."""
    slots = [i for i, message in enumerate(group) if message.role == "tool" and message.tool_call_id is not None]
    if len(slots) < 2:
        return group
    position: dict[str, int] = {}
    for index, call in enumerate(calls):
        position.setdefault(call.id, index)
    ordered = list(group)
    results = sorted((group[i] for i in slots), key=lambda m: position.get(m.tool_call_id or "", 0))
    for slot, message in zip(slots, results, strict=True):
        ordered[slot] = message
    return ordered


def _assistant(canvas: Canvas, conversation: Conversation, message: Message, is_first: bool) -> None:
    canvas.token(SpecialToken.Assistant)
    keeps_reasoning = conversation.active_tools or (message.prefix and not is_first)
    if conversation.thinking_mode and keeps_reasoning:
        canvas.token(SpecialToken.ThinkingStart)
        canvas.grounded(message.reasoning_content or "")
        if not (message.prefix and not message.content and not message.tool_calls):
            canvas.token(SpecialToken.ThinkingEnd)
    else:
        canvas.token(SpecialToken.ThinkingEnd)
    canvas.grounded(message.content)
    if message.tool_calls:
        canvas.calls(message)
    if not message.prefix:
        canvas.token(SpecialToken.Eos)
