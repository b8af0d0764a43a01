"""Owns the syntax of URI references (RFC 3986) as far as JSON schemas need it.

Resolving references is in `schema_check`.
"""

import re
from typing import Final

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/")
_HEX: Final = frozenset("0123456789abcdefABCDEF")


def uri_error(text: str) -> str | None:
    """What is wrong with a URI reference, with the byte index where it shows; None if nothing is."""
    scheme = _SCHEME.match(text)
    start = scheme.end() if scheme else 0
    if not scheme:
        colon = re.match(r"[^/?#:]*:", text)
        if colon and _first_bad(text[: colon.end() - 1], 0) is None:
            return f"unexpected character at index {colon.end() - 1}"
    return _first_bad(text, start)


def _first_bad(text: str, start: int) -> str | None:
    brackets = range(0)
    authority = re.match(r"//[^/?#]*", text[start:])
    if authority:
        brackets = range(start, start + authority.end())
    part = "path"
    index = start
    while index < len(text):
        character = text[index]
        if character == "%":
            if not (len(text) > index + 2 and text[index + 1] in _HEX and text[index + 2] in _HEX):
                return f"invalid percent-encoded octet at index {_bytes(text, index)}"
            index += 3
            continue
        if character == "#" and part != "fragment":
            part = "fragment"
        elif character == "?":
            part = "query" if part == "path" else part
        elif character not in _CHARACTERS and not (character in "[]" and index in brackets):
            return f"unexpected character at index {_bytes(text, index)}"
        index += 1
    return None


def _bytes(text: str, index: int) -> int:
    return len(text[:index].encode())


def is_uri_reference(text: str) -> bool:
    """Whether the text is a URI or a relative reference."""
    return uri_error(text) is None


def is_uri(text: str) -> bool:
    """Whether the text is a URI with a scheme."""
    return _SCHEME.match(text) is not None and uri_error(text) is None
