"""JSON schemas as such: which keywords there are, where references lead, what two schemas have in common.

How a schema is written as a grammar is `json_schema.py`'s.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from deepinfer.errors import RequestError

Schema = Mapping[str, Any] | bool

DEEPEST = 64
"""Schemas and values in one another."""
MOST_BRANCHES = 256

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$schema", "$id", "$comment", "$defs", "definitions"),
    )
)
"""They ask nothing of a value."""

BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    ),
}
"""What each type of value can be asked."""

COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
ASSERTIONS = frozenset(["type", "enum", "const", *COMBINED, *(word for words in BY_TYPE.values() for word in words)])
"""Every keyword that is held to."""

REFUSED = {
    "not": "a grammar says what may come, not what may not",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "contains": "earlier items are not remembered",
    "minContains": "earlier items are not remembered",
    "maxContains": "earlier items are not remembered",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "additionalItems": "it is written items, behind prefixItems",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $ref",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "$anchor": "use $ref with a path",
    "$vocabulary": "other vocabularies are not known",
    "id": "references lead into the schema itself",
    "contentEncoding": "what a text encodes is not seen",
    "contentMediaType": "what a text encodes is not seen",
    "contentSchema": "what a text encodes is not seen",
    "nullable": "add null to the type",
}
"""Keywords of JSON Schema, and of OpenAPI, that are refused, and why or what to do instead."""

TYPES = ("object", "array", "string", "number", "boolean", "null")
_TIGHTER = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}


def refuse(path: str, keyword: str, why: str) -> RequestError:
    """The error for a keyword that cannot be held to."""
    return RequestError(f"JSON schema: the keyword {keyword!r} at {path} cannot be enforced: {why}")


def child(path: str, *keys: str | int) -> str:
    """The path of what lies under these keys."""
    return "/".join([path, *(str(key).replace("~", "~0").replace("/", "~1") for key in keys)])


def types_of(schema: Mapping[str, Any], path: str) -> list[str]:
    """The types whose values are written: those named, or those that the keywords are about."""
    given = schema.get("type")
    if given is None:
        meant = [kind for kind, words in BY_TYPE.items() if any(word in schema for word in words)]
        return [kind for kind in meant if kind != "integer"] or list(TYPES)
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not kinds or not set(kinds) <= {*TYPES, "integer"}:
        raise refuse(path, "type", f"{given!r} is none of {', '.join((*TYPES, 'integer'))}")
    return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]


def of_type(value: object, kind: str) -> bool:
    """Whether a JSON value is of a type."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return math.isfinite(value) and (kind == "number" or (kind == "integer" and value == int(value)))
    return isinstance(value, {"string": str, "array": list, "object": dict}.get(kind, ()))


class Schemas:
    """One root schema and all that lies in it."""

    def __init__(self, root: object) -> None:
        """Raises RequestError for what is no schema."""
        if not isinstance(root, Mapping | bool):
            raise RequestError(f"a JSON schema must be an object, true or false, got {type(root).__name__}")
        self.root: Schema = root
        _check_depth(root)

    def check(self, schema: object, path: str) -> None:
        """Raise RequestError for the first keyword that is not held to."""
        if not isinstance(schema, Mapping):
            raise RequestError(f"JSON schema: expected an object, true or false at {path}, got {schema!r}")
        if path.count("/") > 4 * DEEPEST:
            raise RequestError(f"JSON schema: more than {DEEPEST} schemas in one another at {path[:80]}...")
        for keyword in schema:
            if keyword in ASSERTIONS or keyword in ANNOTATIONS or str(keyword).startswith("x-"):
                continue
            raise refuse(path, keyword, REFUSED.get(keyword, "it is no keyword of JSON Schema 2020-12"))
        if "$id" in schema and path != "#":
            raise refuse(path, "$id", "references lead into the schema itself")

    def has_siblings(self, schema: Mapping[str, Any], *keywords: str) -> bool:
        """Whether a schema asks anything beside `keywords`."""
        return any(keyword in ASSERTIONS and keyword not in keywords for keyword in schema)

    def resolve(self, pointer: object, path: str) -> Schema:
        """The schema that a reference leads to; raises RequestError when there is none."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise refuse(path, "$ref", f"{pointer!r} does not lead into the schema itself, as #/$defs/NAME does")
        found: Any = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise refuse(path, "$ref", f"there is nothing at {pointer}") from None
        if not isinstance(found, Mapping | bool):
            raise refuse(path, "$ref", f"there is no schema at {pointer}")
        return found

    def branches(self, schema: Mapping[str, Any], path: str, depth: int = 0) -> Sequence[Schema]:
        """Schemas of which a value must obey one; the schema itself when it combines no others."""
        self.check(schema, path)
        used = [keyword for keyword in COMBINED if keyword in schema]
        if not used:
            return [schema]
        if depth > DEEPEST // 2:
            raise refuse(path, used[0], "references lead to one another without end")
        base = {keyword: value for keyword, value in schema.items() if keyword not in COMBINED}
        alone = len(used) == 1 and not self.has_siblings(base)
        parts: list[Schema] = [base]
        for keyword in used:
            members = self._members(schema, keyword, path)
            if keyword == "oneOf":
                self._check_disjoint(members, path)
            if alone and (keyword in ("anyOf", "oneOf") or len(members) == 1):
                return members
            groups = [[one] for one in members] if keyword in ("$ref", "allOf") else [members]
            for group in groups:
                expanded = [part for one in group for part in self._expanded(one, path, depth)]
                pairs = product(parts, expanded)
                parts = [one for left, right in pairs if (one := self.merge(left, right, path)) is not False]
                if len(parts) > MOST_BRANCHES:
                    raise refuse(path, keyword, f"there are more than {MOST_BRANCHES} cases")
        return parts

    def cases(self, schema: Schema, path: str) -> Sequence[Schema]:
        """Schemas that combine no others, of which a value must obey one."""
        return self._expanded(schema, path, 0)

    def values(self, schema: Mapping[str, Any], path: str) -> list[Any]:
        """The values that enum and const name, of the types that are named."""
        for keyword in schema:
            if keyword in ASSERTIONS and keyword not in ("type", "enum", "const"):
                raise refuse(path, keyword, "beside enum or const")
        named = schema.get("enum", [schema.get("const")])
        if not isinstance(named, list):
            raise refuse(path, "enum", "it must be a list of values")
        kinds = types_of({"type": schema["type"]}, path) if "type" in schema else ["integer", *TYPES]
        fits = [value for value in named if any(of_type(value, kind) for kind in kinds)]
        if "const" in schema:
            fits = [value for value in fits if _same(value, schema["const"])]
        try:
            for value in fits:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError) as error:
            raise refuse(
                path, "enum" if "enum" in schema else "const", f"a value cannot be written ({error})"
            ) from None
        return fits

    def merge(self, left: Schema, right: Schema, path: str) -> Schema:
        """One schema for the values that both allow; neither combines others. False when there are none."""
        if isinstance(left, bool) or isinstance(right, bool):
            return (right if left is True else left) if left is not False and right is not False else False
        _check_mergeable(left, right, path)
        merged = dict(left)
        if {"enum", "const"} & left.keys() and {"enum", "const"} & right.keys():
            common = [value for value in _named(left) if any(_same(value, other) for other in _named(right))]
            merged = {keyword: value for keyword, value in left.items() if keyword != "const"} | {"enum": common}
            right = {keyword: value for keyword, value in right.items() if keyword not in ("enum", "const")}
        for keyword, value in right.items():
            if keyword not in merged or merged[keyword] == value or keyword in ANNOTATIONS:
                merged.setdefault(keyword, value)
                continue
            both = _both(keyword, merged[keyword], value, path)
            if both is None:
                return False
            merged[keyword] = both
        return merged

    def ends(self, schema: Schema, active: frozenset[str] = frozenset()) -> bool:
        """Whether a value of this schema can be written to its end; `active` are the references that led here."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            pointer = str(schema["$ref"])
            if pointer in active or not self.ends(self.resolve(pointer, "#"), active | {pointer}):
                return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(self.ends(one, active) for one in schema[keyword]):
                return False
        if not all(self.ends(one, active) for one in schema.get("allOf", ())):
            return False
        kinds = schema.get("type", TYPES)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "enum" in schema or "const" in schema or set(kinds) - {"object", "array"}:
            return True
        return any(self._container_ends(kind, schema, active) for kind in kinds)

    def _container_ends(self, kind: str, schema: Mapping[str, Any], active: frozenset[str]) -> bool:
        if kind == "object":
            properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            return all(self.ends(properties.get(name, others), active) for name in schema.get("required", ()))
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed = first[: int(least)] + ([schema.get("items", True)] if least > len(first) else [])
        return all(self.ends(one, active) for one in needed)

    def _members(self, schema: Mapping[str, Any], keyword: str, path: str) -> Sequence[Schema]:
        if keyword == "$ref":
            return [self.resolve(schema["$ref"], path)]
        members = schema[keyword]
        if not isinstance(members, list) or not members:
            raise refuse(path, keyword, "it must be a list of schemas")
        for place, member in enumerate(members):
            if not isinstance(member, bool):
                self.check(member, child(path, keyword, place))
        return members

    def _expanded(self, schema: Schema, path: str, depth: int) -> Sequence[Schema]:
        """The cases of a schema, none of which combines others."""
        if isinstance(schema, bool):
            return [schema]
        found = self.branches(schema, path, depth + 1)
        if len(found) == 1 and found[0] is schema:
            return found
        return [part for one in found for part in self._expanded(one, path, depth + 1)]

    def _check_disjoint(self, members: Sequence[Schema], path: str) -> None:
        expanded = [self._expanded(one, path, 0) for one in members]
        for (i, left), (j, right) in combinations(enumerate(expanded), 2):
            if not all(self._disjoint(one, other, path, 0) for one, other in product(left, right)):
                raise refuse(path, "oneOf", f"number {i + 1} and {j + 1} may both hold: use anyOf, or tell them apart")

    def _disjoint(self, left: Schema, right: Schema, path: str, depth: int) -> bool:
        """Whether certainly no value is valid against both."""
        if isinstance(left, bool) or isinstance(right, bool):
            return left is False or right is False
        if depth > DEEPEST:
            return False
        first, second = _allowed_types(left), _allowed_types(right)
        if {"enum", "const"} & left.keys() and {"enum", "const"} & right.keys():
            return not any(_same(one, other) for one in _named(left) for other in _named(right))
        if not first & second:
            return True
        if first & second != {"object"}:
            return False
        shared = set(left.get("required", ())) & set(right.get("required", ()))
        for name in sorted(shared & set(left.get("properties", {})) & set(right.get("properties", {}))):
            cases = (self._expanded(one["properties"][name], path, depth) for one in (left, right))
            if all(self._disjoint(one, other, path, depth + 1) for one, other in product(*cases)):
                return True
        pairs = ((left, right), (right, left))
        return any(
            set(one.get("required", ())) - set(other.get("properties", {})) for one, other in pairs if _closed(other)
        )


def _closed(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _allowed_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value may have, an integer being a number."""
    given = schema.get("type", TYPES)
    kinds = {"number" if kind == "integer" else kind for kind in ([given] if isinstance(given, str) else given)}
    if {"enum", "const"} & schema.keys():
        kinds &= {kind for value in _named(schema) for kind in TYPES if of_type(value, kind)}
    return kinds


def _named(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema["enum"]) if "enum" in schema else [schema["const"]]


def _same(left: object, right: object) -> bool:
    """JSON's equality: 1 is 1.0, and true is not 1."""
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left == right


def _both(keyword: str, left: Any, right: Any, path: str) -> Any:
    """What two values of a keyword ask together; None when no value can do both."""
    if keyword in _TIGHTER:
        return _TIGHTER[keyword](left, right)
    if keyword == "required":
        return list(dict.fromkeys([*left, *right]))
    if keyword == "type":
        first, second = ([kinds] if isinstance(kinds, str) else kinds for kinds in (left, right))
        common = [kind for kind in first if kind in second or (kind == "integer" and "number" in second)]
        common += [kind for kind in second if kind == "integer" and "number" in first]
        return list(dict.fromkeys(common)) or None
    if keyword == "properties":
        shared = {name: {"allOf": [left[name], right[name]]} for name in left if name in right}
        return {**left, **right, **shared}
    if keyword == "items" or keyword == "additionalProperties":
        return {"allOf": [left, right]}
    raise refuse(path, keyword, "two schemas that must both hold differ in it")


def _check_mergeable(left: Mapping[str, Any], right: Mapping[str, Any], path: str) -> None:
    """Refuse pairs in which one keyword of a side bears on what only the other side names."""
    for one, other in ((left, right), (right, left)):
        strangers = set(other.get("properties", {})) - set(one.get("properties", {}))
        if strangers and one.get("additionalProperties", True) is not True:
            raise refuse(path, "additionalProperties", f"another schema that must hold names {min(strangers)!r}")
        if strangers and one.get("patternProperties"):
            raise refuse(path, "patternProperties", f"another schema that must hold names {min(strangers)!r}")
        places = ("prefixItems", "items")
        if "prefixItems" in one and any(word in other and one.get(word) != other[word] for word in places):
            raise refuse(path, "prefixItems", "another schema that must hold has items, too")


def _check_depth(root: object) -> None:
    """Refuse a schema that is nested too deeply to walk through."""
    level: list[object] = [root]
    for _ in range(4 * DEEPEST):
        level = [
            value
            for one in level
            for value in (one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ())
        ]
        if not level:
            return
    raise RequestError(f"the JSON schema is nested more than {4 * DEEPEST} levels deep")
