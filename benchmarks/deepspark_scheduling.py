"""Scheduling benchmarks of deepspark on the CPU: owns the synthetic H200 cost table and the three claims of its docs.

    python benchmarks/deepspark_scheduling.py overhead      host time of scheduling and verification bookkeeping a step
    python benchmarks/deepspark_scheduling.py throughput    against no drafts and every fixed width, batch sizes 1..256
    python benchmarks/deepspark_scheduling.py tradeoff      verified drafts against tokens; --plot FILE.png draws it
    (needs matplotlib)

Times are rooflines of one H200 for DeepSeek-V4.1-Flash, not measurements: bytes and FLOPs of the model over the read
and matrix rates measured on that card.  Acceptance is simulated; confidences are the simulated acceptance itself, that
is, perfectly calibrated.
"""

import argparse
import importlib
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from deepspark.cost import CostTable
from deepspark.parking import Parking
from deepspark.policy import Asynchronous, Policy
from deepspark.ragged import count_accepted, emitted_tokens, pack
from deepspark.schedule import allocate, survival, survival_threshold
from deepspark.scheduler import Scheduler, StepRequests
from deepspark.telemetry import Telemetry

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WIDTH = 5
READ_GB_S = 4300.0
FP8_TFLOPS, BF16_TFLOPS = 1297.0, 688.0
CONTEXT = 4096


def distinct(experts: int, picks: int, rows: Floats) -> Floats:
    """Experts touched by `rows` tokens under uniform routing."""
    return experts * (1 - (1 - picks / experts) ** rows)


def h200_target_ms(rows: Floats, requests: float) -> Floats:
    """Floor of one forward pass over `rows` rows of `requests` sequences: 40 layers and the head."""
    dense, expert = 0.1267 + 0.0354 + 0.0039 + 0.0039, 0.018801
    read_gb = 40 * (dense + expert * distinct(384, 6, rows)) + 1.324 + 0.31 + 0.0101 * requests
    compute_ms = rows * (30.66 / FP8_TFLOPS + 4.96 / BF16_TFLOPS)
    return np.maximum(read_gb / READ_GB_S * 1e3, compute_ms)


def h200_draft_ms(requests: Floats) -> Floats:
    """Floor of drafting five tokens for each of `requests` sequences: three stages, the head, five Markov products."""
    rows = WIDTH * requests
    read_gb = 3 * (0.170 + 0.018801 * distinct(128, 3, rows)) + 1.324 + 5 * 0.066
    compute_ms = rows * (1.5 / FP8_TFLOPS + 1.46 / BF16_TFLOPS)
    return np.maximum(read_gb / READ_GB_S * 1e3, compute_ms)


def h200_table(requests: int) -> CostTable:
    """The table that an engine would profile at this batch size: captured sizes 1, 2, 4, 8, then by 8."""
    sizes = [1, 2, 4, *range(8, 256 * (WIDTH + 1) + 1, 8)]
    drafting = [1, 2, 4, *range(8, 257, 8)]
    return CostTable(
        sizes,
        h200_target_ms(np.array(sizes, float), requests).tolist(),
        draft_sizes=drafting,
        draft_ms=h200_draft_ms(np.array(drafting, float)).tolist(),
    )


@dataclass(frozen=True)
class Text:
    """How acceptance behaves: each position's conditional acceptance is Beta distributed, or `mean` everywhere."""

    mean: float
    concentration: float | None = None

    def confidences(self, rng: np.random.Generator, requests: int) -> Floats:
        """Draw the acceptances [R, g] of one step, which are also its calibrated confidences."""
        if self.concentration is None:
            return np.full((requests, WIDTH), self.mean)
        return rng.beta(self.mean * self.concentration, (1 - self.mean) * self.concentration, (requests, WIDTH))

    def fixed_tokens(self, width: int) -> float:
        """Expected tokens of one request that verifies `width` drafts."""
        return float((self.mean ** np.arange(width + 1)).sum())


def accept(rng: np.random.Generator, conf: Floats, lengths: Ints) -> Ints:
    """Draw how many of the verified drafts are accepted."""
    passed = (rng.random(conf.shape) < conf) & (np.arange(WIDTH) < lengths[:, None])
    return passed.cumprod(axis=1).sum(axis=1)


def simulate(policy: Policy, text: Text, requests: int, steps: int) -> float:
    """Run the scheduler for `steps` steps; return tokens a millisecond (expected tokens of each step's choice)."""
    rng = np.random.default_rng(requests)
    table = h200_table(requests)
    scheduler = Scheduler(policy, table, WIDTH, requests, parking=Parking())
    step = StepRequests(np.arange(requests), np.full(requests, WIDTH))
    tokens = ms = 0.0
    for _ in range(steps):
        decision = scheduler.decide(step)
        conf = text.confidences(rng, requests)
        allocation = scheduler.allocate(decision, conf if decision.draft else None, step)
        lengths = allocation.lengths
        scheduler.record(step, allocation, accept(rng, conf, lengths))
        judged = np.arange(WIDTH) < lengths[:, None]
        tokens += requests + float((survival(conf) * judged).sum())
        rows = requests + int(lengths.sum())
        ms += float(table.step_ms(np.array([rows]))[0]) + (table.draft_ms(requests) if decision.draft else 0.0)
    return tokens / ms


def fixed_rate(text: Text, requests: int, width: int) -> float:
    """Tokens a millisecond of always verifying `width` drafts; width 0 runs no drafter."""
    table = h200_table(requests)
    ms = float(table.step_ms(np.array([requests * (width + 1)]))[0]) + (table.draft_ms(requests) if width else 0.0)
    return requests * text.fixed_tokens(width) / ms


def throughput(steps: int, every: int) -> None:
    """Print the worst ratios over all batch sizes."""
    heads = ("acceptance", "worst / off", "at batch", "worst / best fixed", "at batch", "median / off")
    print("{:>22} {:>12} {:>9} {:>19} {:>9} {:>13}".format(*heads))
    for concentration in (None, 2.0):
        for mean in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
            text = Text(mean, concentration)
            off, best = [], []
            batches = range(1, 257, every)
            for requests in batches:
                rate = simulate(Asynchronous(), text, requests, steps)
                rates = [fixed_rate(text, requests, width) for width in range(WIDTH + 1)]
                off.append(rate / rates[0])
                best.append(rate / max(rates))
            name = f"{mean} everywhere" if concentration is None else f"Beta, mean {mean}"
            low, lowest = int(np.argmin(off)), int(np.argmin(best))
            cells = (name, off[low], batches[low], best[lowest], batches[lowest], median(off))
            print("{:>22} {:12.3f} {:9d} {:19.3f} {:9d} {:13.3f}".format(*cells), flush=True)


def overhead(requests: int, steps: int) -> None:
    """Print the host microseconds a step of scheduling, packing, acceptance counting, emission and telemetry."""
    rng = np.random.default_rng(0)
    scheduler = Scheduler(Asynchronous(), h200_table(requests), WIDTH, requests, parking=Parking())
    telemetry = Telemetry(requests, WIDTH)
    step = StepRequests(np.arange(requests), np.full(requests, WIDTH))
    anchors, positions = np.zeros(requests, np.int64), np.arange(requests)
    drafts = rng.integers(0, 1000, (requests, WIDTH))
    total_us, schedule_us = [], []
    for _ in range(steps):
        conf = rng.beta(1.2, 0.8, (requests, WIDTH))
        p_x, q_x, uniforms = conf, np.ones_like(conf), rng.random((requests, WIDTH))
        extra = rng.integers(0, 1000, requests)
        start = time.perf_counter_ns()
        decision = scheduler.decide(step)
        allocation = scheduler.allocate(decision, conf if decision.draft else None, step)
        lengths = allocation.lengths
        planned = time.perf_counter_ns()
        pack(anchors, drafts, lengths, positions)
        accepted = count_accepted(uniforms * q_x < p_x, lengths)
        tokens = emitted_tokens(drafts, accepted, extra)
        anchors, positions = extra, positions + accepted + 1
        telemetry.record(scheduler.record(step, allocation, accepted))
        end = time.perf_counter_ns()
        assert tokens.shape == (requests, WIDTH + 1)
        total_us.append((end - start) / 1e3)
        schedule_us.append((planned - start) / 1e3)
    print(
        f"batch {requests}, block {WIDTH}: {median(total_us):.0f} us a step (median of {steps}; fastest tenth below "
        f"{np.quantile(total_us, 0.1):.0f}), of it scheduling {median(schedule_us):.0f} us"
    )


@dataclass(frozen=True)
class Point:
    """One setting of a policy: share of the five drafts verified, share of the tokens of verifying all."""

    label: str
    verified: float
    tokens: float


def curve(text: Text, samples: int) -> list[list[Point]]:
    """Return the curves of fixed widths, survival thresholds, and top-K budgets over batches of 64."""
    rng = np.random.default_rng(0)
    survivals = survival(text.confidences(rng, samples))
    full = samples + survivals.sum()
    offsets = np.arange(WIDTH)

    def point(label: str, lengths: Ints) -> Point:
        tokens = samples + survivals[offsets < lengths[:, None]].sum()
        return Point(label, float(lengths.mean()) / WIDTH, float(tokens / full))

    fixed = [point(f"fixed {width}", np.full(samples, width)) for width in range(WIDTH + 1)]
    prices = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.17, 0.23, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    thresholds = [point(f"survival >= {price}", survival_threshold(survivals, price)) for price in prices]
    budgets = []
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        budget = round(share * 64 * WIDTH)
        lengths = [allocate(batch, budget) for batch in survivals.reshape(-1, 64, WIDTH)]
        budgets.append(point(f"top {share:.0%}", np.concatenate(lengths)))
    return [fixed, thresholds, budgets]


def tradeoff(plot: Path | None) -> None:
    """Print the curves for Beta(1.2, 0.8) acceptance and for 0.6 everywhere; optionally draw them."""
    texts = {"each position's acceptance from Beta(1.2, 0.8)": Text(0.6, 2.0), "acceptance 0.6 everywhere": Text(0.6)}
    curves = {title: curve(text, 64 * 2000) for title, text in texts.items()}
    for title, (fixed, thresholds, budgets) in curves.items():
        print(title)
        for point in [*fixed, *thresholds, *budgets]:
            print(f"  {point.label:18} verified {point.verified:6.1%} of five   tokens {point.tokens:6.1%}")
        fewest = min((p for p in [*thresholds, *budgets] if p.tokens >= 0.97), key=lambda p: p.verified)
        print(
            f"  fewest at 97 % of the tokens: {fewest.label}, {1 - fewest.verified:.1%} fewer drafts, "
            f"{1 - fewest.tokens:.1%} fewer tokens"
        )
    if plot is not None:
        draw_curves(curves, plot)


def draw_curves(curves: dict[str, list[list[Point]]], path: Path) -> None:
    """Draw one panel a text."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(curves), figsize=(9, 3.6), sharey=True)
    for axis, (title, lines) in zip(axes, curves.items(), strict=True):
        for name, style, line in zip(
            ("fixed width", "survival threshold", "top-K, batch 64"), ("s--", "o-", "x:"), lines, strict=True
        ):
            axis.plot([p.verified * 100 for p in line], [p.tokens * 100 for p in line], style, label=name, markersize=4)
        axis.axhline(97, color="0.7", linewidth=0.8)
        axis.axvline(70, color="0.7", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("verified drafts, % of always five")
    axes[0].set_ylabel("tokens a step, % of always five")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "throughput", "tradeoff"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=1, help="throughput: only every n-th batch size")
    parser.add_argument("--plot", type=Path, help="tradeoff: write a PNG")
    arguments = parser.parse_args()
    if arguments.what == "overhead":
        overhead(64, max(arguments.steps, 2000))
    elif arguments.what == "throughput":
        throughput(arguments.steps, arguments.every)
    else:
        tradeoff(arguments.plot)


if __name__ == "__main__":
    main()
