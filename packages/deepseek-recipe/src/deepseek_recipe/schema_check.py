"""Owns the check that a tool's or an answer's JSON schema can be compiled, with the API's error texts.

It is the metaschema check of `schema_vocabulary`, then references and patterns. Strict schemas are in `schema_strict`.
"""

from typing import Final
from urllib.parse import unquote, urldefrag, urljoin

from deepseek_recipe.json_reader import Json
from deepseek_recipe.json_writer import compact_json
from deepseek_recipe.schema_patterns import is_pattern
from deepseek_recipe.schema_uri import uri_error
from deepseek_recipe.schema_vocabulary import DEFAULT_DRAFT, DRAFTS, Draft, SchemaError, check_schema

_NO_BASE: Final = "json-schema:///"
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_ONE_TEXT: Final = """
additionalItems additionalProperties contains contentSchema else if items not propertyNames then
unevaluatedItems unevaluatedProperties
"""
_ONE: Final = frozenset(_ONE_TEXT.split())
_MANY: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NAMED: Final = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies"))
_DEFINITIONS: Final = frozenset(("$defs", "definitions"))


def check_compiles(schema: Json) -> None:
    """Check that a schema is valid against its metaschema, that its references resolve and its patterns are patterns.

    Raises:
        SchemaError: with the API's text for the first error.
    """
    draft = _draft_of(schema)
    check_schema(schema, draft)
    _Compiler(schema, draft).compile()


def check_function_schema(schema: Json) -> None:
    """Check a schema as `check_compiles` does, and that its `type` is the string "object".

    Raises:
        SchemaError: with the API's text for the first error.
    """
    check_compiles(schema)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind != "object":
        raise SchemaError(f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {compact_json(kind)}'.")


def _draft_of(schema: Json) -> Draft:
    url = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(url, str):
        return DEFAULT_DRAFT
    problem = uri_error(url)
    if problem:
        raise SchemaError(f"Invalid URI reference '{url}': {problem}")
    draft = DRAFTS.get(url.removesuffix("#"))
    if draft is None:
        raise SchemaError(
            f"Unknown meta-schema: '{url}'. Custom meta-schemas must be registered in the registry before use"
        )
    return draft


class _Compiler:
    """Finds the resources of a schema, then follows it as a validator would be compiled: in document order."""

    def __init__(self, root: Json, draft: Draft) -> None:
        self.root = root
        self.draft = draft
        self.resources: dict[str, Json] = {_NO_BASE: root}
        self.anchors: dict[tuple[str, str], Json] = {}
        self.compiled: set[int] = set()

    def compile(self) -> None:
        self.collect(self.root, _NO_BASE)
        self.find_external(self.root, _NO_BASE)
        self.visit(self.root, _NO_BASE)

    def base_of(self, schema: Json, base: str) -> str:
        """The base URI inside a schema."""
        own = schema.get(self.draft.id_keyword)
        if not isinstance(own, str) or own.startswith("#"):
            return base
        return _join(base, own)

    def collect(self, schema: Json, base: str) -> None:
        """Note the ids and the anchors of a schema and of all schemas in it."""
        if not isinstance(schema, dict):
            return
        own = schema.get(self.draft.id_keyword)
        if isinstance(own, str):
            problem = uri_error(own)
            if problem:
                raise SchemaError(f"Invalid URI reference '{own}': {problem}")
            if own.startswith("#"):
                self.anchors.setdefault((base, own[1:]), schema)
        base = self.base_of(schema, base)
        self.resources.setdefault(base, schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = schema.get(keyword)
            if isinstance(anchor, str):
                self.anchors.setdefault((base, anchor), schema)
        for child in self.children(schema, with_definitions=True):
            self.collect(child, base)

    def children(self, schema: dict[str, Json], *, with_definitions: bool = False) -> list[Json]:
        """The schemas directly inside a schema, in document order."""
        found: list[Json] = []
        for keyword, item in schema.items():
            if isinstance(item, list) and keyword in _MANY:
                found += item
            elif keyword in _ONE and not isinstance(item, list):
                found.append(item)
            elif isinstance(item, dict) and (keyword in _NAMED or (with_definitions and keyword in _DEFINITIONS)):
                found += [value for value in item.values() if not isinstance(value, list)]
        return found

    def find_external(self, schema: Json, base: str) -> None:
        """Refuse references to resources that would have to be fetched."""
        if not isinstance(schema, dict):
            return
        base = self.base_of(schema, base)
        for keyword in _REFERENCES:
            reference = schema.get(keyword)
            if isinstance(reference, str):
                self.resource(reference, base)
        for child in self.children(schema, with_definitions=True):
            self.find_external(child, base)

    def resource(self, reference: str, base: str) -> tuple[str, Json]:
        """The URL and the root of the resource that a reference is in."""
        problem = uri_error(reference)
        if problem:
            raise SchemaError(f"Invalid URI reference '{reference}': {problem}")
        url = base if reference.startswith("#") or not reference else _join(base, reference)
        if url in self.resources:
            return url, self.resources[url]
        if url.removesuffix("#") in DRAFTS:
            return url, True
        if url.startswith("json-schema:") or "://" not in url:
            name, reason = reference, "No base URI is available"
        else:
            name, reason = url, f"Retrieval is disabled, cannot fetch {url}"
        raise SchemaError(f"Resource '{name}' is not present in a registry and retrieving it failed: {reason}")

    def resolve(self, reference: str, base: str) -> tuple[Json, str]:
        """The schema that a reference points to, and its base URI."""
        url, target = self.resource(reference, base)
        fragment = unquote(reference.partition("#")[2])
        if not fragment or target is True:
            return target, url
        if not fragment.startswith("/"):
            if (url, fragment) not in self.anchors:
                raise SchemaError(f"Anchor '{fragment}' does not exist")
            return self.anchors[url, fragment], url
        for step in fragment[1:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isascii() and name.isdigit() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise SchemaError(f"Pointer '{fragment}' does not exist")
            if isinstance(target, dict):
                url = self.base_of(target, url)
        return target, url

    def visit(self, root: Json, root_base: str) -> None:
        """Follow a schema and all that it refers to, each once, in document order."""
        tasks: list[tuple[str, Json, str]] = [("", root, root_base)]
        while tasks:
            keyword, item, base = tasks.pop()
            if keyword:
                tasks += [("", child, inner) for child, inner in reversed(self.follow(keyword, item, base))]
                continue
            if not isinstance(item, dict):
                check_schema(item, self.draft)
            elif id(item) not in self.compiled:
                self.compiled.add(id(item))
                base = self.base_of(item, base)
                alone = self.draft.ref_stands_alone and isinstance(item.get("$ref"), str)
                tasks += [(key, item[key], base) for key in (["$ref"] if alone else reversed(item))]

    def follow(self, keyword: str, item: Json, base: str) -> list[tuple[Json, str]]:
        """Check the value of one keyword; return the schemas in it or behind it, with their base URIs."""
        if keyword in _REFERENCES and isinstance(item, str):
            return [self.resolve(item, base)]
        if keyword == "pattern" and isinstance(item, str) and not is_pattern(item):
            raise SchemaError(f'{compact_json(item)} is not a "regex"')
        if keyword == "patternProperties" and isinstance(item, dict):
            for pattern, child in item.items():
                if not is_pattern(pattern):
                    raise SchemaError(f'{compact_json(child)} is not a "regex"')
        return [(child, base) for child in self.children({keyword: item})]


def _join(base: str, reference: str) -> str:
    try:
        return urldefrag(urljoin(base, reference)).url
    except ValueError:
        return reference
