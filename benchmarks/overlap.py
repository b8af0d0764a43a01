"""Host time that a step leaves exposed, with the plain and the overlapped loop, on a device that only passes time.

Run as `uv run python benchmarks/overlap.py`.  The device is simulated: a step occupies it for `--device-us`, one after
the other, and waiting for an event sleeps until its step is over; ops return at once.  Everything else is the engine:
scheduling, building, sampling's own host work, committing.  Exposed = wall time of a step less the time of the device.
The model's launches are not in it, no model runs; a sampling op's work on a small vocabulary stands for its launch.
"""

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.read_config import parse_config
from deepinfer.model.tiny import tiny_config

CPU = torch.device("cpu")
PRECISION = Precision(torch.float32, round_inputs=False, cache="model")


class Timeline(Accelerator):
    """A device that is busy until `end`."""

    name = "timeline"
    device = CPU

    def __init__(self) -> None:
        self.end = 0.0

    @override
    def ops(self, precision: Precision) -> Ops:
        return Ops(CPU, precision)

    @override
    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    @override
    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def event(self) -> "Reached":
        return Reached(self)


class Reached:
    """The end of what the device had to do when it was recorded."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._time = 0.0

    def record(self) -> None:
        """Remember when the device will be done."""
        self._time = self._timeline.end

    def synchronize(self) -> None:
        """Sleep until then, the last tenth of a millisecond awake."""
        while (left := self._time - time.perf_counter()) > 0:
            if left > 2e-4:
                time.sleep(left - 1e-4)

    def query(self) -> bool:
        """Say whether it is then."""
        return time.perf_counter() >= self._time


class Passing:
    """A model that occupies the device and returns the same logits."""

    def __init__(self, timeline: Timeline, seconds: float, vocab_size: int) -> None:
        self._timeline, self._seconds = timeline, seconds
        self._logits = torch.randn(4096, vocab_size)

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        """Occupy the device behind what it has to do."""
        self._timeline.end = max(self._timeline.end, time.perf_counter()) + self._seconds
        logits: Tensor = self._logits[: batch.logit_rows.shape[0]]
        return ModelOutput(logits, None)


def measure(batch: int, device_us: float, steps: int, *, overlap: bool) -> list[float]:
    """Return the exposed microseconds of each step in which all sequences decode."""
    model: ModelConfig = parse_config(tiny_config("deepseek_v41"))
    config = EngineConfig(
        precision=PRECISION,
        decoder_replay=None,
        max_model_len=2048,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch),
        max_prefill_tokens_per_step=max(2048, batch),
        overlap=overlap,
        blocks=16 * batch,
        window_blocks=4 * batch + 16,
        seed=0,
    )
    timeline = Timeline()
    passing = Passing(timeline, device_us / 1e6, model.vocab_size)
    engine = Engine(config, model, passing, timeline.ops(PRECISION), timeline, None)
    for _ in range(batch):
        engine.add(Request([5] * 100, SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)))
    while len(engine.step()) < batch:
        pass
    exposed: list[float] = []
    before = time.perf_counter()
    for _ in range(steps):
        engine.step()
        now = time.perf_counter()
        exposed.append((now - before) * 1e6 - device_us)
        before = now
    return exposed


def main() -> None:
    """Print a table of microseconds a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--device-us", type=float, default=5000, help="how long a step occupies the device")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"exposed host microseconds a step, median (fastest, slowest tenth); device {arguments.device_us:.0f} us a step"
    )
    print(f"{'batch':>6} {'plain':>24} {'overlap':>24}")
    for batch in arguments.batch:
        cells = []
        for overlap in (False, True):
            times = measure(batch, arguments.device_us, arguments.steps, overlap=overlap)
            cuts = statistics.quantiles(times, n=10)
            cells.append(f"{statistics.median(times):.0f} ({cuts[0]:.0f} .. {cuts[-1]:.0f})")
        print(f"{batch:>6} " + " ".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
