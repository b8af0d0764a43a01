"""Owns what the metaschemas of JSON Schema drafts 4 to 2020-12 ask of a schema, with the API's error texts.

A draft is a list of passes, each a table from keyword to check: newer drafts check vocabulary after vocabulary, older
ones all keywords in one pass. Resolving references and compiling patterns is in `schema_check`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from deepseek_recipe.json_reader import Json
from deepseek_recipe.json_writer import compact_json
from deepseek_recipe.schema_patterns import is_pattern
from deepseek_recipe.schema_uri import is_uri, is_uri_reference

type Check = Callable[[Json, "Draft"], None]


class SchemaError(ValueError):
    """The first thing that is wrong with a schema, in the API's words."""


@dataclass(frozen=True)
class Draft:
    """A draft of JSON Schema: the types of a schema and the passes of checks, each by keyword."""

    name: str
    types: tuple[str, ...]
    passes: tuple[Mapping[str, Check], ...]
    requires: Mapping[str, str]
    """Keywords that need another one beside them."""
    id_keyword: str = "$id"
    ref_stands_alone: bool = False
    """Whether a `$ref` makes its siblings meaningless."""


def check_schema(value: Json, draft: Draft) -> None:
    """Check a schema and all schemas in it.

    Raises:
        SchemaError: at the first violation, in the order of the passes and then of the document.
    """
    _typed(*draft.types)(value, draft)
    if not isinstance(value, dict):
        return
    for checks in draft.passes:
        for keyword, item in value.items():
            check = checks.get(keyword)
            if check is not None:
                check(item, draft)
    for keyword, needed in draft.requires.items():
        if keyword in value and needed not in value:
            raise SchemaError(f'"{needed}" is a required property')


def _is_type(value: Json, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return name == "number" or value == int(value)


def _typed(*names: str) -> Check:
    word = "type" if len(names) == 1 else "types"
    listed = ", ".join(f'"{name}"' for name in names)

    def check(value: Json, draft: Draft) -> None:
        if not any(_is_type(value, name) for name in names):
            raise SchemaError(f"{compact_json(value)} is not of {word} {listed}")

    return check


def _all(*checks: Check) -> Check:
    def check(value: Json, draft: Draft) -> None:
        for one in checks:
            one(value, draft)

    return check


def _any(*checks: Check) -> Check:
    def check(value: Json, draft: Draft) -> None:
        for one in checks:
            try:
                return one(value, draft)
            except SchemaError:
                continue
        raise SchemaError(f"{compact_json(value)} is not valid under any of the schemas listed in the 'anyOf' keyword")

    return check


def _at_least_zero(value: Json, draft: Draft) -> None:
    if value < 0:
        raise SchemaError(f"{compact_json(value)} is less than the minimum of 0")


def _above_zero(value: Json, draft: Draft) -> None:
    if value <= 0:
        raise SchemaError(f"{compact_json(value)} is less than or equal to the minimum of 0")


def _not_empty(value: Json, draft: Draft) -> None:
    if not value:
        raise SchemaError("[] has less than 1 item")


def _unique(value: Json, draft: Draft) -> None:
    if len({compact_json(_canonical(item)) for item in value}) != len(value):
        raise SchemaError(f"{compact_json(value)} has non-unique elements")


def _canonical(value: Json) -> Json:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value)}
    return value


def _each(one: Check) -> Check:
    """Check each item of a list, or each value of an object."""

    def check(value: Json, draft: Draft) -> None:
        for item in value.values() if isinstance(value, dict) else value:
            one(item, draft)

    return check


def _names(one: Check) -> Check:
    def check(value: Json, draft: Draft) -> None:
        for name in value:
            one(name, draft)

    return check


def _format(name: str, holds: Callable[[str], bool]) -> Check:
    def check(value: Json, draft: Draft) -> None:
        if not holds(value):
            raise SchemaError(f'{compact_json(value)} is not a "{name}"')

    return check


def _matches(pattern: str, holds: Callable[[str], bool]) -> Check:
    def check(value: Json, draft: Draft) -> None:
        if not holds(value):
            raise SchemaError(f'{compact_json(value)} does not match "{pattern}"')

    return check


_TYPE_NAMES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")


def _type_name(value: Json, draft: Draft) -> None:
    if not isinstance(value, str) or value not in _TYPE_NAMES:
        raise SchemaError(f"{compact_json(value)} is not one of the types")


def _anchor(pattern: str, first: str, rest: str) -> Check:
    def holds(value: str) -> bool:
        characters = value.removesuffix("\n") if value.endswith("\n") and len(value) > 1 else value
        return characters[:1] in first and characters != "" and all(c in rest for c in characters[1:])

    return _all(STRING, _matches(pattern, holds))


_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DIGITS: Final = "0123456789"

ANY: Final[Check] = lambda value, draft: None  # noqa: E731
STRING: Final = _typed("string")
BOOLEAN: Final = _typed("boolean")
ARRAY: Final = _typed("array")
NUMBER: Final = _typed("number")
OBJECT: Final = _typed("object")
SCHEMA: Final[Check] = check_schema
COUNT: Final = _all(_typed("integer"), _at_least_zero)
POSITIVE: Final = _all(NUMBER, _above_zero)
SCHEMAS: Final = _all(ARRAY, _not_empty, _each(SCHEMA))
SCHEMA_MAP: Final = _all(OBJECT, _each(SCHEMA))
STRINGS: Final = _all(ARRAY, _each(STRING), _unique)
SOME_STRINGS: Final = _all(ARRAY, _each(STRING), _not_empty, _unique)
TYPE: Final = _any(_type_name, _all(ARRAY, _each(_type_name), _not_empty, _unique))
ITEMS: Final = _any(SCHEMA, SCHEMAS)
REGEX: Final = _all(STRING, _format("regex", is_pattern))
REGEX_MAP: Final = _all(SCHEMA_MAP, _names(_format("regex", is_pattern)))
REFERENCE: Final = _all(STRING, _format("uri-reference", is_uri_reference))
PLAIN_ID: Final = _all(STRING, _matches("^[^#]*#?$", lambda value: "#" not in value.removesuffix("#")))
ANCHOR_2020: Final = _anchor("^[A-Za-z_][-A-Za-z0-9._]*$", _LETTERS + "_", _LETTERS + _DIGITS + "-._")
ANCHOR_2019: Final = _anchor("^[A-Za-z][-A-Za-z0-9.:_]*$", _LETTERS, _LETTERS + _DIGITS + "-.:_")
VOCABULARIES: Final = _all(OBJECT, _each(BOOLEAN))

_DEPENDENCIES: Final = _all(OBJECT, _each(_any(SCHEMA, STRINGS)))
_COUNTS: Final = ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties")
_BOUNDS: Final = ("maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum")


def _table(**groups: tuple[Check, str]) -> dict[str, Check]:
    """A table from keyword to check; each group is a check and the keywords it serves, in one text."""
    return {keyword: check for check, keywords in groups.values() for keyword in keywords.split()}


_META_DATA: Final = _table(
    text=(STRING, "title description"),
    flag=(BOOLEAN, "deprecated readOnly writeOnly"),
    array=(ARRAY, "examples"),
)
_VALIDATION: Final = _table(
    type=(TYPE, "type"),
    array=(ARRAY, "enum"),
    positive=(POSITIVE, "multipleOf"),
    bound=(NUMBER, " ".join(_BOUNDS)),
    count=(COUNT, " ".join((*_COUNTS, "maxContains", "minContains"))),
    text=(STRING, "pattern"),
    flag=(BOOLEAN, "uniqueItems"),
    names=(STRINGS, "required"),
    dependent=(_all(OBJECT, _each(STRINGS)), "dependentRequired"),
)
_FORMAT: Final = _table(text=(STRING, "format"))
_CONTENT: Final = _table(text=(STRING, "contentEncoding contentMediaType"), schema=(SCHEMA, "contentSchema"))
_DRAFT_2020: Final = Draft(
    "2020-12",
    ("boolean", "object"),
    (
        _table(
            id=(PLAIN_ID, "$id"),
            text=(STRING, "$schema $ref $dynamicRef $comment"),
            anchor=(ANCHOR_2020, "$anchor $dynamicAnchor"),
            vocabularies=(VOCABULARIES, "$vocabulary"),
            map=(SCHEMA_MAP, "$defs"),
        ),
        _table(
            list=(SCHEMAS, "prefixItems allOf anyOf oneOf"),
            schema=(SCHEMA, "items contains additionalProperties propertyNames if then else not"),
            map=(SCHEMA_MAP, "properties patternProperties dependentSchemas"),
        ),
        _table(schema=(SCHEMA, "unevaluatedItems unevaluatedProperties")),
        _VALIDATION,
        _META_DATA,
        _FORMAT,
        _CONTENT,
        _table(
            map=(SCHEMA_MAP, "definitions"),
            dependencies=(_DEPENDENCIES, "dependencies"),
            anchor=(ANCHOR_2020, "$recursiveAnchor"),
            text=(STRING, "$recursiveRef"),
        ),
    ),
    {},
)
_SCHEMAS_2019: Final = " ".join(
    (
        "additionalItems additionalProperties contains else if not propertyNames then",
        "unevaluatedItems unevaluatedProperties",
    )
)
_DRAFT_2019: Final = Draft(
    "2019-09",
    ("boolean", "object"),
    (
        _table(
            id=(PLAIN_ID, "$id"),
            text=(STRING, "$schema $ref $recursiveRef $comment"),
            anchor=(ANCHOR_2019, "$anchor"),
            flag=(BOOLEAN, "$recursiveAnchor"),
            vocabularies=(VOCABULARIES, "$vocabulary"),
            map=(SCHEMA_MAP, "$defs"),
        ),
        _table(
            items=(ITEMS, "items"),
            schema=(
                SCHEMA,
                _SCHEMAS_2019,
            ),
            map=(SCHEMA_MAP, "properties patternProperties dependentSchemas"),
            list=(SCHEMAS, "allOf anyOf oneOf"),
        ),
        _VALIDATION,
        _META_DATA,
        _FORMAT,
        _CONTENT,
        _table(map=(SCHEMA_MAP, "definitions"), dependencies=(_DEPENDENCIES, "dependencies")),
    ),
    {},
)
_DRAFT_6_TABLE: Final = _table(
    reference=(REFERENCE, "$id $ref"),
    uri=(_all(STRING, _format("uri", is_uri)), "$schema"),
    text=(STRING, "title description format"),
    array=(ARRAY, "examples enum"),
    positive=(POSITIVE, "multipleOf"),
    bound=(NUMBER, " ".join(_BOUNDS)),
    count=(COUNT, " ".join(_COUNTS)),
    pattern=(REGEX, "pattern"),
    schema=(SCHEMA, "additionalItems contains additionalProperties propertyNames not"),
    items=(ITEMS, "items"),
    flag=(BOOLEAN, "uniqueItems"),
    names=(STRINGS, "required"),
    map=(SCHEMA_MAP, "definitions properties"),
    patterns=(REGEX_MAP, "patternProperties"),
    dependencies=(_DEPENDENCIES, "dependencies"),
    type=(TYPE, "type"),
    list=(SCHEMAS, "allOf anyOf oneOf"),
)
_DRAFT_7_TABLE: Final = _DRAFT_6_TABLE | _table(
    text=(STRING, "$comment contentMediaType contentEncoding"),
    flag=(BOOLEAN, "readOnly"),
    schema=(SCHEMA, "if then else"),
)
_DRAFT_4_TABLE: Final = _table(
    text=(STRING, "id $schema title description format"),
    positive=(POSITIVE, "multipleOf"),
    bound=(NUMBER, "maximum minimum"),
    flag=(BOOLEAN, "exclusiveMaximum exclusiveMinimum uniqueItems"),
    count=(COUNT, " ".join(_COUNTS)),
    pattern=(REGEX, "pattern"),
    either=(_any(BOOLEAN, SCHEMA), "additionalItems additionalProperties"),
    items=(ITEMS, "items"),
    names=(SOME_STRINGS, "required"),
    map=(SCHEMA_MAP, "definitions properties patternProperties"),
    dependencies=(_all(OBJECT, _each(_any(SCHEMA, SOME_STRINGS))), "dependencies"),
    enum=(_all(ARRAY, _not_empty, _unique), "enum"),
    type=(TYPE, "type"),
    list=(SCHEMAS, "allOf anyOf oneOf"),
    schema=(SCHEMA, "not"),
)

DRAFTS: Final[Mapping[str, Draft]] = {
    "https://json-schema.org/draft/2020-12/schema": _DRAFT_2020,
    "https://json-schema.org/draft/2019-09/schema": _DRAFT_2019,
    "http://json-schema.org/draft-07/schema": Draft(
        "7", ("boolean", "object"), (_DRAFT_7_TABLE,), {}, ref_stands_alone=True
    ),
    "http://json-schema.org/draft-06/schema": Draft(
        "6", ("boolean", "object"), (_DRAFT_6_TABLE,), {}, ref_stands_alone=True
    ),
    "http://json-schema.org/draft-04/schema": Draft(
        "4",
        ("object",),
        (_DRAFT_4_TABLE,),
        {"exclusiveMaximum": "maximum", "exclusiveMinimum": "minimum"},
        id_keyword="id",
        ref_stands_alone=True,
    ),
}
"""The drafts by the URL of their metaschema, without a trailing `#`."""
DEFAULT_DRAFT: Final = _DRAFT_2020
