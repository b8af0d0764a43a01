"""What the engine costs a step beside the model: schedule, build and commit, while every sequence decodes.

Run as `uv run python benchmarks/engine_overhead.py`.  Tables have the released model's shape (window 128, ratios 1 and
2, 3 earlier ids); no model runs.  Two medians over the steps, of wall time and of the thread's own processor time: on
a machine that others use too, only the second says what the engine costs.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.batch_builder import BatchBuilder
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.model_runner import Transfer
from deepinfer.engine.plan import Sampled
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Sequence, SequenceTable, blocks_for

WINDOW, RATIOS, HISTORY = 128, (1, 2), 3


@dataclass(frozen=True)
class Shape:
    """The facts of a model that tables depend on."""

    ratios: tuple[int, ...] = RATIOS
    window: int = WINDOW


def make(batch: int, length: int, steps: int) -> tuple[Scheduler, BatchBuilder]:
    """Return scheduler and builder with `batch` sequences of about `length` tokens, all past their prompt."""
    longest = 4 * length + 4 * steps
    config = EngineConfig(
        precision=Precision(torch.float32, round_inputs=False, cache="model"),
        decoder_replay=WINDOW + 12,
        max_model_len=longest,
        max_num_seqs=batch,
        max_num_batched_tokens=max(8192, batch),
        max_prefill_tokens_per_step=max(8192, batch),
        overlap=False,
        blocks=batch * blocks_for(longest),
        window_blocks=3 * batch + 66,
        seed=0,
    )
    table = SequenceTable(batch, history=HISTORY, blocks=blocks_for(longest), windows=config.window_width(WINDOW))
    scheduler = Scheduler(config, WINDOW, table)
    generator = np.random.default_rng(0)
    for number in range(batch):
        tokens = generator.integers(0, 1000, length + int(generator.integers(0, length)))
        request = Request(tokens.tolist(), SamplingParams(max_tokens=None))
        start = max(0, len(tokens) - WINDOW - 12)
        scheduler.submit(
            Sequence(number, request, number, tokens, start, longest - len(tokens), frozenset({1}), None, None)
        )
    return scheduler, BatchBuilder(Shape(), table, Transfer(CpuAccelerator()))


def measure(batch: int, length: int, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the microseconds of schedule, build and commit in each step in which all sequences decode: wall, own."""
    scheduler, builder = make(batch, length, steps)
    wall: list[list[float]] = []
    own: list[list[float]] = []
    while len(wall) < steps:
        marks = [_now()]
        plan = scheduler.schedule(0.0)
        marks.append(_now())
        builder.build(plan)
        marks.append(_now())
        tokens = np.full(int(plan.samples.sum()), 7, dtype=np.int64)
        marks.append(_now())
        scheduler.advance(plan)
        scheduler.commit(plan, Sampled(tokens, np.ones(len(tokens), dtype=np.int64)))
        marks.append(_now())
        if len(plan.rows) == batch and plan.samples.all() and (plan.counts == 1).all():
            for clock, times in enumerate((wall, own)):
                times.append([(marks[i + 1][clock] - marks[i][clock]) / 1000 for i in (0, 1, 3)])
    return wall, own


def _now() -> tuple[int, int]:
    return time.perf_counter_ns(), time.thread_time_ns()


def main() -> None:
    """Print a table of microseconds a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--length", type=int, default=1024, help="tokens of the shortest sequence")
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"median microseconds a step, wall (own), of {arguments.steps} steps, {arguments.length}+ tokens a sequence")
    print(f"{'batch':>6} {'schedule':>14} {'build':>14} {'schedule+build':>15} {'commit':>14}")
    for batch in arguments.batch:
        cells = [[] for _ in range(4)]
        for times in measure(batch, arguments.length, arguments.steps):
            schedule, build, commit = zip(*times, strict=True)
            both = [a + b for a, b in zip(schedule, build, strict=True)]
            for cell, column in zip(cells, (schedule, build, both, commit), strict=True):
                cell.append(f"{statistics.median(column):.0f}")
        print(f"{batch:>6} " + " ".join(f"{f'{wall} ({own})':>14}" for wall, own in cells))


if __name__ == "__main__":
    main()
