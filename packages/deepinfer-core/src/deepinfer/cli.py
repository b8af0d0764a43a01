"""The command line: generate, chat, bench, accelerators, doctor, warm, verify-determinism, plan, tiny.

Each command says what it needs and hands over; torch is imported only by those that compute.
"""

import dataclasses
import json
import logging
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.exceptions import Exit

from deepinfer import command_options as options
from deepinfer.console import reported, show_log
from deepinfer.environment import VARIABLES, Environment, prepare_for_torch, read_environment
from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO, TINY = "demo", "tiny"

EMBEDDED = {
    DEMO: "the embedded demo model: ten million parameters trained on old English prose and small tasks",
    TINY: "the tiny model: random weights, so the text means nothing",
}
"""Models that need no files of the user, and what is said when one is used."""

_log = logging.getLogger(__name__)

_VARIABLES = "\n".join(f"  {name:<24}{text}" for name, text in VARIABLES.items())


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog=f"""\b
Examples:
  deepinfer generate "Once upon a time" --max-tokens 64
  deepinfer accelerators
  deepinfer plan deepseek-ai/DeepSeek-V4.1-Flash --memory 141GB

\b
Environment:
{_VARIABLES}

`deepinfer COMMAND --help` explains a command.""",
)
@click.version_option(package_name="deepinfer-core", message="deepinfer-core %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Inference for DeepSeek-V4.1-Flash and V4-Flash: exact, then fast."""
    with reported():
        show_log("warning")  # until the environment says otherwise: it may be what is wrong
        context.obj = read_environment()
        show_log(context.obj.log_level)
        prepare_for_torch()


@app.command(
    cls=options.DraftCommand,
    epilog="""\b
Examples:
  deepinfer generate "Once upon a time" --max-tokens 64
  echo "Once upon a time" | deepinfer generate --temperature 0
  deepinfer generate --prompts prompts.jsonl --json > completions.jsonl
  deepinfer generate "def f(" --model /path/to/checkpoint --stop $'\\n\\n'

A line of a prompts file is a JSON string, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": IDS}.
Beside these, an object may hold what differs for this prompt: {"prompt": TEXT, "max_tokens": 5, "seed": 1}, and
"cache_salt" and "prefix_cache".
The exit code is 1 when a prompt could not be continued, 2 when nothing could be done, 130 after Ctrl-C.""",
)
@click.argument("prompt", required=False)
@click.option("--prompts", type=click.Path(path_type=Path), help='File of JSON lines, a prompt each; "-": from stdin.')
@click.option(
    "--model", help='Checkpoint folder, model of the Hub, "demo" or "tiny".  [default: demo, the embedded one]'
)
@click.option("--max-tokens", default=128, help="End after so many tokens.")
@click.option("--temperature", default=1.0, help="0 takes the best token, 1 samples as the model says.")
@click.option("--top-p", default=1.0, help="Keep the best tokens up to this probability; 1: all.")
@click.option("--top-k", default=0, help="Keep so many best tokens; 0: all.")
@click.option("--min-p", default=0.0, help="Keep tokens of this share of the best one's probability.")
@click.option("--repetition-penalty", default=1.0, help="Above 1 repeats less of prompt and output.")
@click.option("--presence-penalty", default=0.0, help="Above 0 repeats less: once a token that the output has.")
@click.option("--frequency-penalty", default=0.0, help="The same for each time that the output has the token.")
@click.option(
    "--bad-word", "bad_words", multiple=True, callback=options.some, help="Never write this word; may be repeated."
)
@click.option("--json-schema", metavar="FILE_OR_TEXT", help="The output is JSON that is valid against this schema.")
@click.option("--regex", help="The whole output matches this regular expression.")
@click.option("--grammar", metavar="FILE_OR_TEXT", help="The output matches the rule root of this EBNF grammar.")
@click.option("--min-tokens", default=0, help="Do not end before so many tokens.")
@click.option("--stop", multiple=True, help="End where this text comes; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after end-of-sequence.")
@click.option("--logprobs", type=int, help="With --json: so many best tokens at each position.")
@click.option("--seed", default=0, help="Seed of the sampling noise.")
@options.accelerator
@options.engine_options
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Write a timeline to this file, for chrome://tracing or Perfetto."
)
@options.as_json
@options.debug
@click.pass_obj
def generate(
    environment: Environment,
    /,
    *,
    prompt: str | None,
    prompts: Path | None,
    model: str | None,
    accelerator: str | None,
    trace: Path | None,
    as_json: bool,
    debug: bool,
    **choices: Any,
) -> None:
    """Continue PROMPT, or a file of prompts; text comes to stdout as it is made.

    Without PROMPT, or with "-", the text to continue is read from stdin.
    """
    with reported(debug=debug):
        name = model or environment.model or DEMO
        import torch

        from deepinfer.completion_output import print_json, print_text
        from deepinfer.draft_output import with_drafts
        from deepinfer.engine.request import SamplingParams
        from deepinfer.llm import LLM
        from deepinfer.loading_bar import LoadingBar
        from deepinfer.prompt_file import asked_for, structured

        engine = options.engine_choices(choices) | {"seed": choices.pop("seed")}
        choices["structured"] = structured(choices.pop("json_schema"), choices.pop("regex"), choices.pop("grammar"))
        asked = asked_for(prompt, prompts, SamplingParams(**choices))
        if name in EMBEDDED:
            click.echo(f"deepinfer: {EMBEDDED[name]}", err=True)
            torch.set_num_threads(1)  # its ops are so small that handing them out takes longer than doing them
        llm = LLM(name, accelerator=accelerator or environment.accelerator, progress=LoadingBar(), **engine)
        begin = time.perf_counter()
        with llm.observe(trace):
            increments = llm.generate([one.prompt for one in asked], [one.params for one in asked], stream=True)
            shown = with_drafts(increments, paint=not as_json) if llm.drafts else increments
            tokens, failed = (print_json if as_json else print_text)(shown, len(asked))
        seconds = time.perf_counter() - begin
        _log.info("%d tokens in %.2f s, %.1f a second", tokens, seconds, tokens / seconds)
        if failed:
            raise Exit(1)


@app.command(
    cls=options.DraftCommand,
    epilog="""\b
Examples:
  deepinfer chat
  deepinfer chat --tools examples/tools.json --draft
  deepinfer chat --model /path/to/checkpoint --think --max-tokens 2000

Lines that begin with / are commands; /help shows them. Where the model calls a tool, type what the tool returns.
Ctrl-C stops an answer, Ctrl-D ends. Lines may also come from a file or a pipe.""",
)
@click.option(
    "--model", help='Checkpoint folder, model of the Hub, "demo" or "tiny".  [default: demo, the embedded one]'
)
@options.accelerator
@click.option("--system", help="System message.")
@click.option("--tools", type=click.Path(path_type=Path), help="JSON list of tools, as in Chat Completions.")
@click.option("--think", is_flag=True, help="Let the model think first.")
@click.option("--temperature", default=0.0, help="0 takes the best token, 1 samples as the model says.")
@click.option("--max-tokens", default=512, help="Cut answers after so many tokens.")
@click.option(
    "--draft",
    default="off",
    type=click.Choice(options.DRAFT_WORDS),
    help="Let the model's draft stages guess tokens ahead, as `generate --draft`.",
)
@options.debug
@click.pass_obj
def chat(
    environment: Environment,
    /,
    *,
    model: str | None,
    accelerator: str | None,
    tools: Path | None,
    think: bool,
    debug: bool,
    **choices: Any,
) -> None:
    """Talk with a model, which may call tools."""
    with reported(debug=debug):
        name = model or environment.model or DEMO
        import torch

        from deepinfer.terminal_chat import ChatOptions, Session, read_tools

        if name in EMBEDDED:
            click.echo(f"deepinfer: {EMBEDDED[name]}", err=True)
            torch.set_num_threads(1)
        offered = [] if tools is None else read_tools(tools)
        where = accelerator or environment.accelerator
        Session(ChatOptions(name, where, tools=offered, thinking=think, **choices)).run()


@app.command(
    cls=options.DraftCommand,
    epilog="""\b
Examples:
  deepinfer bench                                    32 requests at once: the most tokens a second
  deepinfer bench --rate 1 --rate 2 --rate 4 --plot load.png
  deepinfer bench --prompt-tokens 512:2048 --shared-prefix 0.9 --model /path/to/checkpoint
  deepinfer bench --arrivals day.jsonl --json

\b
What to look at:
  time to first token     what a user waits before anything comes; it grows without end when the offered rate is more
                          than the engine can do: requests queue
  time per output token   the pace of the text; it grows with how many requests run at once
  output tokens/s         what the machine gives in all; best with all at once

A run with --rate sends requests at random moments, so many a second in the mean, whether the engine keeps up or not;
the same seed gives the same requests at every rate. A line of an arrivals file is
{"time": seconds, "prompt_tokens": number, "output_tokens": number}. Prompts are random tokens: what the model says
does not matter, how long it takes does.""",
)
@click.option("--model", help='Checkpoint folder, model of the Hugging Face Hub, or "tiny".  [default: tiny]')
@options.accelerator
@click.option("--requests", default=32, help="How many requests a run has.")
@click.option("--prompt-tokens", default="128", help="Length of a prompt, or a range as 64:256.")
@click.option("--output-tokens", default="64", help="Tokens that are generated, or a range.")
@click.option("--shared-prefix", default=0.0, help="Share of each prompt, 0 to 1, that all have in common.")
@click.option("--rate", "rates", type=float, multiple=True, help="Requests a second; may be repeated.  [default: inf]")
@click.option("--arrivals", type=click.Path(path_type=Path), help="Take times and lengths from this JSONL file.")
@click.option("--temperature", default=1.0, help="0 takes the best token.")
@click.option("--warmup", default=2, help="Requests before the measurement, which do not count.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of arrivals, lengths and tokens.")
@options.engine_options
@click.option("--plot", type=click.Path(path_type=Path), help="Draw latency against load into this PNG.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a timeline of all runs, as `generate --trace`.")
@options.as_json
@options.debug
@click.pass_obj
def bench(
    environment: Environment,
    /,
    *,
    model: str | None,
    accelerator: str | None,
    trace: Path | None,
    as_json: bool,
    debug: bool,
    **choices: Any,
) -> None:
    """Measure throughput and latency of requests that come all at once, at random, or as a file says."""
    with reported(debug=debug):
        import rich
        import torch

        from deepinfer.bench.command import draw_into, parse, run_all
        from deepinfer.bench.report import as_dict, table
        from deepinfer.llm import LLM
        from deepinfer.loading_bar import LoadingBar

        engine = options.engine_choices(choices)
        wanted = parse(**choices)
        name = model or environment.model or TINY
        if name == TINY:
            torch.set_num_threads(1)
        llm = LLM(name, accelerator=accelerator or environment.accelerator, progress=LoadingBar(), **engine)
        with llm.observe(trace):
            results = run_all(llm, wanted)
        if wanted.plot is not None:
            draw_into(wanted.plot, results, name)
        if as_json:
            click.echo(json.dumps(as_dict(results, model=name), indent=1))
        else:
            rich.print(table(results))
        if any(result.failed for result in results):
            raise Exit(1)


@app.command()
@options.as_json
def accelerators(*, as_json: bool) -> None:
    """List the accelerators that are installed, and why one cannot be used."""
    with reported():
        from deepinfer.accelerator.registry import list_accelerators

        found = list_accelerators()
        if as_json:
            click.echo(json.dumps([dataclasses.asdict(candidate) for candidate in found], indent=1))
            return
        width = max(len(candidate.name) for candidate in found)
        for candidate in found:
            state = "usable" if candidate.reason is None else candidate.reason
            click.echo(f"{candidate.name:<{width}}  {candidate.wheel}: {state}")


@app.command(
    epilog="""\b
Examples:
  deepinfer doctor
  deepinfer doctor --accelerator nvidia --model deepseek-ai/DeepSeek-V4.1-Flash
  deepinfer doctor --check --json

The exit code is 0 when nothing is wrong, else 1.""",
)
@options.accelerator
@click.option("--model", help="Judge the ops for this model.")
@click.option("--check", is_flag=True, help="Compare every op with the reference; takes seconds to minutes.")
@options.as_json
@options.debug
@click.pass_obj
def doctor(
    environment: Environment, /, *, accelerator: str | None, model: str | None, check: bool, as_json: bool, debug: bool
) -> None:
    """Look at the installation: system, wheels, accelerator, and which implementation each op has."""
    with reported(debug=debug):
        from deepinfer.doctor import diagnose, render
        from deepinfer.model.read_config import read_config

        config = None
        if name := model or environment.model:
            with _folder(name) as folder:
                config = read_config(folder)
        diagnosis = diagnose(accelerator or environment.accelerator, config, conformance=check)
        click.echo(json.dumps(diagnosis.as_dict(), indent=1) if as_json else render(diagnosis))
        if not diagnosis.healthy:
            raise Exit(1)


@app.command(
    epilog="""\b
Examples:
  deepinfer warm
  deepinfer warm --accelerator nvidia

An accelerator compiles a kernel when it is first needed. This compiles all of them ahead, on all cores, and keeps them
for later processes: for an image of a container, or before a first request is timed.""",
)
@options.accelerator
@options.debug
@click.pass_obj
def warm(environment: Environment, /, *, accelerator: str | None, debug: bool) -> None:
    """Compile the accelerator's kernels now and keep them."""
    with reported(debug=debug):
        from deepinfer.accelerator.registry import open_accelerator

        opened = open_accelerator(accelerator or environment.accelerator)
        begin = time.perf_counter()
        count = opened.warm()
        click.echo(f"{opened.name}: {count} kernels compiled and kept, {time.perf_counter() - begin:.1f} s")


@app.command(
    "verify-determinism",
    epilog="""\b
Examples:
  deepinfer verify-determinism
  deepinfer verify-determinism --model /path/to/checkpoint --accelerator cpu
  deepinfer verify-determinism --json > here.json

LLM(deterministic=True) promises the same bits for a request whatever else runs, however its prompt is cut into chunks,
and after it was preempted. This command runs each op on rows together and alone, and the same requests in all those
ways, and prints a hash of each result: of one model all ways must have the same. Hashes of two machines are equal when
their results are; other processors, versions or numbers of threads may round otherwise.
The exit code is 1 when a hash differs within the run, 2 when the accelerator cannot be deterministic.""",
)
@click.option("--model", help='Checkpoint folder, model of the Hugging Face Hub, or "tiny".  [default: tiny]')
@options.accelerator
@options.as_json
@options.debug
@click.pass_obj
def verify_determinism(
    environment: Environment, /, *, model: str | None, accelerator: str | None, as_json: bool, debug: bool
) -> None:
    """Prove on this machine that results do not depend on load, and print a hash for each case."""
    with reported(debug=debug):
        from deepinfer.accelerator.registry import open_accelerator
        from deepinfer.determinism import count_proofs, describe, render, verify
        from deepinfer.loading_bar import counted

        opened = open_accelerator(accelerator or environment.accelerator)
        proofs = list(counted("proving", verify(model or environment.model or TINY, opened), count_proofs(opened)))
        same = all(proof.fault is None for proof in proofs)
        if as_json:
            cases = [dataclasses.asdict(proof) for proof in proofs]
            click.echo(json.dumps({"deterministic": same, "accelerator": describe(opened), "cases": cases}, indent=1))
        else:
            click.echo(render(proofs))
            click.echo(f"{'deterministic' if same else 'NOT deterministic'} on {describe(opened)}")
        if not same:
            raise Exit(1)


@app.command(
    epilog="""\b
Examples:
  deepinfer plan deepseek-ai/DeepSeek-V4.1-Flash
  deepinfer plan /path/to/checkpoint --memory 8x141GB --sequences 64

A folder with nothing but config.json is enough; of a model of the Hub only that is downloaded.""",
)
@click.argument("model")
@click.option("--memory", metavar="SIZE", help="Memory of the devices: 141GB, 128GiB, 8x141GB or bytes.")
@click.option("--sequences", default=1, help="How many sequences share it.")
@options.as_json
@options.debug
def plan(*, model: str, memory: str | None, sequences: int, as_json: bool, debug: bool) -> None:
    """Say how much memory MODEL takes and how much context is left, before anything is loaded.

    MODEL is a checkpoint folder, a model of the Hugging Face Hub, "demo" or "tiny".
    """
    with reported(debug=debug):
        size = None if memory is None else options.memory_bytes(memory)
        from deepinfer.model.plan import make_plan, render

        with _folder(model) as folder:
            made = make_plan(folder, memory_bytes=size, sequences=sequences)
        click.echo(json.dumps(made.as_dict(), indent=1) if as_json else render(made))
        if memory is not None and re.match(r"\s*(?!1\s*[x*])\d+\s*[x*]", memory):
            click.echo("deepinfer: running one model on several devices is not built yet", err=True)


@app.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", default=0, type=click.IntRange(0, 2**63 - 1), help="Seed of the weights.")
@click.option("--family", type=click.Choice(["deepseek_v41", "deepseek_v4"]), default="deepseek_v41")
@options.debug
def tiny(*, folder: Path, seed: int, family: Literal["deepseek_v41", "deepseek_v4"], debug: bool) -> None:
    """Write the tiny model, random weights in every layer kind and format, to FOLDER."""
    with reported(debug=debug):
        from deepinfer.model.tiny import write_tiny

        try:
            write_tiny(folder, seed=seed, family=family)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error}): choose another folder") from error
        click.echo(f"{folder}: a tiny {family} checkpoint of random weights", err=True)


@contextmanager
def _folder(model: str) -> "Iterator[Path]":
    """Give the folder of a model, of which at least config.json is there."""
    from deepinfer.model.checkpoint import open_checkpoint
    from deepinfer.model.download import CONFIG_ONLY, Hub, fetch

    if model in EMBEDDED:
        checkpoint = open_checkpoint(model)  # the folder lives as long as this object
        yield checkpoint.folder
    else:
        yield fetch(model, Hub(), CONFIG_ONLY)


def main() -> None:
    """Run the command line."""
    app(prog_name="deepinfer")


if __name__ == "__main__":
    main()
