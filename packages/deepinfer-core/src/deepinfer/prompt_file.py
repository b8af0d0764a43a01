"""Prompts from a file of JSON lines, one a line, with errors that name the line.

What a prompt may be is `llm.py`'s; continuing them is the engine's.
"""

import json
from collections.abc import Iterable
from typing import Any

from deepinfer.errors import RequestError

FORMS = 'a JSON string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def read_prompts(lines: Iterable[str], source: str) -> list[Any]:
    """Parse one prompt from each line that is not blank.

    Raises RequestError for a line that is no JSON or no prompt, naming `source` and the line, before anything is run.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.strip())
        except (json.JSONDecodeError, RecursionError) as error:
            raise RequestError(f"{source}, line {number}: expected {FORMS}; got no JSON: {error}") from error
        if not _is_prompt(value):
            raise RequestError(f"{source}, line {number}: expected {FORMS}; got {line.strip():.60}")
        prompts.append(value)
    if not prompts:
        raise RequestError(f"{source}: expected one prompt a line, found none")
    return prompts


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
