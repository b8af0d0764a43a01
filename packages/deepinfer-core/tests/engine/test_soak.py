"""A long life of one engine over the real tiny model: every block comes back, memory stays flat, tokens stay right."""

import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request, SamplingParams

from .checker import tokens_of
from .loaded import Loaded, text

REQUESTS = 20_000
COMPARED = 100
"""Every so manieth request is compared with a lone cold run."""
PAGE = resource.getpagesize()
STEMS = [text(seed, 400) for seed in range(6)]


@dataclass
class Soak:
    """Random requests through pools that are too small for them, most of them with a first part that others have."""

    engine: Engine
    generator: np.random.Generator
    asked: dict[int, Request] = field(default_factory=dict)
    gained: dict[int, list[Progress]] = field(default_factory=dict)
    added: int = 0
    hits: int = 0
    errors: int = 0

    def request(self) -> Request:
        draw = self.generator
        shared = int(draw.choice([0, 20, 127, 128, 200, 256, 384], p=[0.4, 0.3, 0.06, 0.06, 0.06, 0.06, 0.06]))
        prompt = [*STEMS[draw.integers(6)][:shared], *draw.integers(30, 255, draw.integers(1, 30)).tolist()]
        most = int(draw.choice([1, 3, 6, 60], p=[0.3, 0.3, 0.34, 0.06]))
        params = SamplingParams(temperature=float(draw.integers(2)), max_tokens=most, ignore_eos=True)
        salt, priority = str(draw.integers(2)), int(draw.random() < 0.1)
        return Request(prompt, params, index=self.added, cache_salt=salt, priority=priority)

    def add(self) -> None:
        request = self.request()
        number = self.engine.add(request)
        self.added += 1
        if self.generator.random() < 0.05:
            self.engine.abort(number)
        elif self.added % COMPARED == 0:
            self.asked[number], self.gained[number] = request, []

    def step(self) -> int:
        """One step; returns how many ended."""
        ended = 0
        for progress in self.engine.step():
            if progress.request_id in self.gained:
                self.gained[progress.request_id].append(progress)
            ended += progress.finish_reason is not None
            self.errors += progress.finish_reason == "error"
            self.hits += progress.cache is not None and progress.cache.hit > progress.cache.replayed
        self.engine.scheduler.check()
        return ended


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_soak_of_random_requests(family: str, loaded: Callable[[str], Loaded], soak_s: float) -> None:
    """20,000 requests, whatever time was given; the host tier is full before memory is compared."""
    assert soak_s > 0
    tiny = loaded(family)
    sizes = {"blocks": 14, "window_blocks": 32, "snapshots": 6, "max_num_seqs": 24, "max_num_batched_tokens": 256}
    config = tiny.config(max_model_len=512, overlap=True, prefix_cache_host_bytes=1 << 22, **sizes)
    soak = Soak(tiny.engine(config), np.random.default_rng(0))
    ended, resident = 0, list[int]()
    while ended < REQUESTS:
        for _ in range(min(40 - (soak.added - ended), REQUESTS - soak.added)):
            soak.add()
        ended += soak.step()
        if ended // 1000 > len(resident):
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)
    while soak.engine.has_work:
        soak.step()
    assert soak.engine.scheduler.blocks.free == config.blocks
    assert soak.engine.scheduler.windows.free == config.window_blocks
    assert soak.errors == 0
    assert soak.hits > REQUESTS // 40
    early, late = resident[len(resident) // 4], max(islice(resident, len(resident) // 2, None))
    assert late < early + (16 << 20), [size >> 20 for size in resident]
    plain = tiny.config(max_model_len=512, prefix_cache="off")
    for number, request in soak.asked.items():
        assert tokens_of(soak.gained[number]) == tokens_of(tiny.run(plain, [request])[0])
