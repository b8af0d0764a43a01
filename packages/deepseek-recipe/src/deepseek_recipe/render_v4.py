"""Owns the order of a V4 prompt: system texts first, then turns.

Tool blocks, calls and control tokens are written by `canvas`.
"""

from typing import Final

from deepseek_recipe.canvas import V4, Canvas
from deepseek_recipe.conversation import Conversation, Message, RenderedPrompt
from deepseek_recipe.special_tokens import SpecialToken, SpecialTokens

_HIGH: Final = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_MAX: Final = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
_EFFORT: Final = {"low": "", None: _HIGH, "high": _HIGH, "xhigh": _HIGH, "max": _MAX}
_JSON_OBJECT: Final = (
    "\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
)


def render_v4(conversation: Conversation, tokens: SpecialTokens) -> RenderedPrompt:
    """Render a conversation as a V4 prompt."""
    canvas = Canvas(V4, tokens)
    canvas.token(SpecialToken.Bos)
    if conversation.thinking_mode:
        canvas.text(_EFFORT[conversation.reasoning_effort])
    _system(canvas, conversation)
    messages = _sort_calls(_merge_users([m for m in conversation.messages if m.role != "system"]))
    previous = ""
    for index, message in enumerate(messages):
        _message(canvas, conversation, message, previous, index == len(messages) - 1)
        previous = message.role
    if not (messages and messages[-1].role == "assistant" and messages[-1].prefix):
        canvas.tail(conversation)
    return canvas.finish()


def _system(canvas: Canvas, conversation: Conversation) -> None:
    separator = ""
    for message in conversation.messages:
        if message.role == "system":
            if message.content:
                canvas.text(separator)
                separator = "\n\n"
            canvas.content(message)
    if conversation.active_tools:
        canvas.text("\n\n")
        canvas.tool_block(conversation.tools)
    if conversation.response_format == "json_object":
        canvas.text(_JSON_OBJECT)
    canvas.schema_format(conversation)


def _merge_users(messages: list[Message]) -> list[Message]:
    """Join adjacent user messages; empty contents vanish, images are kept."""
    merged: list[Message] = []
    for message in messages:
        if not (message.role == "user" and merged and merged[-1].role == "user"):
            merged.append(message)
            continue
        before = merged[-1]
        head = f"{before.content}\n\n" if before.content and message.content else before.content
        merged[-1] = before.changed(
            content=head + message.content,
            image_sources=[*before.image_sources, *message.image_sources],
            image_spans=before.image_spans + tuple((a + len(head), b + len(head)) for a, b in message.image_spans),
        )
    return merged


def _sort_calls(messages: list[Message]) -> list[Message]:
    """Sort each message's calls by id, and as many messages after it: tools without id, tools by id, others."""
    ordered = list(messages)
    for index, message in enumerate(messages):
        calls = message.tool_calls if message.role == "assistant" else None
        if calls and index + len(calls) < len(messages):
            window = slice(index + 1, index + 1 + len(calls))
            ordered[window] = sorted(ordered[window], key=_result_order)
    return [
        m.changed(tool_calls=sorted(m.tool_calls, key=lambda call: call.id.encode())) if m.tool_calls else m
        for m in ordered
    ]


def _result_order(message: Message) -> tuple[int, bytes]:
    if message.role != "tool":
        return 2, b""
    return (0, b"") if message.tool_call_id is None else (1, message.tool_call_id.encode())


def _message(canvas: Canvas, conversation: Conversation, message: Message, previous: str, is_last: bool) -> None:
    if message.role == "assistant":
        _assistant(canvas, conversation, message, is_last)
        return
    if message.role == "latest_reminder":
        canvas.token(SpecialToken.LatestReminder)
        canvas.text(message.content)
        return
    follows = previous == "tool" or (previous == "user" and message.role == "user")
    if follows:
        canvas.text("\n\n")
    else:
        canvas.token(SpecialToken.User)
    if message.role == "tool":
        canvas.text("<tool_result>")
        canvas.content(message)
        canvas.text("</tool_result>")
    else:
        canvas.content(message)


def _assistant(canvas: Canvas, conversation: Conversation, message: Message, is_last: bool) -> None:
    canvas.token(SpecialToken.Assistant)
    goes_on_thinking = message.prefix and conversation.thinking_mode and not message.content
    if message.reasoning_content is not None and (conversation.active_tools or message.prefix):
        canvas.token(SpecialToken.ThinkingStart)
        canvas.grounded(message.reasoning_content)
        if not goes_on_thinking:
            canvas.token(SpecialToken.ThinkingEnd)
    elif not goes_on_thinking:
        canvas.token(SpecialToken.ThinkingEnd)
    canvas.grounded(message.content)
    if message.tool_calls is not None:
        canvas.calls(message)
    if not (is_last and message.prefix):
        canvas.token(SpecialToken.Eos)
    elif conversation.requires_call:
        canvas.opener()
