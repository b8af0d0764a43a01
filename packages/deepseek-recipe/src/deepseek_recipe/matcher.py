"""Owns watching text for several patterns at once, symbol by symbol, with partial matches across pieces.

Which patterns count in which state is the business of `grammar`.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from deepseek_recipe.pieces import Kind


@dataclass(frozen=True, slots=True)
class Element:
    """One character of a pattern; a special one belongs to the spelling of a control token."""

    character: str
    special: bool = False

    def matches(self, character: str, kind: Kind) -> bool:
        """Whether a character of a piece of this kind is this element."""
        return self.character == character and (kind is Kind.TEXT or (kind is Kind.CONTROL) == self.special)


def ordinary(text: str) -> tuple[Element, ...]:
    """Elements of ordinary text."""
    return tuple(Element(character) for character in text)


def special(text: str) -> tuple[Element, ...]:
    """Elements of a control token's spelling."""
    return tuple(Element(character, True) for character in text)


@dataclass(frozen=True)
class Pattern:
    """A text to watch for.

    `eats_newlines`: newlines directly in front belong to the match. `only_first`: matches only as the first symbol of
    the state.
    """

    elements: tuple[Element, ...]
    eats_newlines: bool = False
    only_first: bool = False

    @cached_property
    def links(self) -> tuple[int, ...]:
        """For each prefix, the length of the longest shorter prefix that it ends with."""
        links = [0] * len(self.elements)
        length = 0
        for index in range(1, len(self.elements)):
            while length and self.elements[index] != self.elements[length]:
                length = links[length - 1]
            length += self.elements[index] == self.elements[length]
            links[index] = length
        return tuple(links)


class PatternSet:
    """The patterns of a state, in order, with the characters that can begin a match."""

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self.patterns = patterns
        self.triggers = tuple(self._triggers(kind) for kind in Kind)
        """For each kind of piece, a pattern that finds the first character that can begin a match."""

    def _triggers(self, kind: Kind) -> re.Pattern[str]:
        characters = set()
        for pattern in self.patterns:
            first = pattern.elements[0]
            if not pattern.only_first and first.matches(first.character, kind):
                characters.add(first.character)
            if pattern.eats_newlines:
                characters.add("\n")
        return re.compile(f"[{''.join(map(re.escape, sorted(characters)))}]" if characters else r"(?!)")


class Matcher:
    """How far each pattern of a set has matched; starts fresh with every state."""

    __slots__ = ("_newlines", "_patterns", "first", "lengths", "live")

    def __init__(self, patterns: PatternSet) -> None:
        self._patterns = patterns.patterns
        self.lengths = [0] * len(self._patterns)
        self._newlines = [0] * len(self._patterns)
        self.first = True
        """Whether no symbol has been seen."""
        self.live = 0
        """How many of the last symbols are part of the longest partial match."""

    def step(self, character: str, kind: Kind) -> tuple[int, int] | None:
        """Take one symbol. If a pattern completes: its index and how many symbols belong to the match."""
        live = 0
        done: tuple[int, int] | None = None
        for index, pattern in enumerate(self._patterns):
            if pattern.only_first and not self.first:
                continue
            length = self._advance(index, pattern, character, kind)
            if length == len(pattern.elements) and done is None:
                done = index, length + self._newlines[index]
            live = max(live, length + self._newlines[index])
        self.first = False
        self.live = live
        return done

    def _advance(self, index: int, pattern: Pattern, character: str, kind: Kind) -> int:
        before = length = self.lengths[index]
        elements = pattern.elements
        while length and not elements[length].matches(character, kind):
            length = pattern.links[length - 1]
        if elements[length].matches(character, kind):
            length += 1
        self.lengths[index] = length
        if pattern.eats_newlines and length != before + 1:
            self._newlines[index] = self._newlines[index] + 1 if character == "\n" and not before else 0
        return length

    def is_idle(self) -> bool:
        """Whether nothing is partly matched."""
        return not self.live
