"""The EBNF that grammars are written in: literals, character classes, and a collection of named rules.

What the rules say is decided by the modules beside this one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer.errors import RequestError

LARGEST = 1 << 20
"""Characters of a whole grammar: more takes seconds to compile."""

LAST = 0x10FFFF
EMPTY = '""'


@dataclass(slots=True)
class Rules:
    """Named rules; `root` is where a text begins."""

    _texts: dict[str, str] = field(default_factory=dict)
    _size: int = 0

    def name(self, hint: str) -> str:
        """Return a new name for a rule that will be defined."""
        name = f"{hint}_{len(self._texts)}"
        self._texts[name] = ""
        return name

    def define(self, name: str, text: str) -> str:
        """Set what a rule says and return its name; raises RequestError when the grammar grows too large."""
        self._texts[name] = text
        self._size += len(name) + len(text)
        if self._size > LARGEST:
            raise RequestError(f"the constraint makes a grammar of more than {LARGEST} characters: simplify it")
        return name

    def add(self, hint: str, text: str) -> str:
        """Define a new rule and return its name."""
        return self.define(self.name(hint), text)

    def has(self, name: str) -> bool:
        """Whether there is such a rule."""
        return name in self._texts

    def text(self, root: str) -> str:
        """Return the grammar of texts that the expression `root` matches."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {text}" for name, text in self._texts.items())])


def literal(text: str) -> str:
    """Exactly this text."""
    return '"' + "".join(_spelled(ord(character), '"\\') for character in text) + '"'


def character_class(ranges: Iterable[tuple[int, int]]) -> str:
    """One character of any of these ranges of code points, ends included."""
    spelled = (
        _spelled(first, "]\\^-") + ("" if first == last else "-" + _spelled(last, "]\\^-")) for first, last in ranges
    )
    return "[" + "".join(spelled) + "]"


def one_of(choices: Iterable[str]) -> str:
    """Any of these expressions."""
    distinct = list(dict.fromkeys(choices))
    return distinct[0] if len(distinct) == 1 else "(" + " | ".join(distinct) + ")"


def repeated(item: str, least: int, most: int | None) -> str:
    """`item`, an expression that may be followed by an operator, so many times; `most` None = any number."""
    if most is None:
        return f"{item}*" if least == 0 else f"{item}{{{least},}}"
    if (least, most) in {(1, 1), (0, 0)}:
        return item if most else EMPTY
    return f"{item}{{{least},{most}}}"


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same characters as ranges in order that neither meet nor overlap, without surrogates."""
    result: list[tuple[int, int]] = []
    for first, last in sorted(_without_surrogates(ranges)):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return result


def complement(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """All other characters."""
    result, start = [], 0
    for first, last in merged(ranges):
        result.append((start, first - 1))
        start = last + 1
    result.append((start, LAST))
    return merged((first, last) for first, last in result if first <= last)


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters of `ranges` that are not in `others`."""
    return complement([*complement(ranges), *others])


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for first, last in ranges:
        if first < 0xD800:
            yield first, min(last, 0xD7FF)
        if last > 0xDFFF:
            yield max(first, 0xE000), last


def _spelled(code: int, special: str) -> str:
    character = chr(code)
    if character in special:
        return "\\" + character
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
