"""Owns the strict form of a JSON schema: which schemas `strict: true` allows and how they are rewritten.

Schemas that are not strict are checked in `schema_check`.
"""

from collections.abc import Callable
from typing import Final

from deepseek_recipe.json_reader import Json
from deepseek_recipe.shapes import (
    Reader,
    ShapeError,
    boolean,
    choice,
    i64,
    list_of,
    map_of,
    missing,
    number,
    one_of,
    optional,
    prefixed,
    string,
    wrong_type,
)

type _Node = dict[str, Json]

EMPTY_OBJECT: Final[_Node] = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
"""The strict form of absent parameters."""


class StrictSchemaError(ValueError):
    """A schema has the right shape, but strict mode does not allow it."""


def normalise_schema(schema: Json, *, shape_prefix: str, top_message: str, empty_top: bool) -> _Node:
    """The strict form of `schema`: known members only, in a fixed order, all properties required.

    Args:
        shape_prefix: stands before the error text of a member of the wrong shape.
        top_message: the error if the schema is not of type object.
        empty_top: whether the top level may have no properties.

    Raises:
        StrictSchemaError: with the API's error text.
    """
    try:
        node = _node(schema)
    except ShapeError as error:
        raise StrictSchemaError(f"{shape_prefix}{error}") from None
    _check_meaning(node, may_be_empty=empty_top)
    if node.get("type") != "object":
        raise StrictSchemaError(top_message)
    normal: _Node = _finish(node)
    return normal


def _node(value: Json) -> _Node:
    """Read a node of any kind; what decides the kind is looked at first."""
    if isinstance(value, dict):
        if "type" in value:
            return _union(value) if isinstance(value["type"], list) else _typed(value)
        if "anyOf" in value:
            nodes = prefixed("anyOf", list_of(_typed))(value["anyOf"])
            return _present({"anyOf": nodes, "description": _description(value)})
        if "$ref" in value:
            return {"$ref": prefixed("$ref", string)(value["$ref"])}
    raise ShapeError("one of `type`, `anyOf`, `$ref` field is required")


def _present(node: _Node) -> _Node:
    return {key: value for key, value in node.items() if value is not None}


def _description(value: _Node) -> str | None:
    return prefixed("description", optional(string))(value.get("description"))


_UNION_TYPES: Final = choice("string", "number", "integer", "boolean", "null")


def _union(value: _Node) -> _Node:
    types = prefixed("type", list_of(_UNION_TYPES))(value["type"])
    return _present({"type": types, "description": _description(value)})


def _numeric(reader: Reader[int] | Reader[int | float]) -> dict[str, Reader[Json]]:
    names = ("const", "default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    return {"description": optional(string)} | {name: optional(reader) for name in names}


def _later[T](reader: Callable[[], Reader[T]]) -> Reader[T]:
    """A reader that is looked up when used, for readers that refer to each other."""

    def read(value: Json) -> T:
        return reader()(value)

    return read


_FORMATS: Final = choice("email", "hostname", "ipv4", "ipv6", "uuid")
_MEMBERS: Final[dict[str, dict[str, Reader[Json]]]] = {
    "object": {
        "properties": optional(_later(lambda: map_of(_node))),
        "additionalProperties": optional(boolean),
        "required": optional(list_of(string)),
        "description": optional(string),
        "$def": optional(_later(lambda: map_of(_node))),
    },
    "string": {
        "description": optional(string),
        "pattern": optional(string),
        "format": optional(_FORMATS),
        "enum": optional(list_of(string)),
    },
    "number": _numeric(number),
    "integer": _numeric(i64),
    "boolean": {"description": optional(string)},
    "null": {"description": optional(string)},
    "array": {"items": _later(lambda: _node), "description": optional(string)},
}
"""The members of each type of node, in the order in which they are written."""


def _typed(value: Json) -> _Node:
    """Read a node whose `type` is a single word."""
    if not isinstance(value, dict):
        raise wrong_type(value, "internally tagged enum TypedSchema")
    if "type" not in value:
        raise missing("type")
    kind = value["type"]
    if not isinstance(kind, str):
        raise wrong_type(kind, "variant identifier")
    if kind not in _MEMBERS:
        raise ShapeError(f"unknown variant `{kind}`, {one_of(tuple(_MEMBERS))}")
    members = _MEMBERS[kind]
    read = {key: members[key](item) for key, item in value.items() if key in members}
    if kind == "array" and "items" not in read:
        raise missing("items")
    return _present({"type": kind} | {key: read.get(key) for key in members})


def _check_meaning(node: _Node, *, may_be_empty: bool = False) -> None:
    if node.get("type") == "object":
        _check_object(node, may_be_empty)
    elif node.get("type") == "array":
        _check_meaning(node["items"])
    for child in node.get("anyOf", ()):
        _check_meaning(child)


def _check_object(node: _Node, may_be_empty: bool) -> None:
    properties: dict[str, _Node] = node.get("properties", {})
    if not properties and not may_be_empty:
        raise StrictSchemaError("An object with no properties is not allowed.")
    for child in (*properties.values(), *node.get("$def", {}).values()):
        _check_meaning(child)
    required = node.get("required")
    seen: set[str] = set()
    for name in required or ():
        if name in seen:
            raise StrictSchemaError(f"Duplicate required property '{name}'")
        if name not in properties:
            raise StrictSchemaError(f"Required property '{name}' not found in object")
        seen.add(name)
    if required is not None and len(seen) != len(properties):
        raise StrictSchemaError("Required properties must match all properties in the object")
    if node.get("additionalProperties"):
        raise StrictSchemaError("additionalProperties should not be true")


def _finish(node: _Node) -> _Node:
    """Fill in what strict mode implies for objects, in the order in which it is written."""
    kind = node.get("type")
    if kind == "object":
        properties = {name: _finish(child) for name, child in node.get("properties", {}).items()}
        finished: _Node = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            "required": list(properties),
            "description": node.get("description"),
        }
        if "$def" in node:
            finished["$def"] = {name: _finish(child) for name, child in node["$def"].items()}
        return _present(finished)
    if kind == "array":
        finished = {"type": "array", "items": _finish(node["items"]), "description": node.get("description")}
        return _present(finished)
    return node | {"anyOf": [_finish(child) for child in node["anyOf"]]} if "anyOf" in node else node
