"""How `deepinfer generate` writes what comes: texts as they grow, or JSON lines of whole completions.

Both return how many tokens were generated and how many prompts failed. Errors go to stderr.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from deepinfer.engine.request import Increment


def print_text(increments: Iterator[Increment], count: int) -> tuple[int, int]:
    """Write texts as they come; those of several prompts in order, each behind a line that names its prompt."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show a character
    waiting: dict[int, list[str]] = {}
    begun, ended = set[int](), set[int]()
    current = tokens = failed = 0
    for step in increments:
        tokens += len(step.token_ids)
        waiting.setdefault(step.index, []).append(step.text)
        if step.completion is not None:
            ended.add(step.index)
            if step.completion.error is not None:
                failed += 1
                where = f"prompt {step.index + 1}: " if count > 1 else ""
                click.secho(f"error: {where}{step.completion.error}", fg="red", err=True)
        while current in waiting:
            if count > 1 and current not in begun:
                begun.add(current)
                sys.stdout.write(f"[prompt {current + 1} of {count}]\n")
            sys.stdout.write("".join(waiting.pop(current)))
            if current in ended:
                sys.stdout.write("\n")
                current += 1
        sys.stdout.flush()
    return tokens, failed


def print_json(increments: Iterator[Increment], count: int) -> tuple[int, int]:
    """Write one JSON object a completion, in the order of the prompts."""
    ended: dict[int, dict[str, Any]] = {}
    written = tokens = failed = 0
    for step in increments:
        tokens += len(step.token_ids)
        if step.completion is None:
            continue
        failed += step.completion.error is not None
        ended[step.index] = {"index": step.index, **dataclasses.asdict(step.completion)}
        for name in ("logprobs", "prompt_logprobs"):  # whole rows are tensors
            if hasattr(rows := ended[step.index][name], "tolist"):
                ended[step.index][name] = rows.tolist()
        while written in ended:
            click.echo(json.dumps(ended.pop(written), ensure_ascii=False))
            written += 1
    assert written == count
    return tokens, failed
