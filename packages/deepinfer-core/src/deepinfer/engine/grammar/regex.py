"""Regular expressions as EBNF: the part of the language that a grammar can hold, everything else refused by its place.

What a match is written as (plain text, or inside a JSON string) is an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.engine.grammar.ebnf import EMPTY, LAST, character_class, complement, merged, one_of, repeated
from deepinfer.errors import RequestError

Ranges = list[tuple[int, int]]

LONGEST = 4096
"""Characters of an expression."""
DEEPEST = 50
MOST_REPEATS = 100_000

_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20)]
_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
# What \D, \W and \S mean beyond ASCII differs from one language to the next: only what all agree on is written.
_ASCII: Ranges = [(0x00, 0x7F)]
_CLASSES: dict[str, Ranges] = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    "D": merged([(0x00, 0x2F), (0x3A, 0x7F)]),
    "W": [(0x00, 0x2F), (0x3A, 0x40), (0x5B, 0x5E), (0x60, 0x60), (0x7B, 0x7F)],
    "S": [(0x00, 0x08), (0x0E, 0x1B), (0x21, 0x7F)],
}
_CONTROLS = {"n": 0x0A, "t": 0x09, "r": 0x0D, "f": 0x0C, "v": 0x0B, "0": 0x00}
_PUNCTUATION = set("^$\\.*+?()[]{}|/-\"'#&~`!@%=<>,:;_ ")

Writer = Callable[[Ranges], str]
"""Writes one character of some ranges as EBNF: an expression that may be followed by an operator."""


def plain(ranges: Ranges) -> str:
    """A character as itself."""
    return character_class(ranges)


def regex_to_ebnf(pattern: str, write: Writer = plain, *, search: bool = False) -> str:
    """Return EBNF for the texts that `pattern` matches as a whole; raises RequestError naming what it cannot hold.

    write   how one character is written
    search  one match anywhere in the text is enough, as JSON Schema has it: behind a pattern with ^ and without $
            any text may follow; without ^ the match is all that is written
    """
    if len(pattern) > LONGEST:
        raise RequestError(f"the regular expression has {len(pattern)} characters, at most {LONGEST} are taken")
    return _Parser(pattern, write, search=search).whole()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a pattern as EBNF; `atom` says that an operator may follow it."""

    text: str
    atom: bool


class _Parser:
    def __init__(self, pattern: str, write: Writer, *, search: bool) -> None:
        self._pattern = pattern
        self._write = write
        self._search = search
        self._at = 0
        self._depth = 0

    def whole(self) -> str:
        """Alternatives at the top, each with its own anchors."""
        branches = [self._branch()]
        while self._take("|"):
            branches.append(self._branch())
        if self._at < len(self._pattern):
            raise self._error("a ')' without its '('")
        return one_of(branches)

    def _branch(self) -> str:
        """One alternative of the top: ^ at its beginning and $ at its end are where a match may be anchored."""
        from_start = self._take("^")
        body = self._sequence().text
        to_end = self._take("$")
        if self._peek() not in ("", "|", ")"):
            raise self._error("'$' before the end")
        if self._search and from_start and not to_end:
            return f"({body} {repeated(self._write(complement([])), 0, None)})"
        return f"({body})"

    def _alternatives(self) -> _Piece:
        branches = [self._sequence().text]
        while self._take("|"):
            branches.append(self._sequence().text)
        return _Piece("(" + " | ".join(f"({branch})" for branch in branches) + ")", atom=True)

    def _sequence(self) -> _Piece:
        pieces: list[str] = []
        while self._peek() not in ("", "|", ")", "$"):
            pieces.append(self._quantified())
        return _Piece(" ".join(pieces) or EMPTY, atom=False)

    def _quantified(self) -> str:
        piece = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return piece
        if self._take("?"):
            pass  # a lazy quantifier matches the same texts
        elif self._peek() == "+":
            raise self._error("a possessive quantifier")
        if self._peek() in ("*", "?", "{") and self._bounds() is not None:
            raise self._error("a quantifier behind a quantifier")
        return repeated(piece, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if (sign := self._peek()) in simple:
            self._at += 1
            return simple[sign]
        end = self._pattern.find("}", self._at)
        if sign != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._at + 1 : end].partition(",")
        if not low.isdecimal() or not (high == "" or high.isdecimal()):
            raise self._error("'{' that is no count: write \\{")
        self._at = end + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if max(least, most or 0) > MOST_REPEATS or (most is not None and most < least):
            raise self._error(f"a count that is not 0 to {MOST_REPEATS} in order")
        return least, most

    def _atom(self) -> str:
        character = self._peek()
        if character == "(":
            return self._group()
        if character == "[":
            return self._one(self._set())
        self._at += 1
        if character == ".":
            return self._one(complement(_LINE_ENDS))
        if character == "\\":
            return self._one(self._escape(inside=False))
        if character in "*+?{^":
            self._at -= 1
            raise self._error("'^' behind the beginning" if character == "^" else f"{character!r} with nothing before")
        return self._one([(ord(character), ord(character))])

    def _one(self, ranges: Ranges) -> str:
        if not (cleaned := merged(ranges)):
            raise self._error("a class without characters")
        return self._write(cleaned)

    def _group(self) -> str:
        self._at += 1
        if self._take("?"):
            self._group_kind()
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error(f"more than {DEEPEST} groups in one another")
        piece = self._alternatives()
        self._depth -= 1
        if not self._take(")"):
            raise self._error("'$' in a group" if self._peek() == "$" else "a '(' without its ')'")
        return piece.text

    def _group_kind(self) -> None:
        """Pass what stands behind `(?`: a plain group or a named one."""
        if self._take(":"):
            return
        self._take("P")
        if self._take("<") and self._peek() not in ("=", "!", ""):
            end = self._pattern.find(">", self._at)
            if end > 0 and self._pattern[self._at : end].isidentifier():
                self._at = end + 1
                return
        raise self._error("look-around, flags or another special group")

    def _set(self) -> Ranges:
        self._at += 1
        negated = self._take("^")
        ranges: Ranges = []
        while self._peek() != "]":
            if not self._peek():
                raise self._error("a '[' without its ']'")
            ranges += self._set_item()
        self._at += 1
        return complement(ranges) if negated else ranges

    def _set_item(self) -> Ranges:
        first = self._set_character()
        following = self._pattern[self._at : self._at + 2]
        if not following.startswith("-") or following in ("-]", "-"):
            return first
        self._at += 1
        last = self._set_character()
        if len(first) != 1 or len(last) != 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1]:
            raise self._error("a range whose ends are no characters")
        if last[0][0] < first[0][0]:
            raise self._error("a range that runs backwards")
        return [(first[0][0], last[0][0])]

    def _set_character(self) -> Ranges:
        character = self._peek()
        if character == "[" and self._pattern[self._at + 1 : self._at + 2] in (":", "=", "."):
            raise self._error("a POSIX class")
        self._at += 1
        return self._escape(inside=True) if character == "\\" else [(ord(character), ord(character))]

    def _escape(self, *, inside: bool) -> Ranges:
        character = self._peek()
        if not character:
            raise self._error("a '\\' at the end")
        self._at += 1
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROLS and not self._pattern[self._at : self._at + 1].isdecimal():
            code = _CONTROLS[character]
        elif character in "xu":
            code = self._hexadecimal(2 if character == "x" else 4)
        elif character == "b" and inside:
            code = 0x08
        elif character in _PUNCTUATION:
            code = ord(character)
        else:
            self._at -= 2
            raise self._error(f"\\{character}")
        return [(code, code)]

    def _hexadecimal(self, digits: int) -> int:
        if digits == 4 and self._peek() == "{":
            end = self._pattern.find("}", self._at)
            text, after = self._pattern[self._at + 1 : max(end, 0)], end + 1
        else:
            text, after = self._pattern[self._at : self._at + digits], self._at + digits
        try:
            code = int(text, 16)
        except ValueError:
            raise self._error("an escape without its digits") from None
        if code > LAST or 0xD800 <= code <= 0xDFFF or (after - self._at == digits and len(text) < digits):
            raise self._error("an escape that is no character")
        self._at = after
        return code

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _error(self, what: str) -> RequestError:
        return RequestError(
            f"the regular expression {self._pattern!r} has at position {self._at} {what}, which cannot be enforced: "
            "write it with characters, classes, groups, | and counts"
        )
