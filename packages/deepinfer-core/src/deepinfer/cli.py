"""The command line: generate, accelerators, doctor, plan, tiny.

Each command says what it needs and hands over; torch is imported only by those that compute.
"""

import dataclasses
import json
import logging
import re
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deepinfer.console import reported, show_log
from deepinfer.environment import VARIABLES, Environment, prepare_for_torch, read_environment
from deepinfer.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepinfer.llm import Increment, Prompt

TINY = "tiny"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

_log = logging.getLogger(__name__)

_VARIABLES = "\n".join(f"  {name:<24}{text}" for name, text in VARIABLES.items())

Accelerator = Annotated[str | None, typer.Option(help='Name of an accelerator, or "auto".  [default: auto]')]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Debug = Annotated[bool, typer.Option(help="Show where an error came from.")]


@app.callback(
    help="Inference for DeepSeek-V4.1-Flash and V4-Flash: exact, then fast.",
    epilog=f"""\b
Examples:
  deepinfer generate "Once upon a time" --max-tokens 64
  deepinfer accelerators
  deepinfer plan deepseek-ai/DeepSeek-V4.1-Flash --memory 141GB

\b
Environment:
{_VARIABLES}

`deepinfer COMMAND --help` explains a command.""",
    invoke_without_command=True,
)
def _start(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"deepinfer-core {version_of('deepinfer-core')}")
        raise typer.Exit
    with reported():
        environment = read_environment()
        show_log(environment.log_level)
        prepare_for_torch()
        context.obj = environment


@app.command(
    epilog="""\b
Examples:
  deepinfer generate "Once upon a time" --max-tokens 64
  echo "Once upon a time" | deepinfer generate --temperature 0
  deepinfer generate --prompts prompts.jsonl --json > completions.jsonl
  deepinfer generate "def f(" --model /path/to/checkpoint --stop "\\n\\n"

A line of a prompts file is a JSON string, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": IDS}.
The exit code is 1 when a prompt could not be continued, 2 when nothing could be done, 130 after Ctrl-C.""",
)
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help='The text to continue; "-" or nothing: from stdin.')] = None,
    *,
    prompts: Annotated[Path | None, typer.Option(help='File of JSON lines, a prompt each; "-": from stdin.')] = None,
    model: Annotated[
        str | None,
        typer.Option(help='Checkpoint folder, model of the Hugging Face Hub, or "tiny".  [default: tiny, embedded]'),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="End after so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the best token, 1 samples as the model says.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the best tokens up to this probability; 1: all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep so many best tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens of this share of the best one's probability.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End where this text comes; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after end-of-sequence.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: so many best tokens at each position.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling noise.")] = 0,
    accelerator: Accelerator = None,
    dtype: Annotated[str, typer.Option(help='Of activations: "auto", "bfloat16", "float32", "float64".')] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help='"auto": quantised as trained; "model": as activations.')
    ] = "auto",
    decoder_replay: Annotated[str, typer.Option(help='"auto", "off", or the last tokens that run it all.')] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence, prompt and completion.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, or a file of prompts; text comes to stdout as it is made."""
    with reported(debug=debug):
        wanted = _wanted(prompt, prompts)
        environment: Environment = context.obj
        name = model or environment.model or TINY
        if name == TINY:
            typer.echo("deepinfer: the embedded tiny model: random weights, so the text means nothing", err=True)
        from deepinfer.engine.request import SamplingParams
        from deepinfer.llm import LLM
        from deepinfer.loading_bar import LoadingBar

        llm = LLM(
            name,
            accelerator=accelerator or environment.accelerator,
            dtype=dtype,  # type: ignore[arg-type]  # LLM checks it
            kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
            decoder_replay=_replay(decoder_replay),
            max_model_len=max_model_len,
            seed=seed,
            progress=LoadingBar(),
        )
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        begin = time.perf_counter()
        increments = llm.generate(wanted, params, stream=True)
        tokens, failed = (_print_json if as_json else _print_text)(increments, len(wanted))
        seconds = time.perf_counter() - begin
        _log.info("%d tokens in %.2f s, %.1f a second", tokens, seconds, tokens / seconds)
        if failed:
            raise typer.Exit(1)


@app.command()
def accelerators(*, as_json: AsJson = False) -> None:
    """List the accelerators that are installed, and why one cannot be used."""
    with reported():
        from deepinfer.accelerator.registry import list_accelerators

        found = list_accelerators()
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(candidate) for candidate in found], indent=1))
            return
        width = max(len(candidate.name) for candidate in found)
        for candidate in found:
            state = "usable" if candidate.reason is None else candidate.reason
            typer.echo(f"{candidate.name:<{width}}  {candidate.wheel}: {state}")


@app.command(
    epilog="""\b
Examples:
  deepinfer doctor
  deepinfer doctor --accelerator nvidia --model deepseek-ai/DeepSeek-V4.1-Flash
  deepinfer doctor --check --json

The exit code is 0 when nothing is wrong, else 1.""",
)
def doctor(
    context: typer.Context,
    *,
    accelerator: Accelerator = None,
    model: Annotated[str | None, typer.Option(help="Judge the ops for this model.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare every op with the reference; takes a while.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look at the installation: system, wheels, accelerator, and which implementation each op has."""
    with reported(debug=debug):
        from deepinfer.doctor import diagnose, render
        from deepinfer.model.read_config import read_config

        environment: Environment = context.obj
        config = None
        if name := model or environment.model:
            with _folder(name) as folder:
                config = read_config(folder)
        diagnosis = diagnose(accelerator or environment.accelerator, config, conformance=check)
        typer.echo(json.dumps(diagnosis.as_dict(), indent=1) if as_json else render(diagnosis))
        if not diagnosis.healthy:
            raise typer.Exit(1)


@app.command(
    epilog="""\b
Examples:
  deepinfer plan deepseek-ai/DeepSeek-V4.1-Flash
  deepinfer plan /path/to/checkpoint --memory 8x141GB --sequences 64

A folder with nothing but config.json is enough; of a model of the Hub only that is downloaded.""",
)
def plan(
    model: Annotated[str, typer.Argument(help='Checkpoint folder, model of the Hugging Face Hub, or "tiny".')],
    *,
    memory: Annotated[str | None, typer.Option(help="Memory of the devices: 141GB, 128GiB, 8x141GB, bytes.")] = None,
    sequences: Annotated[int, typer.Option(help="How many sequences share it.")] = 1,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say how much memory a model takes and how much context is left, before anything is loaded."""
    with reported(debug=debug):
        size = None if memory is None else memory_bytes(memory)
        from deepinfer.model.plan import make_plan, render

        with _folder(model) as folder:
            made = make_plan(folder, memory_bytes=size, sequences=sequences)
        typer.echo(json.dumps(made.as_dict(), indent=1) if as_json else render(made))


@app.command()
def tiny(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    *,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    family: Annotated[Literal["deepseek_v41", "deepseek_v4"], typer.Option()] = "deepseek_v41",
    debug: Debug = False,
) -> None:
    """Write the tiny model, random weights in every layer kind and format, as a checkpoint folder."""
    with reported(debug=debug):
        from deepinfer.model.tiny import write_tiny

        write_tiny(folder, seed=seed, family=family)
        typer.echo(f"{folder}: a tiny {family} checkpoint of random weights", err=True)


def memory_bytes(text: str) -> int:
    """Read a size such as "141GB", "128 GiB", "8x141GB" or a number of bytes; raises ConfigError."""
    match = re.fullmatch(r"(?:(\d+) ?[x*] ?)?(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"memory is expected as 141GB, 128GiB, 8x141GB or a number of bytes, got {text!r}")
    count, number, unit = match.groups()
    power = "KMGT".index(unit[0].upper()) + 1 if unit else 0
    return int(int(count or 1) * float(number) * (1024 if unit and len(unit) == 2 else 1000) ** power)


def _wanted(prompt: str | None, file: Path | None) -> "list[Prompt]":
    """Take the prompts from wherever they are given; raises RequestError when that is nowhere, or twice."""
    if file is not None:
        if prompt is not None:
            raise RequestError("expected a prompt or --prompts FILE, got both: leave one out")
        from deepinfer.prompt_file import read_prompts

        if str(file) == "-":
            return read_prompts(sys.stdin, "stdin")
        try:
            with file.open(encoding="utf-8") as lines:
                return read_prompts(lines, str(file))
        except OSError as error:
            raise RequestError(f"--prompts {file}: {error.strerror}; expected a file of JSON lines") from error
    if prompt is not None and prompt != "-":
        return [prompt]
    if prompt is None and sys.stdin.isatty():
        raise RequestError('expected a prompt: deepinfer generate "Once upon a time", --prompts FILE, or text on stdin')
    return [sys.stdin.read().removesuffix("\n")]


@contextmanager
def _folder(model: str) -> "Iterator[Path]":
    """Give the folder of a model, of which at least config.json is there."""
    from deepinfer.model.checkpoint import open_checkpoint
    from deepinfer.model.download import CONFIG_ONLY, Hub, fetch

    if model == TINY:
        checkpoint = open_checkpoint(TINY)  # the folder lives as long as this object
        yield checkpoint.folder
    else:
        yield fetch(model, Hub(), CONFIG_ONLY)


def _replay(text: str) -> Any:
    """A number as a number; LLM judges everything else."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _print_text(increments: "Iterator[Increment]", count: int) -> tuple[int, int]:
    """Write texts as they come, those of several prompts in order; returns tokens and failed prompts."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show a character
    waiting: dict[int, list[str]] = {}
    ended: set[int] = set()
    current = tokens = failed = 0
    for step in increments:
        tokens += len(step.token_ids)
        waiting.setdefault(step.index, []).append(step.text)
        if step.completion is not None:
            ended.add(step.index)
            if step.completion.error is not None:
                failed += 1
                where = f"prompt {step.index + 1}: " if count > 1 else ""
                typer.secho(f"error: {where}{step.completion.error}", fg=typer.colors.RED, err=True)
        while current in waiting:
            sys.stdout.write("".join(waiting.pop(current)))
            if current in ended:
                sys.stdout.write("\n")
                current += 1
        sys.stdout.flush()
    return tokens, failed


def _print_json(increments: "Iterator[Increment]", count: int) -> tuple[int, int]:
    """Write one JSON object a completion, in the order of the prompts; returns tokens and failed prompts."""
    ended: dict[int, dict[str, Any]] = {}
    written = tokens = failed = 0
    for step in increments:
        tokens += len(step.token_ids)
        if step.completion is None:
            continue
        failed += step.completion.error is not None
        ended[step.index] = {"index": step.index, **dataclasses.asdict(step.completion)}
        while written in ended:
            typer.echo(json.dumps(ended.pop(written), ensure_ascii=False))
            written += 1
    assert written == count
    return tokens, failed


def main() -> None:
    """Run the command line."""
    app(prog_name="deepinfer")


if __name__ == "__main__":
    main()
