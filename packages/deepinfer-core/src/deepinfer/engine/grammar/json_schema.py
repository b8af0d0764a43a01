"""A JSON schema as EBNF: every text is valid, and a keyword that cannot be held to is refused by its path.

Following references, merging schemas and telling them apart is `schema_algebra.py`'s, texts of values `json_text.py`'s.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from deepinfer.engine.grammar.ebnf import EMPTY, Rules, literal, one_of, repeated
from deepinfer.engine.grammar.json_text import (
    CHARACTER,
    FORMATS,
    UNESCAPED,
    WS,
    any_character,
    bounded,
    define_json,
    json_character,
    other_key,
    written,
)
from deepinfer.engine.grammar.numbers import Bounds, integer_between, number_between
from deepinfer.engine.grammar.regex import regex_to_ebnf
from deepinfer.engine.grammar.schema_algebra import (
    BY_TYPE,
    Schema,
    Schemas,
    child,
    of_type,
    refuse,
    types_of,
)
from deepinfer.errors import RequestError

MOST_MULTIPLES = 1000
MOST_RESIDUES = 100
_SEPARATOR = f'{WS} "," {WS}'


class SchemaGrammar:
    """Writes the rules of one root schema; values without their own rule are expressions."""

    def __init__(self, root: object, rules: Rules) -> None:
        """Raises RequestError for a schema that is none."""
        self._rules = rules
        self._schemas = Schemas(root)
        self._references: dict[str, str] = {}
        if not rules.has(WS):
            define_json(rules)

    def whole(self) -> str:
        """JSON texts that are valid against the root; raises RequestError when there is none."""
        root = self._schemas.root
        if (text := self.value(root, "#")) is None or not self._schemas.ends(root):
            raise RequestError("the JSON schema allows no value that ends: nothing could be written")
        return text

    def value(self, schema: Schema, path: str) -> str | None:
        """JSON texts valid against `schema`, which stands at `path`; None when there are none."""
        if isinstance(schema, bool):
            return "any" if schema else None
        self._schemas.check(schema, path)
        if "$ref" in schema and not self._schemas.has_siblings(schema, "$ref"):
            return self._reference(schema["$ref"], path)
        branches = self._schemas.branches(schema, path)
        if len(branches) != 1 or branches[0] is not schema:
            texts = [text for branch in branches if (text := self.value(branch, path)) is not None]
            return one_of(texts) if texts else None
        if "enum" in schema or "const" in schema:
            values = self._schemas.values(schema, path)
            return one_of(map(written, values)) if values else None
        texts = [text for kind in types_of(schema, path) if (text := self._typed(kind, schema, path)) is not None]
        return one_of(texts) if texts else None

    def check(self, schema: Schema) -> None:
        """Raise RequestError for a keyword of the root that is not held to."""
        self._schemas.check(schema, "#")

    def split_strings(self, schema: Schema, path: str) -> tuple[list[str], str | None]:
        """Texts of the strings that `schema` allows, without quotes and escapes, and JSON texts of its other values."""
        strings: list[str] = []
        others: list[str] = []
        for one in self._schemas.cases(schema, path):
            if one is False:
                continue
            parts: Mapping[str, Any] = {} if one is True else one
            if {"enum", "const"} & parts.keys():
                values = self._schemas.values(parts, path)
                strings += [literal(value) for value in values if isinstance(value, str)]
                others += [written(value) for value in values if not isinstance(value, str)]
                continue
            for kind in types_of(parts, path):
                if kind == "string":
                    strings.append(self._characters(parts, path, quoted=False))
                elif (text := self._typed(kind, parts, path)) is not None:
                    others.append(text)
        return strings, one_of(others) if others else None

    def _reference(self, pointer: object, path: str) -> str | None:
        target = self._schemas.resolve(pointer, child(path, "$ref"))
        key = str(pointer)
        if key not in self._references:
            self._references[key] = self._rules.name("ref")
            text = self.value(target, key)
            self._rules.define(self._references[key], self._references[key] if text is None else text)
            if text is None:
                raise refuse(path, "$ref", f"{key} allows no value")
        return self._references[key]

    def _typed(self, kind: str, schema: Mapping[str, Any], path: str) -> str | None:
        """Values of one type."""
        asks = any(keyword in schema for keyword in BY_TYPE.get(kind, ()))
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        if not asks:
            return {"object": "object", "array": "array"}.get(kind, kind)
        if kind == "string":
            return self._rules.add("text", f'"\\"" {self._characters(schema, path, quoted=True)} "\\""')
        if kind in ("integer", "number"):
            return self._number(kind, schema, path)
        return self._object(schema, path) if kind == "object" else self._array(schema, path)

    def _characters(self, schema: Mapping[str, Any], path: str, *, quoted: bool) -> str:
        """What stands between the quotes of a string."""
        write = json_character if quoted else any_character
        given = [keyword for keyword in ("pattern", "format", "minLength", "maxLength") if keyword in schema]
        if len(given) > 1 and given[0] in ("pattern", "format"):
            raise refuse(path, given[1], f"beside {given[0]}")
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise refuse(path, "pattern", "it must be a text")
            try:
                return regex_to_ebnf(schema["pattern"], write, search=True)
            except RequestError as error:
                raise refuse(path, "pattern", str(error)) from None
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise refuse(path, "format", f"{schema['format']!r} is none of {', '.join(FORMATS)}")
            return regex_to_ebnf(FORMATS[schema["format"]], write)
        least, most = self._counts(schema, path, "minLength", "maxLength")
        plain = UNESCAPED if quoted else any_character([(0, 0x10FFFF)])
        return bounded(CHARACTER if quoted else plain, plain, least, most)

    def _number(self, kind: str, schema: Mapping[str, Any], path: str) -> str | None:
        bounds = _bounds(schema, path)
        step = schema.get("multipleOf")
        if step is not None and not (step == 1 and kind == "integer"):
            return self._multiples(step, bounds, path)
        if not bounds:
            return kind
        return integer_between(bounds) if kind == "integer" else number_between(bounds)

    def _multiples(self, step: object, bounds: Bounds, path: str) -> str | None:
        if isinstance(step, bool) or not isinstance(step, int | float) or step != int(step) or step <= 0:
            raise refuse(path, "multipleOf", "only whole numbers above 0 can be counted in")
        step = int(step)
        if bounds.low is not None and bounds.high is not None:
            first, last = -int(-bounds.low // step), int(bounds.high // step)
            if last - first >= MOST_MULTIPLES:
                raise refuse(path, "multipleOf", f"there are more than {MOST_MULTIPLES} between the bounds")
            numbers = [step * place for place in range(first, last + 1)]
            low, high = (bounds.low if bounds.low_open else None), (bounds.high if bounds.high_open else None)
            inside = [number for number in numbers if number not in (low, high)]
            return one_of(literal(str(number)) for number in inside) if inside else None
        if bounds or step > MOST_RESIDUES:
            raise refuse(path, "multipleOf", f"it needs both bounds, or a step of at most {MOST_RESIDUES} and none")
        places = [self._rules.name("multiple") for _ in range(step)]
        for rest, place in enumerate(places):
            steps = [f'"{digit}" {places[(10 * rest + digit) % step]}' for digit in range(10)]
            self._rules.define(place, " | ".join((['""'] if rest == 0 else []) + steps))
        first_digits = " | ".join(f'"{digit}" {places[digit % step]}' for digit in range(1, 10))
        return f'("0" | "-"? ({first_digits}))'

    def _array(self, schema: Mapping[str, Any], path: str) -> str | None:
        least, most = self._counts(schema, path, "minItems", "maxItems")
        if schema.get("uniqueItems") not in (None, False) and (most is None or most > 1):
            raise refuse(path, "uniqueItems", "earlier items are not remembered")
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise refuse(path, "prefixItems", "it must be a list of schemas")
        items = [self.value(one, child(path, "prefixItems", place)) for place, one in enumerate(first)]
        rest_schema = schema.get("items", not first)
        if isinstance(rest_schema, list):
            raise refuse(path, "items", "a list of schemas is written prefixItems now")
        rest = None if rest_schema is False else self.value(rest_schema, child(path, "items"))
        text = self._items(items, rest, least, most)
        return None if text is None else self._rules.add("list", f'"[" {WS} {text} {WS} "]"')

    def _items(self, first: list[str | None], rest: str | None, least: int, most: int | None) -> str | None:
        """Items one behind the other: those of `first` by their place, then any number of `rest`."""
        size = next((place for place, item in enumerate(first) if item is None), len(first))
        if size < len(first) or rest is None:
            most = size if most is None else min(most, size)
        if most is not None and least > most:
            return None
        text = EMPTY
        if rest is not None and (most is None or most > size):
            more = None if most is None else most - size
            item = f"({_SEPARATOR} {rest})"
            text = repeated(item, max(0, least - size), more)
            if size == 0:
                behind = repeated(item, max(0, least - 1), None if most is None else most - 1)
                return f"{rest} {behind}" if least else f"({rest} {behind})?"
        for place in range(min(size, size if most is None else most) - 1, -1, -1):
            own = f"{first[place]} {text}" if place == 0 else f"{_SEPARATOR} {first[place]} {text}"
            text = f"({own})" if place < least else f"({own})?"
        return text

    def _object(self, schema: Mapping[str, Any], path: str) -> str | None:
        members, extra = self._members(schema, path)
        if members is None:
            return None
        least, most = self._counts(schema, path, "minProperties", "maxProperties")
        required = sum(needed for _, needed in members)
        if extra is not None and least > required + 1:
            raise refuse(path, "minProperties", "keys that no schema names may repeat: name the properties")
        chain = _Chain(self._rules, members, extra, (least, most))
        text = chain.rest(0, 0)
        return None if text is None else self._rules.add("record", f'"{{" {WS} {text} {WS} "}}"')

    def _members(self, schema: Mapping[str, Any], path: str) -> tuple[list[tuple[str, bool]] | None, str | None]:
        """Texts of the named properties and whether each is needed, None where one cannot be; text of any other one."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not all(isinstance(name, str) for name in properties):
            raise refuse(path, "properties", "it must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise refuse(path, "required", "it must be a list of names")
        extra, extra_schema = self._extra(schema, path, properties)
        members: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *required]):
            if name in properties:
                text = self.value(properties[name], child(path, "properties", name))
            elif extra_schema is not None:
                text = self.value(extra_schema, child(path, "additionalProperties"))
            else:
                raise refuse(path, "required", f"{name!r} is none of the properties, and others are not allowed")
            if text is not None:
                members.append((f'{self._key(name, path)} {WS} ":" {WS} {text}', name in required))
            elif name in required:
                return None, None
        return members, extra

    def _key(self, name: str, path: str) -> str:
        try:
            return written(name)
        except UnicodeEncodeError:
            raise refuse(path, "properties", f"the name {name!r} is no Unicode text") from None

    def _extra(
        self, schema: Mapping[str, Any], path: str, properties: Mapping[str, Any]
    ) -> tuple[str | None, Schema | None]:
        """Text of a member that `properties` does not name, and the schema of it where `required` may name it."""
        patterns, names = schema.get("patternProperties", {}), schema.get("propertyNames", True)
        others = schema.get("additionalProperties", "properties" not in schema and not patterns)
        if patterns:
            return self._pattern_member(patterns, others, path, properties), None
        if others is False:
            return None, None
        if (value := self.value(others, child(path, "additionalProperties"))) is None:
            return None, None
        if names is not True:
            if properties or "required" in schema:
                raise refuse(path, "propertyNames", "beside properties or required")
            key = self._name(names, child(path, "propertyNames"))
        else:
            key = self._rules.add("name", other_key(self._rules, [*properties, *schema.get("required", [])]))
        return f'({key} {WS} ":" {WS} {value})', others

    def _name(self, names: Schema, path: str) -> str:
        """A key that `propertyNames` allows."""
        named = {"type": "string", **names} if isinstance(names, Mapping) else names
        if not isinstance(named, Mapping) or (text := self.value(named, path)) is None:
            raise refuse(path, "propertyNames", "it allows no name")
        return text

    def _pattern_member(self, patterns: object, others: object, path: str, properties: Mapping[str, Any]) -> str | None:
        if not isinstance(patterns, Mapping) or len(patterns) != 1:
            raise refuse(path, "patternProperties", "only one pattern can be kept apart from the others")
        if others is not False:
            raise refuse(path, "additionalProperties", "beside patternProperties it must be false")
        ((pattern, schema),) = patterns.items()
        place = child(path, "patternProperties", pattern)
        try:
            text = regex_to_ebnf(pattern, json_character, search=True)
        except RequestError as error:
            raise refuse(path, "patternProperties", str(error)) from None
        for name in properties:
            if re.search(pattern, name):
                raise refuse(path, "patternProperties", f"the property {name!r} would have two schemas")
        value = self.value(schema, place)
        return None if value is None else f'("\\"" {text} "\\"" {WS} ":" {WS} {value})'

    def _counts(self, schema: Mapping[str, Any], path: str, low: str, high: str) -> tuple[int, int | None]:
        found: list[int | None] = []
        for keyword in (low, high):
            value = schema.get(keyword)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
                raise refuse(path, keyword, "it must be a whole number from 0 on")
            found.append(None if value is None else int(value))
        least, most = found[0] or 0, found[1]
        if most is not None and least > most:
            raise refuse(path, low, f"it is more than {high}")
        return least, most


class _Chain:
    """Members of an object in their order, optional ones left out at will, then members that no schema names."""

    def __init__(
        self, rules: Rules, members: list[tuple[str, bool]], extra: str | None, counts: tuple[int, int | None]
    ) -> None:
        self._rules = rules
        self._members = members
        self._extra = extra
        self._least, self._most = counts
        self._cap = max(self._least, self._most or 0, 1)
        self._known: dict[tuple[int, int], str | None] = {}

    def rest(self, place: int, count: int) -> str | None:
        """What may follow behind `count` members, from member number `place` on; None when it cannot be valid."""
        count = min(count, self._cap)
        key = (place, count)
        if key not in self._known:
            text = self._end(count) if place == len(self._members) else self._from(place, count)
            short = text is None or len(text) < 20
            self._known[key] = text if short or text is None else self._rules.add("members", text)
        return self._known[key]

    def _from(self, place: int, count: int) -> str | None:
        text, needed = self._members[place]
        choices: list[str] = []
        if self._most is None or count < self._most:
            behind = self.rest(place + 1, count + 1)
            separator = f"{_SEPARATOR} " if count else ""
            choices += [f"{separator}{text} {behind}"] if behind is not None else []
        if not needed and (without := self.rest(place + 1, count)) is not None:
            choices.append(without)
        return one_of(choices) if choices else None

    def _end(self, count: int) -> str | None:
        need, room = max(0, self._least - count), None if self._most is None else self._most - count
        if self._extra is None or room == 0:
            return None if need else EMPTY
        more = f"({_SEPARATOR} {self._extra})"
        if count:
            return repeated(more, need, room)
        behind = repeated(more, max(0, need - 1), None if room is None else room - 1)
        return f"{self._extra} {behind}" if need else f"({self._extra} {behind})?"


def _bounds(schema: Mapping[str, Any], path: str) -> Bounds:
    """The tightest limits that the four keywords give."""
    found: dict[str, tuple[Decimal, bool] | None] = {"low": None, "high": None}
    for keyword, side in (
        ("minimum", "low"),
        ("exclusiveMinimum", "low"),
        ("maximum", "high"),
        ("exclusiveMaximum", "high"),
    ):
        value = schema.get(keyword)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not of_type(value, "number"):
            raise refuse(path, keyword, "it must be a finite number")
        limit = Decimal(repr(value))
        if len(limit.normalize().as_tuple().digits) > 15 or abs(limit) >= 10**15:
            raise refuse(path, keyword, "it has more than 15 digits")
        exponent = limit.normalize().as_tuple().exponent
        if isinstance(exponent, int) and exponent < -9:
            raise refuse(path, keyword, "it has more than 9 decimal places")
        is_open, known = keyword.startswith("exclusive"), found[side]
        tighter = known is None or (limit > known[0] if side == "low" else limit < known[0])
        if tighter or (known is not None and limit == known[0] and is_open):
            found[side] = (limit, is_open)
    low, high = found["low"] or (None, False), found["high"] or (None, False)
    if low[0] is not None and high[0] is not None and low[0] > high[0]:
        raise refuse(path, "minimum", "it is more than maximum")
    return Bounds(low[0], high[0], low[1], high[1])
