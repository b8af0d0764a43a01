"""Owns taking the free text of a custom tool call out of the JSON arguments in which the model writes it.

Where the text goes is the business of `generator_responses`.
"""

import re
from typing import Final

_HEAD: Final = '{"input":"'
_SKIPS: Final = frozenset((1, 8, 9))
"""The positions in the head where JSON blanks may stand."""
_BLANKS: Final = " \t\r\n"
_SHORT: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PLAIN: Final = re.compile(r'[^"\\]+')
_HEX: Final = re.compile(r"[0-9a-fA-F]{4}")


class PatchInput:
    """Decodes `{"input":"..."}` as it arrives; text that cannot be that is passed on as it is."""

    def __init__(self) -> None:
        self._state = "head"
        self._position = 0
        self._held = ""
        self._surrogate = ""

    def feed(self, text: str) -> str:
        """The next bit of arguments; returns the next bit of input."""
        if self._state == "head":
            return self._head(text)
        if self._state == "raw":
            return text
        return self._decode(text) if self._state == "string" else ""

    def _head(self, text: str) -> str:
        for index, character in enumerate(text):
            if character == _HEAD[self._position]:
                self._position += 1
            elif not (self._position in _SKIPS and character in _BLANKS):
                self._state = "raw"
                held, self._held = self._held, ""
                return held + text
            if self._position == len(_HEAD):
                self._state = "string"
                self._held = ""
                return self._decode(text[index + 1 :])
        self._held += text
        return ""

    def _decode(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        out: list[str] = []
        index = 0
        while index < len(text):
            plain = _PLAIN.match(text, index)
            if plain:
                out.append(self._flush_surrogate() + plain[0])
                index = plain.end()
                continue
            if text[index] == '"':
                self._state = "done"
                break
            length = self._escape(text, index, out)
            if not length:
                self._held = text[index:]
                return "".join(out)
            index += length
        if self._state == "done":
            out.append(self._flush_surrogate())
        return "".join(out)

    def _escape(self, text: str, index: int, out: list[str]) -> int:
        """Decode one escape; return its length, 0 if it is not complete."""
        letter = text[index + 1 : index + 2]
        if not letter:
            return 0
        if letter != "u":
            out.append(self._flush_surrogate() + _SHORT.get(letter, "\\" + letter))
            return 2
        digits = text[index + 2 : index + 6]
        if len(digits) < 4 and all(c in "0123456789abcdefABCDEF" for c in digits):
            return 0
        if not _HEX.fullmatch(digits):
            out.append(self._flush_surrogate() + "\\u")
            return 2
        code = int(digits, 16)
        if self._surrogate and 0xDC00 <= code <= 0xDFFF:
            high = int(self._surrogate.removeprefix("\\u"), 16)
            self._surrogate = ""
            out.append(chr(0x10000 + ((high - 0xD800) << 10 | (code - 0xDC00))))
            return 6
        out.append(self._flush_surrogate())
        if 0xD800 <= code <= 0xDBFF:
            self._surrogate = text[index : index + 6]
        else:
            out.append(f"\\u{digits}" if 0xDC00 <= code <= 0xDFFF else chr(code))
        return 6

    def _flush_surrogate(self) -> str:
        """A high surrogate that has no partner, as it was written."""
        lone, self._surrogate = self._surrogate, ""
        return lone

    def finish(self) -> str:
        """What is still held."""
        held = self._flush_surrogate() + self._held
        self._held = ""
        return held if self._state in ("head", "string") else ""
