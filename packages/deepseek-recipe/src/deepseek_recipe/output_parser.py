"""Owns the walk of model output through the states: cutting pieces into parts, each with an action.

The states are in `grammar`; what a part becomes is the business of `stream_processor`.
"""

from typing import NamedTuple

from deepseek_recipe.grammar import Action, Grammar, State
from deepseek_recipe.matcher import Matcher
from deepseek_recipe.pieces import Piece


class Part(NamedTuple):
    """A bit of output: what to do with it, its text, and the piece it came from."""

    action: Action
    text: str
    piece: Piece


class OutputParser:
    """Parses exactly as the API does, including how the output is cut into parts."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.state: State = grammar.start
        self._matcher = Matcher(self.state.patterns)
        self._pending: list[tuple[Piece, str]] = []
        self._units = 0
        self._parts: list[Part] = []
        self._delayed: Part | None = None
        self._last_action: Action | None = None
        self.stop_sequence: str | None = None
        """The stop sequence that ended the output."""

    def is_idle(self) -> bool:
        """Whether plain text goes straight through: nothing is held and a symbol of this state has been seen."""
        return not self._pending and self._delayed is None and not self._matcher.first and not self._matcher.live

    def feed(self, piece: Piece) -> None:
        """Take a piece; after a stop sequence, `stop_sequence` is set and no more may be fed."""
        text, kind = piece.text, piece.kind
        if not text:
            self._feed_empty(piece)
            return
        start = index = 0
        while index < len(text):
            # A search may begin only at the start of a row of newlines: see PatternSet.
            if not self._matcher.live and not self._matcher.first and text[index - 1 : index + 1] != "\n\n":
                danger = self.state.patterns.dangers[kind].search(text, index)
                if danger is None:
                    break
                index = danger.start()
            done = self._matcher.step(text[index], kind)
            index += 1
            if done is not None:
                self._hold(piece, text[start:index])
                start = index
                self._match(*done)
                if self.stop_sequence is not None:
                    return
        self._hold(piece, text[start:])

    def _hold(self, piece: Piece, text: str) -> None:
        if text:
            self._pending.append((piece, text))
            self._units += len(text)

    def _feed_empty(self, piece: Piece) -> None:
        last = self._last_action
        if self._pending or last is None:
            self._pending.append((piece, ""))
        elif last <= Action.ESCAPED:
            self._part(last, "", piece)

    def _part(self, action: Action, text: str, piece: Piece) -> None:
        self._parts.append(Part(action, text, piece))
        self._last_action = action

    def _match(self, index: int, length: int) -> None:
        """The pattern `index` is complete with the last `length` symbols: output what is in front, then act."""
        rule = self.state.rules[index]
        front = self._units - length
        taken = 0
        while taken < len(self._pending):
            piece, text = self._pending[taken]
            if front and len(text) <= front:
                self._part(self.state.default, text, piece)
                front -= len(text)
                taken += 1
                if not front:
                    taken += self._pass_empty(taken)
                continue
            if front:
                self._part(self.state.default, text[:front], piece)
            break
        source = self._pending[taken][0]
        self._pending = []
        self._units = 0
        if rule.action is Action.STOP:
            self.stop_sequence = "".join(element.character for element in rule.pattern.elements)
            return
        self._part(rule.action, rule.text, source)
        self.state = self._grammar.state(rule.target)
        self._matcher = Matcher(self.state.patterns)

    def _pass_empty(self, start: int) -> int:
        """Output the empty pieces from `start` on; return how many there were."""
        count = 0
        while start + count < len(self._pending) and not self._pending[start + count][1]:
            self._part(self.state.default, "", self._pending[start + count][0])
            count += 1
        return count

    def end_push(self) -> list[Part]:
        """All parts that can be told apart by now."""
        live = self._matcher.live
        parts, self._parts = self._parts, []
        if self._delayed is not None:
            parts.insert(0, self._delayed)
            self._delayed = None
        if not self._units:
            return parts
        if live == self._units:
            first = next(piece for piece, text in self._pending if text)
            if parts and parts[-1].piece is first:
                self._delayed = parts.pop()
            return parts
        self._release(self._units - live, parts)
        return parts

    def _release(self, units: int, parts: list[Part]) -> None:
        """Move the pending pieces that lie within the first `units` symbols to `parts`."""
        action = self.state.default
        taken = 0
        for piece, text in self._pending:
            size = len(text)
            if size > units:
                break
            units -= size
            taken += 1
            self._units -= size
            parts.append(Part(action, text, piece))
            self._last_action = action
        del self._pending[:taken]

    def finish(self) -> list[Part]:
        """All that is left."""
        parts = [] if self._delayed is None else [self._delayed]
        self._delayed = None
        if self._units:
            for piece, text in self._pending:
                self._part(self.state.default, text, piece)
        parts += self._parts
        self._pending, self._parts, self._units = [], [], 0
        return parts
