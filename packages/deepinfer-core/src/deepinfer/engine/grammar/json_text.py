"""JSON texts as EBNF: white space, strings, keys, formats; what a schema asks of them is `json_schema.py`'s."""

import json
from collections.abc import Iterable

from deepinfer.engine.grammar.ebnf import Rules, character_class, complement, literal, one_of, repeated, without
from deepinfer.engine.grammar.numbers import INTEGER, NUMBER
from deepinfer.engine.grammar.regex import Ranges

# One blank, or one line break and an indentation: enough for any printer, and never endless.
WS = "ws"
_WHITESPACE = '"" | " " | "\\n" [ \\t]{0,20}'

ESCAPED: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
UNESCAPED = character_class(complement(ESCAPED))
"""A character that stands in a JSON string as itself."""

_HEX = "[0-9a-fA-F]"
_ESCAPE = f'"\\\\" ["\\\\/bfnrt] | "\\\\u" [0-9a-cA-CefEF] {_HEX} {_HEX} {_HEX} | "\\\\u" [dD] [0-7] {_HEX} {_HEX}'
CHARACTER = f"({UNESCAPED} | {_ESCAPE})"

_DAY = r"(0[1-9]|[12]\d|3[01])"
_DATE = rf"[12]\d{{3}}-((0[13578]|1[02])-{_DAY}|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+\-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-z0-9]([a-z0-9\-]{0,30}[a-z0-9])?"
_ATOM = r"[A-Za-z0-9_+\-]{1,30}"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,4}[YMWD]|T\d{1,4}[HMS])",
    "email": rf"{_ATOM}(\.{_ATOM})?@{_LABEL}(\.{_LABEL})?\.[a-z]{{2,10}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uri": rf"https?://{_LABEL}(\.{_LABEL}){{0,3}}(/[A-Za-z0-9._~\-]{{0,40}}){{0,8}}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""What each format is written as: a part of what its standard allows, all of it valid."""


def define_json(rules: Rules) -> None:
    """Define what any JSON text is made of: white space, and values without a schema."""
    rules.define(WS, _WHITESPACE)
    rules.define("string", f'"\\"" {CHARACTER}* "\\""')
    rules.define("number", NUMBER)
    rules.define("integer", INTEGER)
    rules.define("any", 'object | array | string | number | "true" | "false" | "null"')
    rules.define("member", f'string {WS} ":" {WS} any')
    rules.define("object", f'"{{" {WS} (member ({WS} "," {WS} member)*)? {WS} "}}"')
    rules.define("array", f'"[" {WS} (any ({WS} "," {WS} any)*)? {WS} "]"')


def written(value: object) -> str:
    """A value as the one JSON text that stands for it; raises ValueError for what JSON cannot hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate has no token
    return literal(text)


def json_character(ranges: Ranges) -> str:
    """A character of `ranges` inside a JSON string: as itself, or escaped when all of them must be."""
    if plain := without(ranges, ESCAPED):
        return character_class(plain)
    return one_of(literal(json.dumps(chr(code))[1:-1]) for first, last in ranges for code in range(first, last + 1))


def any_character(ranges: Ranges) -> str:
    """A character of `ranges` in plain text, NUL left out unless nothing else is meant."""
    return character_class(without(ranges, [(0, 0)]) or ranges)


def bounded(character: str, simple: str, least: int, most: int | None) -> str:
    """So many characters.

    A count over a choice of characters and escapes makes masks slow: counted ones are `simple`, those behind the last
    counted one any `character`.
    """
    if most is not None:
        return repeated(simple, least, most)
    if least <= 1:
        return " ".join([character] * least + [f"{character}*"])
    return f"{repeated(simple, least, least)} {character}*"


def other_key(rules: Rules, names: Iterable[str]) -> str:
    """A rule for any key, written without escapes, that is none of `names`."""
    taken = set(names)
    free = repeated(UNESCAPED, 0, None)
    beginnings = {name[:size] for name in taken for size in range(len(name) + 1)} or {""}
    places = {beginning: rules.name("key") for beginning in sorted(beginnings)}
    for beginning, place in places.items():
        following = sorted({name[-1] for name in beginnings if name and name[:-1] == beginning})
        others = without(complement(ESCAPED), [(ord(character), ord(character)) for character in following])
        choices = [] if beginning in taken else ['"\\""']
        choices += [
            f"{literal(character)} {places[beginning + character]}"
            for character in following
            if character >= " " and character not in '"\\'
        ]
        choices.append(f'{character_class(others)} {free} "\\""')
        rules.define(place, " | ".join(choices))
    return f'"\\"" {places[""]}'
