"""Owns reading JSON text exactly as the API does: RFC 8259, bounded depth, and serde's wording and position of errors.

What a value must look like is checked in `shapes`; writing JSON is in `json_writer`.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

type Json = Any
"""A JSON value: None, bool, int, float, str, list of Json or dict of str to Json."""

MAX_DEPTH = 127
"""How many containers may be nested in JSON text, the outermost included."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_INT_MIN, _INT_END = -(1 << 63), 1 << 64


class JsonSyntaxError(ValueError):
    """The text is not JSON; the message ends in the line and the column of the first offending byte."""


def parse_json(text: str | bytes) -> Json:
    """Parse one JSON text.

    A repeated key keeps its first place and its last value. Integers in [-2^63, 2^64) stay integers, others and `-0`
    become floats.

    Raises:
        JsonSyntaxError: for text that is not JSON, numbers that overflow and more than 127 nested containers.
        UnicodeEncodeError: for a str with a lone surrogate.
    """
    value = _parse_fast(text)
    if value is not _UNSURE:
        return value
    return _Reader(text.encode() if isinstance(text, str) else text).document()


def parse_object(text: str) -> dict[str, Json] | None:
    """Return the object that `text` spells, or None if it is not JSON or not an object."""
    try:
        value = parse_json(text)
    except (JsonSyntaxError, UnicodeEncodeError):
        return None
    return value if isinstance(value, dict) else None


class _Unsure(Exception):
    pass


_UNSURE = object()


def _integer(digits: str) -> int | float:
    if len(digits) < 19:
        return int(digits) if digits != "-0" else -0.0
    number = float(digits)
    if math.isinf(number):
        raise _Unsure
    exact = int(digits) if len(digits) < 22 else None
    return exact if exact is not None and _INT_MIN <= exact < _INT_END else number


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _Unsure
    return number


def _constant(name: str) -> float:
    raise _Unsure


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_constant)


def _parse_fast(text: str | bytes) -> Json:
    """Parse with the standard library; _UNSURE where only the exact reader can say what is wrong."""
    try:
        source = text if isinstance(text, str) else text.decode()
        if _SURROGATE_ESCAPE.search(source) or not _fits_utf8(source):
            return _UNSURE
        value = _DECODER.decode(source)
    except (ValueError, RecursionError, _Unsure):
        return _UNSURE
    return value if _depth_at_most(value, MAX_DEPTH) else _UNSURE


def _fits_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _depth_at_most(value: Json, limit: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    while level and limit:
        limit -= 1
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) is dict or type(child) is list
        ]
    return not level


_BLANKS = re.compile(rb"[ \t\n\r]*")
_PLAIN_RUN = re.compile(rb'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(rb"[0-9]*")
_HEX4 = re.compile(rb"[0-9a-fA-F]{4}")
_ESCAPES = {
    b'"'[0]: '"',
    b"\\"[0]: "\\",
    b"/"[0]: "/",
    b"b"[0]: "\b",
    b"f"[0]: "\f",
    b"n"[0]: "\n",
    b"r"[0]: "\r",
    b"t"[0]: "\t",
}
_LITERALS: Mapping[int, tuple[bytes, Json]] = {
    ord("n"): (b"null", None),
    ord("t"): (b"true", True),
    ord("f"): (b"false", False),
}


class _Reader:
    """A byte-wise reader that stops where serde_json stops; slow, so used only when something is wrong."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.index = 0
        self.depth = 0

    def document(self) -> Json:
        value = self.value()
        self.skip_blanks()
        if self.index < len(self.data):
            raise self.peek_error("trailing characters")
        return value

    def error(self, message: str, at: int | None = None) -> JsonSyntaxError:
        """An error after the last byte read, or after byte `at`."""
        read = self.data[: self.index if at is None else at]
        start = read.rfind(b"\n") + 1
        line = 1 + read.count(b"\n")
        return JsonSyntaxError(f"{message} at line {line} column {len(read) - start}")

    def peek_error(self, message: str) -> JsonSyntaxError:
        """An error that counts the byte ahead as read."""
        return self.error(message, min(len(self.data), self.index + 1))

    def skip_blanks(self) -> int:
        """Skip blanks; return the byte ahead, or -1 at the end."""
        match = _BLANKS.match(self.data, self.index)
        self.index = match.end() if match else self.index
        return self.peek()

    def peek(self) -> int:
        return self.data[self.index] if self.index < len(self.data) else -1

    def value(self) -> Json:
        ahead = self.skip_blanks()
        if ahead == -1:
            raise self.peek_error("EOF while parsing a value")
        if ahead in _LITERALS:
            return self.literal(*_LITERALS[ahead])
        if ahead == ord("-") or ord("0") <= ahead <= ord("9"):
            return self.number()
        if ahead == ord('"'):
            self.index += 1
            return self.string()
        if ahead not in (ord("["), ord("{")):
            raise self.peek_error("expected value")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.peek_error("recursion limit exceeded")
        self.index += 1
        container = self.array() if ahead == ord("[") else self.object()
        self.depth -= 1
        return container

    def literal(self, word: bytes, value: Json) -> Json:
        for expected in word:
            byte = self.peek()
            if byte == -1:
                raise self.error("EOF while parsing a value")
            self.index += 1
            if byte != expected:
                raise self.error("expected ident")
        return value

    def digits(self) -> int:
        """Read digits; return how many."""
        match = _DIGITS.match(self.data, self.index)
        start, self.index = self.index, match.end() if match else self.index
        return self.index - start

    def number(self) -> int | float:
        start = self.index
        if self.peek() == ord("-"):
            self.index += 1
        self.whole_part()
        is_float = self.peek() in (ord("."), ord("e"), ord("E"))
        if self.peek() == ord("."):
            self.index += 1
            if not self.digits():
                raise self.peek_error("EOF while parsing a value" if self.peek() == -1 else "invalid number")
        if self.peek() in (ord("e"), ord("E")):
            self.exponent(start)
        text = self.data[start : self.index].decode()
        try:
            return _float(text) if is_float else _integer(text)
        except _Unsure:
            raise self.error("number out of range") from None

    def whole_part(self) -> None:
        first = self.peek()
        if first == -1:
            raise self.error("EOF while parsing a value")
        if first == ord("0"):
            self.index += 1
            if ord("0") <= self.peek() <= ord("9"):
                raise self.peek_error("invalid number")
        elif not self.digits():
            self.index += 1
            raise self.error("invalid number")

    def exponent(self, start: int) -> None:
        self.index += 1
        negative = self.peek() == ord("-")
        if self.peek() in (ord("+"), ord("-")):
            self.index += 1
        first = self.index
        if self.peek() == -1:
            raise self.error("EOF while parsing a value")
        if not self.digits():
            self.index += 1
            raise self.error("invalid number")
        exponent = 0
        for at in range(first, self.index):
            exponent = exponent * 10 + self.data[at] - ord("0")
            if exponent > 0x7FFFFFFF:
                if not negative and self.data[start : first - 1].strip(b"-0.eE+"):
                    raise self.error("number out of range", at + 1)
                return

    def string(self) -> str:
        pieces: list[bytes] = []
        while True:
            match = _PLAIN_RUN.match(self.data, self.index)
            end = match.end() if match else self.index
            pieces.append(self.data[self.index : end])
            self.index = end
            byte = self.peek()
            if byte == -1:
                raise self.error("EOF while parsing a string")
            self.index += 1
            if byte == ord('"'):
                break
            if byte != ord("\\"):
                raise self.error("control character (\\u0000-\\u001F) found while parsing a string")
            pieces.append(self.escape().encode())
        try:
            return b"".join(pieces).decode()
        except UnicodeDecodeError:
            raise self.error("invalid unicode code point") from None

    def escape(self) -> str:
        byte = self.peek()
        if byte == -1:
            raise self.error("EOF while parsing a string")
        self.index += 1
        if byte in _ESCAPES:
            return _ESCAPES[byte]
        if byte != ord("u"):
            raise self.error("invalid escape")
        first = self.hex4()
        if 0xDC00 <= first <= 0xDFFF:
            raise self.error("lone leading surrogate in hex escape")
        if not 0xD800 <= first <= 0xDBFF:
            return chr(first)
        for expected in b"\\u":
            byte = self.peek()
            if byte == -1:
                raise self.error("EOF while parsing a string")
            self.index += 1
            if byte != expected:
                raise self.error("unexpected end of hex escape")
        second = self.hex4()
        if not 0xDC00 <= second <= 0xDFFF:
            raise self.error("lone leading surrogate in hex escape")
        return chr(0x10000 + ((first - 0xD800) << 10 | (second - 0xDC00)))

    def hex4(self) -> int:
        if self.index + 4 > len(self.data):
            self.index = len(self.data)
            raise self.error("EOF while parsing a string")
        digits = self.data[self.index : self.index + 4]
        self.index += 4
        if not _HEX4.fullmatch(digits):
            raise self.error("invalid escape")
        return int(digits, 16)

    def array(self) -> list[Json]:
        items: list[Json] = []
        while True:
            ahead = self.skip_blanks()
            if ahead == -1:
                raise self.peek_error("EOF while parsing a list")
            if ahead == ord("]"):
                self.index += 1
                return items
            if items:
                if ahead != ord(","):
                    raise self.peek_error("expected `,` or `]`")
                self.index += 1
                if self.skip_blanks() == ord("]"):
                    raise self.peek_error("trailing comma")
            items.append(self.value())

    def object(self) -> dict[str, Json]:
        members: dict[str, Json] = {}
        while True:
            ahead = self.skip_blanks()
            if ahead == -1:
                raise self.peek_error("EOF while parsing an object")
            if ahead == ord("}"):
                self.index += 1
                return members
            if members:
                ahead = self.next_key(ahead)
            if ahead != ord('"'):
                raise self.peek_error("key must be a string")
            self.index += 1
            key = self.string()
            colon = self.skip_blanks()
            if colon != ord(":"):
                raise self.peek_error("EOF while parsing an object" if colon == -1 else "expected `:`")
            self.index += 1
            members[key] = self.value()

    def next_key(self, ahead: int) -> int:
        """Read the comma between members; return the byte ahead of the next key."""
        if ahead != ord(","):
            raise self.peek_error("expected `,` or `}`")
        self.index += 1
        ahead = self.skip_blanks()
        if ahead == -1:
            raise self.peek_error("EOF while parsing a value")
        if ahead == ord("}"):
            raise self.peek_error("trailing comma")
        return ahead
