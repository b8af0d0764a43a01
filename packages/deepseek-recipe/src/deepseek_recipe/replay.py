"""Owns remembering tool calls as the model wrote them, so that history repeats them byte for byte.

A prompt that spells an earlier call in any other way misses the prefix cache from there on.
"""

from collections import OrderedDict
from collections.abc import Sequence
from io import StringIO

from deepseek_recipe.conversation import Message, Replay, ToolCall
from deepseek_recipe.json_reader import parse_object
from deepseek_recipe.pieces import Kind, Piece
from deepseek_recipe.special_tokens import SpecialToken, SpecialTokens


class ReplayMemory:
    """The last `capacity` blocks of calls by the ids of their calls; filled by `StreamProcessor`, read by `recall`."""

    def __init__(self, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[str, ...], tuple[list[ToolCall], Replay]] = OrderedDict()

    def remember(self, calls: Sequence[ToolCall], block: Replay) -> None:
        """Keep the block that made these calls; nothing if it is empty."""
        if not block:
            return
        key = tuple(call.id for call in calls)
        self._blocks[key] = (list(calls), block)
        self._blocks.move_to_end(key)
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def recall(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, those whose calls are remembered and unchanged with the block as it was written."""
        return [self._with_block(message) for message in messages]

    def _with_block(self, message: Message) -> Message:
        if not message.tool_calls:
            return message
        calls, block = self._blocks.get(tuple(call.id for call in message.tool_calls), ([], ()))
        return message.changed(replay=block) if _same(calls, message.tool_calls) else message


class CallRecorder:
    """Collects one answer: its text, and the calls that were parsed from it."""

    def __init__(self, tokens: SpecialTokens, *, starts_in_calls: bool) -> None:
        self._dsml = tokens.token(SpecialToken.Dsml)
        self._starts_in_calls = starts_in_calls
        self._bits: list[tuple[str, bool]] = []
        self._calls: list[tuple[str, StringIO]] = []

    def add(self, piece: Piece) -> None:
        """Take a piece of output; a marker spelled in text that came decoded is a control token."""
        if piece.kind is not Kind.TEXT:
            self._bits.append((piece.text, piece.kind is Kind.CONTROL))
            return
        text = piece.text
        if self._bits and not self._bits[-1][1]:
            text = self._bits.pop()[0] + text
        for index, part in enumerate(text.split(self._dsml) if self._dsml else [text]):
            self._bits += [(self._dsml, True)] if index else []
            self._bits.append((part, False))

    def start_call(self, name: str) -> None:
        """A call has begun."""
        self._calls.append((name, StringIO()))

    def arguments(self, text: str) -> None:
        """The last call has got more arguments."""
        if self._calls:
            self._calls[-1][1].write(text)

    def calls(self, ids: Sequence[str]) -> list[ToolCall]:
        """The calls, with the ids that they were given."""
        return [
            ToolCall(call_id, name, text.getvalue()) for call_id, (name, text) in zip(ids, self._calls, strict=True)
        ]

    def block(self) -> Replay:
        """The block from the newlines in front of its opener to its end; empty if it is not complete."""
        bits = _joined(self._bits)
        closers = [i for i, bit in enumerate(bits) if bit == (self._dsml, True) and _closes(bits, i)]
        if not closers:
            return ()
        last = closers[-1]
        name = "tool_calls>" if bits[last + 1][0].startswith("tool_calls>") else " calls>"
        body = [*bits[: last + 1], (name, False)]
        if self._starts_in_calls:
            return _joined([("\n\n<", False), (self._dsml, True), (f"{name}\n", False), *body])
        opener = next(i for i, bit in enumerate(body) if bit == (self._dsml, True) and body[i - 1][0].endswith("<"))
        before = body[opener - 1][0]
        newlines = before[len(before.removesuffix("<").rstrip("\n")) :]
        return _joined([(newlines, False), *body[opener:]])


def _closes(bits: Replay, index: int) -> bool:
    """Whether the marker at `index` is the one in the closing tag of a block."""
    before = bits[index - 1][0] if index else ""
    after = bits[index + 1][0] if index + 1 < len(bits) else ""
    return before.endswith("</") and after.startswith(("tool_calls>", " calls>"))


def _joined(bits: Sequence[tuple[str, bool]]) -> Replay:
    """The bits with neighbouring text joined."""
    joined: list[tuple[str, bool]] = []
    for text, is_special in bits:
        if joined and not is_special and not joined[-1][1]:
            joined[-1] = (joined[-1][0] + text, False)
        elif text:
            joined.append((text, is_special))
    return tuple(joined)


def _same(calls: Sequence[ToolCall], others: Sequence[ToolCall]) -> bool:
    """Whether calls have the same ids, names and arguments; arguments may be spelled differently."""
    return len(calls) == len(others) and all(
        one.id == other.id and one.name == other.name and _arguments(one) == _arguments(other)
        for one, other in zip(calls, others, strict=True)
    )


def _arguments(call: ToolCall) -> object:
    members = parse_object(call.arguments)
    return call.arguments if members is None else members
