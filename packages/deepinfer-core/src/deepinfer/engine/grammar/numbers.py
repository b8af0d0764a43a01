"""Numbers between bounds as EBNF, digit by digit, so that every number that can be written is inside them.

Numbers have at most 15 significant digits: a reader's double tells them apart from a bound that they must not meet.
"""

from dataclasses import dataclass
from decimal import Decimal

from deepinfer.engine.grammar.ebnf import EMPTY, literal, one_of, repeated

INTEGER = '"-"? ("0" | [1-9] [0-9]{0,14})'
NUMBER = INTEGER + ' ("." [0-9]{1,15})? ([eE] [+\\-]? [0-9]{1,2})?'

_LARGEST = 10**15 - 1
_DIGITS = 15
_MORE = 6


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a number, None where there is none; `_open` says that the limit itself is outside."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False

    def __bool__(self) -> bool:
        return self.low is not None or self.high is not None


def integer_between(bounds: Bounds) -> str | None:
    """All integers inside `bounds`, as far as 15 digits hold them; None when there is none."""
    low, high = -_LARGEST, _LARGEST
    if bounds.low is not None:
        low = _ceil(bounds.low) + (bounds.low_open and bounds.low % 1 == 0)
    if bounds.high is not None:
        high = -_ceil(-bounds.high) - (bounds.high_open and bounds.high % 1 == 0)
    low, high = max(low, -_LARGEST), min(high, _LARGEST)
    if low > high:
        return None
    parts = [f'"-" {_span(max(1, -high), -low)}'] if low < 0 else []
    if high >= 0:
        parts.append(_span(max(low, 0), high))
    return one_of(parts)


def number_between(bounds: Bounds) -> str | None:
    """Numbers inside `bounds` in decimal notation; None when there is none."""
    zero = Decimal(0)
    low = bounds.low if bounds.low is not None else Decimal(-_LARGEST)
    high = bounds.high if bounds.high is not None else Decimal(_LARGEST)
    parts: list[str] = []
    if low < 0:
        above = (zero, True) if high >= 0 else (-high, bounds.high_open)
        negative = _magnitudes(*above, -low, bounds.low_open)
        parts += [f'"-" {negative}'] if negative else []
    if high >= 0:
        above = (zero, False) if low < 0 else (low, bounds.low_open)
        positive = _magnitudes(*above, high, bounds.high_open)
        parts += [positive] if positive else []
    return one_of(parts) if parts else None


def _ceil(value: Decimal) -> int:
    whole = int(value)  # towards zero
    return whole + (value > whole)


def _span(low: int, high: int) -> str:
    """Integers low .. high, both at least 0."""
    parts = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        parts.append(_same_size(str(first), str(min(high, 10**size - 1))))
    return one_of(parts)


def _same_size(low: str, high: str) -> str:
    if not low:
        return EMPTY
    if low[0] == high[0]:
        return f"{literal(low[0])} {_same_size(low[1:], high[1:])}" if len(low) > 1 else literal(low)
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return _digits(low[0], high[0]) + (f" {repeated('[0-9]', rest, rest)}" if rest else "")
    parts = [
        f"{literal(low[0])} {_same_size(low[1:], '9' * rest)}",
        f"{literal(high[0])} {_same_size('0' * rest, high[1:])}",
    ]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"{_digits(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))} {repeated('[0-9]', rest, rest)}")
    return one_of(parts)


def _digits(low: str, high: str) -> str:
    return literal(low) if low == high else f"[{low}-{high}]"


def _magnitudes(low: Decimal, low_open: bool, high: Decimal, high_open: bool) -> str | None:
    """Numbers from `low` to `high`, both at least 0, without sign."""
    first, last = int(low), int(high)
    low_digits, high_digits = _fraction(low), _fraction(high)
    more = max(0, min(_MORE, _DIGITS - len(str(last)) - max(len(low_digits), len(high_digits))))
    tail = _Fractions(more)
    if first == last:
        inside = tail.between(low_digits, low_open, high_digits, high_open)
        return None if inside is None else f"{literal(str(first))} {inside}"
    parts: list[str] = []
    if (above := tail.at_least(low_digits, low_open)) is not None:
        parts.append(f"{literal(str(first))} {above}")
    if last - first > 1:
        parts.append(f"{_span(first + 1, last - 1)} {tail.any_or_none}")
    if (below := tail.at_most(high_digits, high_open)) is not None:
        parts.append(f"{literal(str(last))} {below}")
    return one_of(parts) if parts else None


def _fraction(value: Decimal) -> str:
    """Digits behind the point."""
    return format(value, "f").partition(".")[2].rstrip("0")


class _Fractions:
    """What may stand behind the whole part of a number: a point with digits, or nothing."""

    def __init__(self, more: int) -> None:
        self._more = more
        self._any = repeated("[0-9]", 0, more) if more else EMPTY
        self.any_or_none = f'("." {repeated("[0-9]", 1, more)})?' if more else EMPTY
        # Above zero: the digits end in one that is not 0.
        self._some = f"{repeated(literal('0'), 0, more - 1)} [1-9]" if more > 1 else "[1-9]" if more else None

    def at_least(self, digits: str, is_open: bool) -> str | None:
        """Fractions from `digits` on."""
        if digits:
            rising = self._rising(digits, is_open)
            return None if rising is None else f'"." {rising}'
        if not is_open:
            return self.any_or_none
        return None if self._some is None else f'"." {self._some}'

    def at_most(self, digits: str, is_open: bool) -> str | None:
        """Fractions up to `digits`."""
        if digits:
            falling = self._falling(digits, is_open)
            return EMPTY if falling is None else f'("." {falling})?'
        return None if is_open else EMPTY

    def between(self, low: str, low_open: bool, high: str, high_open: bool) -> str | None:
        """Fractions from `low` to `high`."""
        parts = [] if low or low_open or (not high and high_open) else [EMPTY]
        size = max(len(low), len(high))
        inside = self._between(low.ljust(size, "0"), low_open, high.ljust(size, "0"), high_open) if size else None
        parts += [f'"." {inside}'] if inside is not None else []
        return one_of(parts) if parts else None

    def _between(self, low: str, low_open: bool, high: str, high_open: bool) -> str | None:
        if not low:
            return None if low_open or high_open else EMPTY
        if low[0] == high[0]:
            rest = self._between(low[1:], low_open, high[1:], high_open)
            return None if rest is None else f"{literal(low[0])} {rest}"
        parts: list[str] = []
        if (above := self._rising(low[1:], low_open)) is not None:
            parts.append(f"{literal(low[0])} {above}")
        if ord(high[0]) - ord(low[0]) > 1:
            parts.append(f"{_digits(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))} {self._any}")
        if high[1:].strip("0"):
            below = self._falling(high[1:].rstrip("0"), high_open)
            parts.append(literal(high[0]) if below is None else f"{literal(high[0])} ({below})?")
        elif not high_open:
            parts.append(literal(high[0]))
        return one_of(parts) if parts else None

    def _rising(self, digits: str, is_open: bool) -> str | None:
        """Digits of a fraction that is at least 0.`digits`."""
        digits = digits.rstrip("0")
        if not digits:
            return self._some if is_open else self._any
        parts = [] if digits[0] == "9" else [f"{_digits(chr(ord(digits[0]) + 1), '9')} {self._any}"]
        if (rest := self._rising(digits[1:], is_open)) is not None:
            parts.append(f"{literal(digits[0])} {rest}")
        return one_of(parts) if parts else None

    def _falling(self, digits: str, is_open: bool) -> str | None:
        """Digits, at least one, of a fraction that is at most 0.`digits`, which does not end in 0."""
        parts = [] if digits[0] == "0" else [f"{_digits('0', chr(ord(digits[0]) - 1))} {self._any}"]
        if len(digits) > 1:
            rest = self._falling(digits[1:], is_open)
            parts.append(literal(digits[0]) if rest is None else f"{literal(digits[0])} ({rest})?")
        elif not is_open:
            parts.append(literal(digits))
        return one_of(parts) if parts else None
