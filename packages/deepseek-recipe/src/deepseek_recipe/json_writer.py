"""Owns spelling JSON and numbers exactly as prompts, events and error texts need them.

Reading JSON is in `json_reader`.
"""

import json
import math
import re
import struct
import unicodedata
from functools import lru_cache

from deepseek_recipe.json_reader import Json

_encode_spaced = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": ")).encode
_encode_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
quote = json.encoder.encode_basestring
"""A str as a JSON string with its quotes: short escapes, `\\u00xx` for other controls, all else raw."""

_EXPONENT = re.compile(r"[0-9]e[-+][0-9]")
_STRING_OR_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.]*e[-+][0-9]+')


def spaced_json(value: Json, *, python_floats: bool) -> str:
    """JSON with `, ` and `: `, keys in order, non-ASCII raw; floats as Python prints them or as `float_text`."""
    if type(value) is int:
        return str(value)
    text = _encode_spaced(value)
    return text if python_floats else _respell_floats(text)


def compact_json(value: Json) -> str:
    """JSON without blanks, keys in order, non-ASCII raw, floats as `float_text`."""
    return _respell_floats(_encode_compact(value))


def _respell_floats(text: str) -> str:
    if not _EXPONENT.search(text):
        return text
    return _STRING_OR_EXPONENT.sub(lambda m: m[0] if m[0][0] == '"' else float_text(float(m[0])), text)


def float_text(number: float) -> str:
    """Shortest digits that read back as `number`: plain for 1e-5 <= |x| < 1e16, else `1.5e-7`, `1e+16`."""
    return _with_exponent(repr(number), smallest=-5)


def _with_exponent(text: str, smallest: int) -> str:
    """Respell a Python float: exponents unpadded, and plain down to 10 ** smallest."""
    mantissa, letter, exponent = text.partition("e")
    if not letter:
        return text
    power = int(exponent)
    if smallest <= power < 0:
        return _plain(mantissa, power)
    return f"{mantissa}e{power:+d}" if power >= 0 else f"{mantissa}e{power}"


def to_f32(number: float) -> float:
    """Round to the nearest 32-bit float; beyond its range, infinity."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def f32_text(number: float) -> str:
    """Shortest digits that read back as the 32-bit float nearest to `number`; `null` for infinities and NaN.

    Plain for 1e-6 <= |x| < 1e13, always with `.0` or an exponent.
    """
    # Zeros are equal, so the cache cannot tell -0.0 from 0.0.
    return f"{number:.1f}" if number == 0 else _f32_text(number)


@lru_cache(maxsize=65536)
def _f32_text(number: float) -> str:
    single = to_f32(number)
    if not math.isfinite(single):
        return "null"
    spelled = (f"{single:.{precision}e}" for precision in range(9))
    text = next(digits for digits in spelled if to_f32(float(digits)) == single)
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if -6 <= power < 13:
        return _plain(mantissa, power)
    return f"{mantissa}e{power:+d}" if power >= 0 else f"{mantissa}e{power}"


def _plain(mantissa: str, power: int) -> str:
    sign = "-" if mantissa[0] == "-" else ""
    digits = mantissa.lstrip("-").replace(".", "")
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    whole, rest = digits[: power + 1].ljust(power + 1, "0"), digits[power + 1 :]
    return f"{sign}{whole}.{rest or '0'}"


def debug_string(text: str) -> str:
    r"""A str as Rust's `{:?}` prints it: quoted, with `\u{..}` for characters that do not print."""
    return '"' + "".join(_debug_character(c) for c in text) + '"'


_DEBUG_ESCAPES = {"\t": "\\t", "\r": "\\r", "\n": "\\n", '"': '\\"', "\\": "\\\\", "\0": "\\0"}


def _debug_character(character: str) -> str:
    if character in _DEBUG_ESCAPES:
        return _DEBUG_ESCAPES[character]
    if character == " " or (character.isprintable() and unicodedata.category(character) not in ("Mn", "Me")):
        return character
    return f"\\u{{{ord(character):x}}}"
