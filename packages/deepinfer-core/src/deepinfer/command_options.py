"""Options that commands share: those that are arguments of `LLM`, how to print, and what the words of an option mean.

The commands are `cli.py`'s; whether a choice makes sense is judged by `LLM`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, override

import click

from deepinfer.errors import ConfigError

LONGEST_SIZE = 40
"""Characters of a size: more is a slip, and may be a number that no float holds."""

DRAFT_WORDS = ("off", "auto", "on")


class DraftCommand(click.Command):
    """A command whose `--draft` may stand alone: what follows is its word only when it is one, and else the prompt."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else args
        alone = [
            place
            for place, arg in enumerate(options)
            if arg == "--draft" and (place + 1 == len(args) or args[place + 1] not in DRAFT_WORDS)
        ]
        return super().parse_args(ctx, ["--draft=auto" if place in alone else arg for place, arg in enumerate(args)])


def memory_bytes(text: str, name: str = "memory") -> int:
    """Read a size such as "141GB", "128 GiB", "8x141GB" or a number of bytes; raises ConfigError."""
    match = re.fullmatch(r"(?:(\d+) ?[x*] ?)?(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None or len(text) > LONGEST_SIZE:
        raise ConfigError(f"{name} is expected as 141GB, 128GiB, 8x141GB or a number of bytes, got {text!r}")
    count, number, unit = match.groups()
    power = "KMGT".index(unit[0].upper()) + 1 if unit else 0
    return int(int(count or 1) * float(number) * (1024 if unit and len(unit) == 2 else 1000) ** power)


def number_or_word(_: click.Context, __: click.Parameter, text: str) -> int | str:
    """A number as a number; LLM judges everything else."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def some(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...] | None:
    """None for an option that was not given."""
    return values or None


accelerator = click.option("--accelerator", metavar="NAME", help='Name of an accelerator, or "auto".  [default: auto]')
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
debug = click.option("--debug", is_flag=True, help="Show where an error came from.")

_ENGINE = (
    click.option("--dtype", default="auto", help='Of activations: "auto", "bfloat16", "float32" or "float64".'),
    click.option("--kv-cache-dtype", default="auto", help='"auto": quantised as trained; "model": as activations.'),
    click.option(
        "--decoder-replay",
        default="auto",
        callback=number_or_word,
        help='"auto", "off", or how many last tokens run the whole model.',
    ),
    click.option("--max-model-len", type=int, help="Longest sequence, prompt and completion."),
    click.option("--max-num-seqs", default=256, help="Sequences that run at once."),
    click.option("--max-num-batched-tokens", default=2048, help="Rows of a step, of prompts and of decoding."),
    click.option(
        "--max-prefill-tokens-per-step",
        type=int,
        help="Of these, most of prompts while a text grows: bounds its pauses.  [default: what is left]",
    ),
    click.option("--overlap/--no-overlap", default=True, help="Prepare a step while the device runs the one before."),
    click.option(
        "--graphs/--no-graphs", default=True, help="Replay steps of few rows from recorded graphs, where there are any."
    ),
    click.option("--memory-fraction", type=float, help="Share of free memory for weights and cache.  [default: 0.9]"),
    click.option("--deterministic", is_flag=True, help="The same bits whatever else runs; slower."),
    click.option("--prefix-cache", default="exact", help='How known prompts go on: "exact", "replay" or "off".'),
    click.option(
        "--prefix-cache-host-bytes", metavar="SIZE", default="0", help="Host memory behind it, as 8GB or 8GiB."
    ),
    click.option("--prefix-cache-dir", type=click.Path(path_type=Path), help="Folder that keeps it beyond the end."),
    click.option("--prefix-cache-disk-bytes", metavar="SIZE", default="16GiB", help="Most bytes of that folder."),
    click.option(
        "--draft",
        default="off",
        type=click.Choice(DRAFT_WORDS),
        help="Let the model's draft stages guess tokens ahead: auto, or --draft alone: as many as pay; on: always.",
    ),
    click.option("--draft-rule", default="match", help='"match": same text as without; "chain", "block": same law.'),
)
ENGINE_OPTIONS = (
    "dtype",
    "kv_cache_dtype",
    "decoder_replay",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_tokens_per_step",
    "overlap",
    "graphs",
    "memory_fraction",
    "deterministic",
    "prefix_cache",
    "prefix_cache_host_bytes",
    "prefix_cache_dir",
    "prefix_cache_disk_bytes",
    "draft",
    "draft_rule",
)
"""The names of `engine_options`, which are those of `LLM`'s arguments."""


def engine_options[Function: Callable[..., Any]](command: Function) -> Function:
    """Add the options that are arguments of `LLM`."""
    for option in reversed(_ENGINE):
        command = option(command)
    return command


def engine_choices(choices: dict[str, Any]) -> dict[str, Any]:
    """Take out of `choices` what is for `LLM`, sizes as bytes; raises ConfigError."""
    engine = {name: choices.pop(name) for name in ENGINE_OPTIONS}
    for name in ("prefix_cache_host_bytes", "prefix_cache_disk_bytes"):
        engine[name] = memory_bytes(engine[name], f"--{name.replace('_', '-')}")
    return engine
