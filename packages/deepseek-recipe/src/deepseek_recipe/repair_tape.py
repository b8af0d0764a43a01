"""Owns what the repairing parser reads from and writes to: text in which control tokens are single symbols, and parts.

The parsing itself is in `repair_parser` and `repair_calls`.
"""

import re
from dataclasses import dataclass, field

from deepseek_recipe.grammar import Action
from deepseek_recipe.inference_chunk import TokenLogprobs
from deepseek_recipe.matcher import Matcher, Pattern, PatternSet, ordinary
from deepseek_recipe.output_parser import Part
from deepseek_recipe.pieces import Kind, Piece
from deepseek_recipe.special_tokens import SpecialToken, SpecialTokens

# Lone surrogates cannot be in decoded text, so they can stand for control tokens.
DSML = "\udc00"
THINKING_END = "\udc01"


class Lexer:
    """Turns pieces into text in which a DSML marker and an end of thinking are one symbol each."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._spellings = {DSML: tokens.token(SpecialToken.Dsml), THINKING_END: tokens.token(SpecialToken.ThinkingEnd)}
        self._symbols = {spelling: symbol for symbol, spelling in self._spellings.items() if spelling}
        self._any = re.compile("|".join(map(re.escape, self._symbols)) or r"(?!)")
        self._held = ""

    def feed(self, piece: Piece) -> str:
        """The symbols of a piece; the beginning of a spelling at its end is held."""
        if piece.kind is Kind.TEXT:
            text = self._any.sub(self._symbol, self._held + piece.text)
            self._held = self._beginning(text)
            return text[: len(text) - len(self._held)]
        held, self._held = self._held, ""
        if piece.kind is Kind.CONTROL:
            return held + self._symbols.get(piece.text, piece.text)
        return held + piece.text

    def finish(self) -> str:
        """What is held at the end."""
        held, self._held = self._held, ""
        return held

    def _symbol(self, match: re.Match[str]) -> str:
        return self._symbols[match[0]]

    def _beginning(self, text: str) -> str:
        """The longest end of the text that is the beginning of a spelling."""
        longest = ""
        for spelling in self._symbols:
            for length in range(min(len(spelling) - 1, len(text)), len(longest), -1):
                if text.endswith(spelling[:length]):
                    longest = spelling[:length]
                    break
        return longest

    def spell(self, text: str) -> str:
        """Text with its symbols spelled out."""
        for symbol, spelling in self._spellings.items():
            if symbol in text:
                text = text.replace(symbol, spelling)
        return text


class StopFilter:
    """Holds text back while it may be the beginning of a stop sequence."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._patterns = PatternSet(tuple(Pattern(ordinary(stop)) for stop in stops))
        self._matcher = Matcher(self._patterns)
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that can be shown, and the stop sequence that is complete, if one is."""
        if not self._stops:
            return text, None
        text = self.held + text
        index = len(self.held)
        while index < len(text):
            if not self._matcher.live:
                danger = self._patterns.dangers[Kind.TEXT].search(text, index)
                if danger is None:
                    break
                index = danger.start()
            done = self._matcher.step(text[index], Kind.TEXT)
            index += 1
            if done is not None:
                return text[: index - done[1]], self._stops[done[0]]
        live = self._matcher.live
        self.held = text[len(text) - live :]
        return text[: len(text) - live], None

    def flush(self) -> str:
        """What is held, which turns out to be no stop sequence."""
        held, self.held = self.held, ""
        self._matcher = Matcher(self._patterns)
        return held

    def would_stop(self, newlines: str) -> bool:
        """Whether what is held and these newlines end in a stop sequence that has more than newlines."""
        text = self.held + newlines
        return any(stop.endswith("\n") and stop.strip("\n") and text.endswith(stop) for stop in self._stops)


@dataclass
class Tape:
    """The text to read, and the parts and warnings to write. Log probabilities go with the next shown text, once."""

    lexer: Lexer
    text: str = ""
    at: int = 0
    final: bool = False
    cut: bool = False
    """Whether the output was cut off, so that what is open stays open."""
    parts: list[Part] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    def load(self, text: str) -> None:
        """Append text, forgetting what has been read."""
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def rest(self) -> int:
        """How many symbols are left."""
        return len(self.text) - self.at

    def show(self, action: Action, text: str) -> None:
        """Write text of the answer or of the reasoning."""
        if text:
            logprobs, self.logprobs = self.logprobs, []
            self.parts.append(Part(action, self.lexer.spell(text), Piece("", 0, Kind.TEXT, logprobs or None)))

    def write(self, action: Action, text: str) -> None:
        """Write a bit of a call."""
        self.parts.append(Part(action, self.lexer.spell(text), Piece("", 0)))

    def warn(self, name: str, detail: str) -> None:
        """Note a repair."""
        self.warnings.append(f"{name}: {detail}")

    def may_become(self, at: int, *wanted: str) -> bool:
        """Whether the text from `at` to its end is the beginning of one of `wanted`, and more text may come."""
        if self.final:
            return False
        tail = self.text[at : at + 64]
        return at + len(tail) == len(self.text) and any(
            len(tail) < len(word) and word.startswith(tail) for word in wanted
        )
