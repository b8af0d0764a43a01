"""Owns reading typed values out of JSON with the API's error texts for values of the wrong shape.

A reader is a function from a JSON value to a typed value that raises ShapeError. The request modules compose readers;
what the values must mean is checked there.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepseek_recipe.json_reader import Json
from deepseek_recipe.json_writer import debug_string, float_text, to_f32

type Reader[T] = Callable[[Json], T]


class ShapeError(ValueError):
    """A JSON value has the wrong shape; the message is the API's, without its prefix.

    `path` leads to the value, outermost step first.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str | int] = []

    def inside(self, step: str | int) -> "ShapeError":
        """The same error, seen from one step further out."""
        self.path.insert(0, step)
        return self

    def place(self) -> str:
        """The path as text, like `messages[3].content`."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).lstrip(".")


def describe(value: Json) -> str:
    """What a value is, as error texts name it: null, boolean `true`, integer `1`, string "x", sequence, map."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{float_text(value)}`"
    if isinstance(value, str):
        return f"string {debug_string(value)}"
    return "sequence" if isinstance(value, list) else "map"


def wrong_type(value: Json, expected: str) -> ShapeError:
    """The error for a value of another type."""
    return ShapeError(f"invalid type: {describe(value)}, expected {expected}")


def missing(name: str) -> ShapeError:
    """The error for an absent required field."""
    return ShapeError(f"missing field `{name}`")


def anything(value: Json) -> Json:
    """Any JSON value, as it is."""
    return value


def string(value: Json) -> str:
    """A string."""
    if isinstance(value, str):
        return value
    raise wrong_type(value, "a string")


def boolean(value: Json) -> bool:
    """A boolean."""
    if isinstance(value, bool):
        return value
    raise wrong_type(value, "a boolean")


def f32(value: Json) -> float:
    """A number, rounded to a 32-bit float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(value, "f32")
    return to_f32(value)


def _integer(name: str, low: int, high: int) -> Reader[int]:
    def read(value: Json) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(value, name)
        if not low <= value <= high:
            raise ShapeError(f"invalid value: integer `{value}`, expected {name}")
        return value

    return read


u8 = _integer("u8", 0, (1 << 8) - 1)
u32 = _integer("u32", 0, (1 << 32) - 1)
u64 = _integer("u64", 0, (1 << 64) - 1)
i64 = _integer("i64", -(1 << 63), (1 << 63) - 1)


def number(value: Json) -> int | float:
    """Any JSON number, as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(value, "a JSON number")
    return value


def mapping(value: Json) -> dict[str, Json]:
    """An object, members as they are."""
    if isinstance(value, dict):
        return value
    raise wrong_type(value, "a map")


def optional[T](reader: Reader[T]) -> Reader[T | None]:
    """Turn null into None; anything else is read by `reader`."""

    def read(value: Json) -> T | None:
        return None if value is None else reader(value)

    return read


def list_of[T](reader: Reader[T]) -> Reader[list[T]]:
    """A list whose items are read by `reader`."""

    def read(value: Json) -> list[T]:
        if not isinstance(value, list):
            raise wrong_type(value, "a sequence")
        return _read_items(reader, value)

    return read


def _read_items[T](reader: Reader[T], items: list[Json]) -> list[T]:
    read: list[T] = []
    try:
        for item in items:
            read.append(reader(item))  # noqa: PERF401 - how many were read is where it failed
    except ShapeError as error:
        raise error.inside(len(read)) from None
    return read


def map_of[T](reader: Reader[T]) -> Reader[dict[str, T]]:
    """An object whose members are read by `reader`."""

    def read(value: Json) -> dict[str, T]:
        return {key: reader(item) for key, item in mapping(value).items()}

    return read


def text_or_list[T](reader: Reader[T], message: str) -> Reader[str | list[T]]:
    """A string, or a list whose items are read by `reader`; else an error with just `message`."""

    def read(value: Json) -> str | list[T]:
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return _read_items(reader, value)
        raise ShapeError(message)

    return read


def prefixed[T](name: str, reader: Reader[T]) -> Reader[T]:
    """Errors of `reader` begin with the name of the field."""

    def read(value: Json) -> T:
        try:
            return reader(value)
        except ShapeError as error:
            outer = ShapeError(f"field `{name}`: {error}")
            outer.path = [name, *error.path]
            raise outer from None

    return read


def one_of(names: tuple[str, ...]) -> str:
    """The end of an error text about a name that is not one of `names`."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) <= 2:
        return "expected " + " or ".join(quoted)
    return "expected one of " + ", ".join(quoted)


def choice(*names: str) -> Reader[str]:
    """One of some words; an object with the word as its single key and null as its value counts too."""

    def read(value: Json) -> str:
        if isinstance(value, dict):
            if len(value) != 1:
                raise ShapeError("invalid value: map, expected map with a single key")
            (word, content), *_ = value.items()
        elif isinstance(value, str):
            word, content = value, None
        else:
            raise wrong_type(value, "string or map")
        if word not in names:
            raise ShapeError(f"unknown variant `{word}`, {one_of(names)}")
        if content is not None:
            raise wrong_type(content, "unit")
        return str(word)

    return read


class Field[T]:
    """One member of a struct: how it is read, and what it is when absent (required if no default is given)."""

    def __init__(self, reader: Reader[T], *default: T) -> None:
        self.reader = reader
        self.required = not default
        self.default = default[0] if default else None


def may[T](reader: Reader[T]) -> Field[T | None]:
    """A member that may be absent or null, both None."""
    return Field(optional(reader), None)


def struct[T](name: str, make: Callable[..., T], fields: Mapping[str, Field[Any]]) -> Reader[T]:
    """An object with known members; `make` gets them by name.

    Members are read in the order in which they stand in the object, then absent required ones are reported in the order
    of `fields`. Unknown members are ignored. A list is read as the members in order.
    """
    defaults = {key: field.default for key, field in fields.items()}
    required = [key for key, field in fields.items() if field.required]
    readers = {key: field.reader for key, field in fields.items()}

    def read(value: Json) -> T:
        if isinstance(value, list):
            return make(**_positional(name, value, readers))
        if not isinstance(value, dict):
            raise wrong_type(value, f"struct {name}")
        members = dict(defaults)
        key = ""
        try:
            for key, item in value.items():
                reader = readers.get(key)
                if reader is not None:
                    members[key] = reader(item)
        except ShapeError as error:
            raise error.inside(key) from None
        for key in required:
            if key not in value:
                raise missing(key)
        return make(**members)

    return read


def _positional(name: str, items: list[Json], readers: Mapping[str, Reader[Any]]) -> dict[str, Any]:
    kind = name if name.startswith("struct variant ") else f"struct {name}"
    members: dict[str, Any] = {}
    for index, (key, reader) in enumerate(readers.items()):
        if index >= len(items):
            raise ShapeError(f"invalid length {index}, expected {kind} with {_elements(len(readers))}")
        members[key] = reader(items[index])
    if len(items) > len(readers):
        wanted = "fewer elements in array" if kind != name else f"{_elements(len(readers))} in sequence"
        raise ShapeError(f"invalid length {len(items)}, expected {wanted}")
    return members


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


class Variant[T](NamedTuple):
    """One form of a tagged object: what makes its value, and its members besides the tag."""

    make: Callable[..., T]
    fields: Mapping[str, Field[Any]]


def tagged[T](name: str, tag: str, variants: Mapping[str, Variant[T]]) -> Reader[T]:
    """An object whose member `tag` says which variant it is; the tag is read before anything else."""
    readers = {
        variant: struct(f"struct variant {name}::{_camel(variant)}", make, fields)
        for variant, (make, fields) in variants.items()
    }
    names = tuple(variants)

    def read(value: Json) -> T:
        content: Json = value
        if isinstance(value, list):
            if not value:
                raise missing(tag)
            word, content = value[0], value[1:]
        elif isinstance(value, dict):
            if tag not in value:
                raise missing(tag)
            word = value[tag]
        else:
            raise wrong_type(value, f"internally tagged enum {name}")
        if not isinstance(word, str):
            raise wrong_type(word, "variant identifier").inside(tag)
        reader = readers.get(word)
        if reader is None:
            raise ShapeError(f"unknown variant `{word}`, {one_of(names)}").inside(tag)
        return reader(content)

    return read


def _camel(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("_"))
