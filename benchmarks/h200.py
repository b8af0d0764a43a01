"""V4.1-Flash's layers on one H200: checked, then timed against the least time that bytes and products take.

    python benchmarks/h200.py --json h200.json --markdown h200.md           # x12 on the device, 91 GB of weights
    python benchmarks/h200.py --config tiny --accelerator cpu               # the same path, on any machine
    python benchmarks/h200.py --plot h200.png --json h200.json              # draw what was measured

First four full-size layers (`x4`) against the reference ops on the same weights, and graphs against steps without; then
`x12`: decoding, the host's gap between graphs, prefill, a prefix hit, verifying drafts, and where a step's time goes.
Weights are random, so routing is close to uniform.  Floors of `x12`: weights and cache at 4.3 TB/s for decoding,
products at 1,297 TFLOP/s (FP8) for prefill, both rates measured on such a card.  After `--seconds` no further section
begins.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from h200_sections import SECTIONS, Bench, Sizes, gate
from random_model import make_model

PLANS = {
    "x12": Sizes("x12", "x4", (1, 32, 128, 256), 4096, (2048, 8192, 32768), (1, 8, 32), 4),
    "x4": Sizes("x4", "x4", (1, 32, 256), 4096, (2048, 8192), (1, 32), 2),
    "tiny": Sizes("tiny", "tiny", (1, 4), 300, (100, 400), (1, 2), 4),
}
POINTS_TFLOP = {"decode": 0.0116, "prefill": 0.0118}
"""TFLOP of one token through x12 and its head."""
BANDWIDTH_TB, BF16_TFLOP, FP8_TFLOP = 4.3, 688.0, 1297.0


@dataclass(frozen=True)
class Said:
    """What a result was measured with."""

    commit: str
    device: str
    torch: str
    triton: str
    command: str


def main() -> None:
    """Check, then time, the sections that were asked for; or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=PLANS, default="x12")
    parser.add_argument("--accelerator", default="nvidia")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, in order")
    parser.add_argument("--skip-gate", action="store_true", help="time without a check: for a second run alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no section after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the rows of --json and measure nothing")
    parser.add_argument("--commit", help="commit of the code, where there is no repository")
    options = parser.parse_args()
    if options.plot is not None:
        draw(json.loads(options.json.read_text(encoding="utf-8")), options.plot)
        return
    begin = time.perf_counter()
    bench = Bench(PLANS[options.config], options.accelerator)
    if not options.skip_gate:
        with timed(bench, "gate"):
            gate(bench)
    with timed(bench, "drawing the weights"):
        bench.model, bench.stages = make_model(bench.config, bench.ops, bench.accelerator, drafts=True)
    for name in options.only.split(","):
        if time.perf_counter() - begin > options.seconds:
            print(f"-- no time left for {name}")
            continue
        with timed(bench, name):
            run_section(bench, name)
        write(bench, options)


class timed:  # noqa: N801 - used as a word
    """Says how long a part took, outside of what is measured."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench, self._name = bench, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._bench.wait()
        print(f"-- {self._name}: {time.perf_counter() - self._begin:.1f} s", flush=True)


def run_section(bench: Bench, name: str) -> None:
    """Run one section; what it cannot do is said, and the others go on."""
    section: Callable[[Bench], Iterator[None]] = SECTIONS[name]
    try:
        for _ in section(bench):
            print(bench.rows[-1].line(), flush=True)
    except Exception as error:  # noqa: BLE001 - a section that fails must not take the others' device time
        said = f"{name} failed: {type(error).__name__}: {str(error)[:400]}"
        bench.notes.append(said)
        print(said, flush=True)
    bench.release()


def write(bench: Bench, options: argparse.Namespace) -> None:
    """Write what has been measured so far."""
    said = asdict(_said(bench, options))
    rows = [asdict(row) | {"share": row.share} for row in bench.rows]
    if options.json is not None:
        options.json.write_text(json.dumps(said | {"notes": bench.notes, "rows": rows}, indent=1), encoding="utf-8")
    if options.markdown is not None:
        lines = [f"{said['device']}, torch {said['torch']}, triton {said['triton']}, commit {said['commit']}:"]
        lines += [f"`{said['command']}`", "", "| what | measured | floor | share of floor |", "|---|---:|---:|---:|"]
        lines += [row.markdown() for row in bench.rows]
        lines += ["", *(f"- {note}" for note in bench.notes)]
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _said(bench: Bench, options: argparse.Namespace) -> Said:
    triton = "none"
    if bench.accelerator.device.type == "cuda":
        triton = sys.modules["triton"].__version__
    commit = options.commit
    if commit is None:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    device = bench.accelerator.description().split(",")[0]
    if bench.accelerator.device.type == "cpu":
        device = platform.machine()
    return Said(commit, device, torch.__version__, triton, "python " + " ".join(sys.argv))


def draw(said: dict[str, Any], path: Path) -> None:
    """Draw the roofline of the card with the steps that were measured."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for the picture

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for rate, name, style in ((BF16_TFLOP, "bfloat16", "--"), (FP8_TFLOP, "FP8", "-")):
        intensity = [1, rate / BANDWIDTH_TB, 10_000]
        roof = [min(BANDWIDTH_TB * one, rate) for one in intensity]
        axes.plot(intensity, roof, style, color="black", label=f"{BANDWIDTH_TB} TB/s and {rate:g} TFLOP/s ({name})")
    for row in said["rows"]:
        if row["tokens"] and row["floor"] and row["section"] in POINTS_TFLOP:
            work = POINTS_TFLOP[row["section"]] * row["tokens"]
            moved = max(row["bytes"] / 1e12, 1e-9)
            axes.plot(work / moved, work / row["value"] * 1e3, "o")
            note = f"{row['section']}, {row['name'].split(',')[0]}: {row['share']:.2f}"
            axes.annotate(note, (work / moved, work / row["value"] * 1e3), textcoords="offset points", xytext=(5, -9))
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte of weights and cache", ylabel="TFLOP/s")
    axes.set_title(f"x12 on {said['device']}: share of its floor beside each step", fontsize=10)
    axes.legend(loc="upper left", fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
