"""Owns watching text for several patterns at once, symbol by symbol, with partial matches across pieces.

Which patterns count in which state is the business of `grammar`.
"""

import re
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from deepseek_recipe.pieces import Kind


class Element(NamedTuple):
    """One character of a pattern; a special one belongs to the spelling of a control token."""

    character: str
    special: bool = False

    def matches(self, character: str, kind: Kind) -> bool:
        """Whether a character of a piece of this kind is this element."""
        return self.character == character and (kind is Kind.TEXT or (kind is Kind.CONTROL) == self.special)


def ordinary(text: str) -> tuple[Element, ...]:
    """Elements of ordinary text."""
    return _elements(text, False)


def special(text: str) -> tuple[Element, ...]:
    """Elements of a control token's spelling."""
    return _elements(text, True)


def _elements(text: str, is_special: bool) -> tuple[Element, ...]:
    element = {character: Element(character, is_special) for character in set(text)}
    return tuple(map(element.__getitem__, text))


class Pattern:
    """A text to watch for.

    `eats_newlines`: newlines directly in front belong to the match. `only_first`: matches only as the first symbol of
    the state.
    """

    def __init__(self, elements: tuple[Element, ...], *, eats_newlines: bool = False, only_first: bool = False) -> None:
        self.elements = elements
        self.eats_newlines = eats_newlines
        self.only_first = only_first

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


_LONGEST_EXACT = 64
"""Longer patterns are looked for by their first character only, so that compiled expressions stay small."""


class _Watch(NamedTuple):
    """A pattern for one kind of piece, with its characters, empty where none of the kind fits."""

    number: int
    pattern: Pattern
    characters: tuple[str, ...]
    eats_newlines: bool


def _watch(index: int, pattern: Pattern, kind: Kind) -> _Watch:
    characters = (e.character if e.matches(e.character, kind) else "" for e in pattern.elements)
    return _Watch(index, pattern, tuple(characters), pattern.eats_newlines)


class PatternSet:
    """The patterns of a state, in order, and for each kind of piece an expression that finds where one may begin."""

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self.patterns = patterns

    @cached_property
    def at_first(self) -> tuple[tuple[_Watch, ...], ...]:
        """For each kind of piece, what the first symbol of the state is compared with."""
        return tuple(tuple(_watch(*one, kind) for one in enumerate(self.patterns)) for kind in Kind)

    @cached_property
    def later(self) -> tuple[tuple[_Watch, ...], ...]:
        """For each kind of piece, what later symbols are compared with."""
        return tuple(tuple(one for one in watches if not one.pattern.only_first) for watches in self.at_first)

    @cached_property
    def dangers(self) -> tuple[re.Pattern[str], ...]:
        """Finds, in text that follows no partial match, the first place where a match is complete or may go on in the
        next piece. Text without such a place goes straight through.
        """
        return tuple(self._danger(kind) for kind in Kind)

    @cached_property
    def searches(self) -> tuple[Callable[[str], object], Callable[[str], object]]:
        """The searches of `dangers` in text and in runs of ordinary tokens."""
        return self.dangers[Kind.TEXT].search, self.dangers[Kind.RUN].search

    def _danger(self, kind: Kind) -> re.Pattern[str]:
        starts = []
        for pattern in self.patterns:
            if pattern.only_first:
                continue
            expression = _expression(pattern, kind)
            if pattern.eats_newlines:
                # Only the first of a row of newlines is tried, or a long row would be scanned again and again.
                starts.append(rf"\n(?<!\n\n)\n*+(?:\Z{'|' + expression if expression else ''})")
            if expression:
                starts.append(expression)
        return re.compile("|".join(starts) if starts else r"(?!)")


def _expression(pattern: Pattern, kind: Kind) -> str:
    """Matches the whole pattern, or a beginning of it at the end of the text; empty if it cannot begin in this kind.

    For patterns that eat newlines, also a beginning in front of a newline, which then does not count.
    """
    if len(pattern.elements) > _LONGEST_EXACT:
        return re.escape(pattern.elements[0].character)
    stop = r"\Z|\n" if pattern.eats_newlines else r"\Z"
    expression = ""
    for index in range(len(pattern.elements) - 1, -1, -1):
        element = pattern.elements[index]
        if not element.matches(element.character, kind):
            expression = f"(?:{stop})"
            continue
        rest = expression if not expression or expression == f"(?:{stop})" else f"(?:{stop}|{expression})"
        expression = re.escape(element.character) + rest
    return "" if expression == f"(?:{stop})" else expression


class Matcher:
    """How far each pattern of a set has matched; starts fresh with every state."""

    __slots__ = ("_lengths", "_newlines", "_set", "first", "live")

    def __init__(self, patterns: PatternSet) -> None:
        self._set = patterns
        self._lengths = [0] * len(patterns.patterns)
        self._newlines = [0] * len(patterns.patterns)
        self.first = True
        """Whether no symbol has been seen."""
        self.live = 0
        """How many of the last symbols are part of the longest partial match."""

    def step(self, character: str, kind: Kind) -> tuple[int, int] | None:
        """Take one symbol. If a pattern completes: its index and how many symbols belong to the match."""
        live = 0
        done: tuple[int, int] | None = None
        lengths, newlines = self._lengths, self._newlines
        watches = self._set.at_first if self.first else self._set.later
        for index, pattern, characters, eats_newlines in watches[kind]:
            before = length = lengths[index]
            while length and characters[length] != character:
                length = pattern.links[length - 1]
            if characters[length] == character:
                length += 1
            lengths[index] = length
            span = length
            if eats_newlines:
                if length != before + 1:
                    newlines[index] = newlines[index] + 1 if character == "\n" and not before else 0
                span += newlines[index]
            if span > live:
                live = span
            if length == len(characters) and done is None:
                done = index, span
        self.first = False
        self.live = live
        return done
