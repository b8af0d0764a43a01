"""What the command line continues: a prompt, stdin or a file of JSON lines, each prompt with its sampling parameters.

What a prompt may be is `llm.py`'s; continuing them is the engine's.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deepinfer.engine.request import SamplingParams, check_cache_choice
from deepinfer.errors import RequestError

FORMS = 'a JSON string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
STDIN = Path("-")

_PARAMS = tuple(field.name for field in fields(SamplingParams))
_CACHE = ("cache_salt", "prefix_cache")
"""What a prompt object may say about the prefix cache, beside its prompt."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and how to continue it."""

    prompt: Any
    params: SamplingParams


def asked_for(prompt: str | None, file: Path | None, params: SamplingParams) -> list[Asked]:
    """Take the prompts from wherever they are given; `params` are for what a line of a file does not say itself.

    Raises RequestError when there is no prompt or two, and for what no model could do, before one is opened.
    """
    params.check()
    if file is not None:
        if prompt is not None:
            raise RequestError("expected a prompt or --prompts FILE, got both: leave one out")
        return read_prompts(_text(file).split("\n"), _name(file), params)
    if prompt is None and sys.stdin.isatty():
        raise RequestError('expected a prompt: deepinfer generate "Once upon a time", --prompts FILE, or text on stdin')
    if prompt is None or prompt == "-":
        return [Asked(_text(STDIN).removesuffix("\n"), params)]
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the prompt is expected in UTF-8: check the encoding of the terminal") from error
    return [Asked(prompt, params)]


def structured(json_schema: str | None, regex: str | None, grammar: str | None) -> dict[str, str] | None:
    """What an output must match, schema and grammar as text or as the name of a file; raises RequestError."""
    given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    named = {name: text for name, text in given.items() if text is not None}
    for name in ("json_schema", "grammar"):
        if name in named and not any(sign in named[name] for sign in ("{", "::=")):
            named[name] = _text(Path(named[name]), f"a file of {name}, or its text")
    return named or None


def read_prompts(lines: Iterable[str], source: str, params: SamplingParams) -> list[Asked]:
    """Parse one prompt from each line that is not blank; an object may also hold sampling parameters and
    `cache_salt` and `prefix_cache`.

    Raises RequestError for a line that is no JSON or no prompt, or whose parameters make no sense, naming `source` and
    the line, before anything is run.
    """
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.strip())
        except (json.JSONDecodeError, RecursionError) as error:
            raise RequestError(f"{source}, line {number}: expected {FORMS}; got no JSON: {error}") from error
        where = f"{source}, line {number}"
        own, cache = _taken(value, _PARAMS), _taken(value, _CACHE)
        if not _is_prompt(value):
            raise RequestError(f"{where}: expected {FORMS}; got {line.strip():.60}{_hint(value)}")
        try:
            check_cache_choice(*(cache.get(name) for name in _CACHE))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
        found.append(Asked(value | cache if cache else value, _merged(params, own, where)))
    if not found:
        raise RequestError(f"{source}: expected one prompt a line, found none")
    return found


def _taken(value: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Take `names` out of an object."""
    return {name: value.pop(name) for name in names if name in value} if isinstance(value, dict) else {}


def _hint(value: object) -> str:
    """What may be wrong with an object that has a prompt and more."""
    more = sorted(set(value) - {"prompt", "prompt_token_ids"}) if isinstance(value, dict) else []
    if not more or not isinstance(value, dict) or len(more) == len(value):
        return ""
    near = get_close_matches(more[0], [*_PARAMS, *_CACHE], 1)
    return f": no parameter is named {more[0]!r}" + (f", did you mean {near[0]!r}?" if near else "")


def _merged(params: SamplingParams, own: dict[str, Any], where: str) -> SamplingParams:
    if not own:
        return params
    merged = replace(params, **own)
    try:
        merged.check()
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
    return merged


def _name(file: Path) -> str:
    return "stdin" if file == STDIN else str(file)


def _text(file: Path, what: str = "a file of prompts") -> str:
    """Read a file, or stdin for "-"; raises RequestError."""
    name = _name(file)
    try:
        return (sys.stdin.buffer.read() if file == STDIN else file.read_bytes()).decode()
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}; expected {what}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: expected UTF-8, byte {error.start} is {error.object[error.start]:#x}") from error


def _is_prompt(value: object) -> bool:
    match value:
        case str() | {"prompt": str()}:
            return not isinstance(value, dict) or len(value) == 1
        case {"prompt_token_ids": list(ids)}:
            return isinstance(value, dict) and len(value) == 1 and _are_ids(ids)
        case list(ids):
            return _are_ids(ids)
        case _:
            return False


def _are_ids(ids: list[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in ids)
