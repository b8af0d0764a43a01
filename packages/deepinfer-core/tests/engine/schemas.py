"""JSON schemas of many kinds, drawn from a seed: what a request may ask, small enough that a random model ends them."""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = [
    "id",
    "name",
    "naïve",
    "日本",
    "a b",
    'quo"te',
    "back\\slash",
    "x-y",
    "tags",
    "größe",
    "n",
    "value",
    "😀",
    "t\tab",
]
WORDS = ["red", "grün", "blue\nish", "", "日本語", 'say "hi"', "a\\b", "😀"]
PATTERNS = [
    r"^[A-Z]{3}-\d{2,4}$",
    r"^(ab|c){1,3}$",
    r"^[a-z]+(_[a-z]+)?$",
    r"^#[0-9a-f]{6}$",
    r"^\w{2}\.?$",
    r"^[é-ü]{1,3}日$",
]
FORMATS = ["date", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration"]


class SchemaMaker:
    """Makes schemas; `kinds` in turn, so that every kind comes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self, depth: int = 2) -> Schema:
        """Any schema whose values are nested at most `depth` levels."""
        flat = [self.string, self.integer, self.number, self.enumeration, self.simple]
        deep = [self.object, self.object, self.array, self.pair, self.union, self.merged, self.mapping]
        return self._random.choice(flat if depth == 0 else flat + 2 * deep)(depth)

    def simple(self, depth: int) -> Schema:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])}

    def string(self, depth: int) -> Schema:
        kind = self._random.randrange(4)
        if kind == 0:
            least = self._random.randrange(4)
            return {"type": "string", "minLength": least, "maxLength": least + self._random.randrange(1, 9)}
        if kind == 1:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if kind == 2:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        return {"type": ["string", "null"], "maxLength": self._random.randrange(7)}

    def integer(self, depth: int) -> Schema:
        low = self._random.choice([-1000, -7, 0, 1, 99, 10**9])
        high = low + self._random.choice([0, 1, 12, 345, 10**6])
        schema: Schema = {"type": "integer", "minimum": low, "maximum": high}
        if self._random.random() < 0.3:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        if self._random.random() < 0.3:
            return {"type": "integer", "multipleOf": self._random.choice([1, 2, 3, 7, 25])}
        return schema

    def number(self, depth: int) -> Schema:
        low = self._random.choice([-2.5, -0.125, 0, 0.1, 3, 1e-6])
        return {
            "type": "number",
            self._random.choice(["minimum", "exclusiveMinimum"]): low,
            self._random.choice(["maximum", "exclusiveMaximum"]): round(
                low + self._random.choice([0.05, 0.5, 1, 17.25]), 6
            ),
        }

    def enumeration(self, depth: int) -> Schema:
        values: list[Any] = [*WORDS, 1, 2.5, True, None, [1, "a"], {"k": None}]
        chosen = self._random.sample(values, self._random.randrange(1, 5))
        return {"const": chosen[0]} if self._random.random() < 0.3 else {"enum": chosen}

    def object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randrange(1, 5))
        schema: Schema = {
            "type": "object",
            "title": "something",
            "properties": {name: self.schema(depth - 1) for name in names},
            "required": [name for name in names if self._random.random() < 0.6],
        }
        if self._random.random() < 0.5:
            schema["additionalProperties"] = False
        if self._random.random() < 0.2:
            schema["minProperties"] = 1
            schema["maxProperties"] = max(1, len(schema["required"]))
        return schema

    def mapping(self, depth: int) -> Schema:
        inner = self.schema(0)
        schema: Schema = {"type": "object", "additionalProperties": inner, "maxProperties": 2}
        if self._random.random() < 0.5:
            return schema | {"propertyNames": {"pattern": "^[a-c]{1,3}$"}}
        if self._random.random() < 0.5:
            return {
                "type": "object",
                "patternProperties": {"^k[0-9]$": inner},
                "additionalProperties": False,
                "maxProperties": 2,
            }
        return schema | {"properties": {"n": self.integer(0)}, "required": ["n"]}

    def array(self, depth: int) -> Schema:
        least = self._random.randrange(3)
        return {
            "type": "array",
            "items": self.schema(depth - 1),
            "minItems": least,
            "maxItems": least + self._random.randrange(3),
        }

    def pair(self, depth: int) -> Schema:
        first = [self.schema(depth - 1), self.schema(0)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": self._random.randrange(3)}

    def union(self, depth: int) -> Schema:
        if self._random.random() < 0.3:
            kinds = self._random.sample(["cat", "dog", "bird"], 2)
            cases = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "age": self.integer(0)},
                    "required": ["kind"],
                }
                for kind in kinds
            ]
            return {"oneOf": cases, "discriminator": {"propertyName": "kind"}}
        return {"anyOf": [self.schema(depth - 1), {"type": "null"}]}

    def merged(self, depth: int) -> Schema:
        if self._random.random() < 0.5:
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}, {"description": "between"}]}
        left, right = self._random.sample(NAMES, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {left: self.schema(0)}, "required": [left]},
                {"type": "object", "properties": {right: self.schema(0)}, "required": [right]},
            ]
        }

    def recursive(self) -> Schema:
        node = {
            "type": "object",
            "properties": {"v": self.schema(0), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "next"],
        }
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}

    def tool_like(self) -> Schema:
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what to find", "maxLength": 8},
                "limit": {"$ref": "#/$defs/limit"},
                "filters": {"type": "array", "items": {"$ref": "#/$defs/filter"}, "maxItems": 2},
                "sort": {"type": "string", "enum": ["asc", "desc"], "default": "asc"},
                "extra": self.schema(1),
            },
            "required": ["query", "limit"],
            "additionalProperties": False,
            "$defs": {
                "limit": {"type": "integer", "minimum": 1, "maximum": 100},
                "filter": {
                    "type": "object",
                    "properties": {
                        "field": {"enum": ["a", "b"]},
                        "value": {"type": ["integer", "boolean"], "maximum": 9},
                    },
                    "required": ["field", "value"],
                },
            },
        }


def make_schemas(count: int, seed: int = 0) -> list[Schema]:
    """So many schemas, no two alike."""
    maker = SchemaMaker(seed)
    made: dict[str, Schema] = {}
    while len(made) < count:
        place = len(made) % 10
        schema = maker.recursive() if place == 8 else maker.tool_like() if place == 9 else maker.schema()
        made.setdefault(repr(schema), schema)
    return list(made.values())
