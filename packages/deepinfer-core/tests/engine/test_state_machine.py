"""Any life of an engine gives every request what a lone cold run gives: over the checking model, which sees any memory
that is shared, kept, moved or read wrongly, and over the real tiny model in float64 and without quantisers.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, override

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.cpu_ops import CpuOps
from deepinfer.accelerator.report import OPS
from deepinfer.engine import prefix_cache
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request, SamplingParams, TokenLogprobs
from deepinfer.model.config import ModelConfig

from .checker import (
    EXAMPLES,
    PRECISION,
    CheckingModel,
    Hashes,
    drain,
    engine_config,
    greedy,
    lone_run,
    small_config,
    small_ops,
    tokens_of,
)
from .delayed import DelayedAccelerator, DelayedModel
from .life import FAULT, Choices, Clock, Life
from .loaded import FLOAT64, Loaded, load_tiny, text
from .oracle import drafting

ROUNDING = 1e-6
"""Log-probabilities come as float32, whose spacing at their size is below this; the float64 ones differ by 1e-14."""


@dataclass
class Fuse:
    """Raises when it has burned down: `left` calls from now, None = never."""

    left: int | None = None
    interrupt: bool = False

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise KeyboardInterrupt if self.interrupt else RuntimeError(FAULT)


class FusedModel(CheckingModel):
    """The checking model, which may break before, between and behind the parts of a step."""

    def __init__(self, model: ModelConfig, fuse: Fuse) -> None:
        super().__init__(model)
        self._fuse = fuse

    @override
    def _window(self, batch: Batch, *, half: int, first: NDArray[np.int64]) -> Hashes:
        self._fuse.burn()
        return super()._window(batch, half=half, first=first)

    @override
    def _groups(self, batch: Batch, seen: Hashes) -> Hashes:
        self._fuse.burn()
        found = super()._groups(batch, seen)
        self._fuse.burn()
        return found


class Checked:
    """Engines over the checking model: on the host, on a device whose results come late, or with drafts."""

    letters = (3, 40)

    def __init__(self, model: ModelConfig, replay: int | None) -> None:
        self.model = model
        self.roomy = engine_config(decoder_replay=replay)
        self.fuse = Fuse()
        self.known: dict[str, list[Progress]] = {}
        self.texts: dict[int, list[int]] = {}
        self.around = ExitStack()

    def open(self, choices: Choices, clock: Clock) -> Engine:
        self.close()
        self.texts.clear()
        model, config = FusedModel(self.model, self.fuse), choices.config
        if choices.delayed:
            device = self.around.enter_context(DelayedAccelerator(copies_may_wait=True))
            late = DelayedModel(model, device, self.model.vocab_size)
            parts = (late, device.ops(PRECISION), device)
            return Engine(replace(config, overlap=True), self.model, *parts, None, clock=clock)
        drafts = drafting(self.texts, wrong=0.3, seed=1) if choices.drafts else None
        return Engine(config, self.model, model, small_ops(), CpuAccelerator(), None, clock=clock, drafting=drafts)

    def close(self) -> None:
        self.around.close()

    def params(self, flavour: int, max_tokens: int, seed: int) -> SamplingParams:
        stops = [[], [], [7, 8, 9], [20]][flavour % 4]
        rows = -1 if flavour >= 56 else None
        endless = bool(flavour & 4)
        return greedy(max_tokens=max_tokens, stop_token_ids=stops, prompt_logprobs=rows, ignore_eos=endless, seed=seed)

    def alone(self, request: Request, config: EngineConfig) -> list[Progress]:
        key = repr((request.prompt_token_ids, replace(request.params, seed=0)))
        if key not in self.known:
            done = lone_run(self.model, config, request)
            rows = done.prompt_logprobs
            self.known[key] = [Progress(0, done.token_ids, finish_reason=done.finish_reason, prompt_logprobs=rows)]
        return self.known[key]

    def told(self, request: Request, alone: list[Progress]) -> None:
        assert request.params.seed is not None
        self.texts[request.params.seed] = [*request.prompt_token_ids, *tokens_of(alone)]

    def compare(self, got: list[Progress], alone: list[Progress]) -> None:
        wanted = alone[-1].prompt_logprobs
        rows = [part.prompt_logprobs for part in got if isinstance(part.prompt_logprobs, Tensor)]
        if not isinstance(wanted, Tensor):
            assert not rows
        elif rows:
            assert torch.equal(torch.cat(rows), wanted[: sum(map(len, rows))])
            assert got[-1].finish_reason in ("abort", "error") or sum(map(len, rows)) == len(wanted)

    def light(self, calls: int, *, interrupt: bool) -> None:
        self.fuse.left, self.fuse.interrupt = calls % 121, interrupt

    def put_out(self) -> None:
        self.fuse.left = None


class FusedOps(CpuOps):
    """The CPU's ops, of which one raises when the fuse has burned down."""

    fuse: Fuse


def _burning(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: FusedOps, *given: Any, **options: Any) -> Any:
        self.fuse.burn()
        return op(self, *given, **options)

    return run


for _op in OPS:
    setattr(FusedOps, _op.__name__, _burning(getattr(CpuOps, _op.__name__)))


@dataclass(frozen=True)
class Real:
    """Engines over the real tiny model."""

    tiny: Loaded
    fuse: Fuse
    known: dict[str, list[Progress]] = field(default_factory=dict)
    letters = (30, 255)

    @property
    def roomy(self) -> EngineConfig:
        return self.tiny.config()

    def open(self, choices: Choices, clock: Clock) -> Engine:
        return self.tiny.engine(choices.config, clock=clock)

    def close(self) -> None:
        """Nothing is open."""

    def params(self, flavour: int, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.8 if flavour & 1 else 0.0,
            top_p=0.9 if flavour & 2 else 1.0,
            repetition_penalty=1.3 if flavour & 12 == 12 else 1.0,
            logprobs=2 if flavour & 16 else None,
            max_tokens=max_tokens,
            ignore_eos=True,
            seed=5,
        )

    def alone(self, request: Request, config: EngineConfig) -> list[Progress]:
        key = repr((request.prompt_token_ids, request.params))
        if key not in self.known:
            fuse, self.fuse.left = self.fuse.left, None
            plain = replace(request, timeout_s=None, prefix_cache=None)
            self.known[key] = self.tiny.run(replace(self.roomy, prefix_cache="off"), [plain])[0]
            self.fuse.left = fuse
        return self.known[key]

    def told(self, request: Request, alone: list[Progress]) -> None:
        """Nobody asks."""

    def compare(self, got: list[Progress], alone: list[Progress]) -> None:
        for one, other in zip(_logprobs(got), _logprobs(alone), strict=False):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=ROUNDING)
            assert one.top == pytest.approx(other.top, abs=ROUNDING)
        assert len(_logprobs(got)) == (len(tokens_of(got)) if _logprobs(alone) else 0)

    def light(self, calls: int, *, interrupt: bool) -> None:
        self.fuse.left, self.fuse.interrupt = calls, interrupt

    def put_out(self) -> None:
        self.fuse.left = None


def _logprobs(parts: list[Progress]) -> list[TokenLogprobs]:
    return [row for part in parts for row in part.logprobs or () if isinstance(row, TokenLogprobs)]


@pytest.fixture(scope="module", params=["deepseek_v41", "deepseek_v4"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    ops, fuse = FusedOps(torch.device("cpu"), FLOAT64), Fuse()
    ops.fuse = fuse
    return Real(load_tiny(tmp_path_factory.mktemp("tiny") / request.param, request.param, ops), fuse)


V41 = replace(small_config(), image_token_id=None)
V4 = replace(small_config("deepseek_v4"), image_token_id=None)
CHECKED = {
    "v41": (V41, V41.window + 12),
    "v41, all decoder rows": (V41, None),
    "v41, window of a block": (replace(V41, window=128), 140),
    "v4": (V4, None),
}


@pytest.fixture
def _close_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts short enough for a test still have snapshots far before their end."""
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_SPACING", 256)


@pytest.mark.usefixtures("_close_snapshots")
@pytest.mark.parametrize("name", CHECKED)
def test_any_life_over_the_checking_model(name: str) -> None:
    lives = Counter[str]()
    run_lives(partial(Life, Checked(*CHECKED[name]), lives), examples=EXAMPLES // 6, steps=12)
    for what, share in {"preempted": 0.25, "hit": 0.5, "evicted": 0.5, "came back from a tier": 0.01}.items():
        assert lives[what] >= share * lives["lives"], lives


def test_any_life_over_the_real_model(real: Real) -> None:
    lives = Counter[str]()
    run_lives(partial(Life, real, lives), examples=max(EXAMPLES // 33, 3), steps=10)
    assert lives["preempted"] > 0, lives


def run_lives(machine: Callable[[], Life], *, examples: int, steps: int) -> None:
    chosen = settings(max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]


def test_a_step_that_breaks_at_any_op_ends_its_own_requests_alone(real: Real) -> None:
    """Each op of a step of two requests raises once; the third one, which waits, is served as if nothing was."""
    config = replace(real.roomy, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    requests = [Request(text(0, length), params) for length in (150, 3, 200)]
    broken = 0
    for calls in range(0, 600, 37):
        for overlap in (False, True):
            engine = real.tiny.engine(replace(config, overlap=overlap))
            ids = [engine.add(request) for request in requests]
            real.fuse.left = calls
            gained = drain(engine)
            real.fuse.left = None
            ended = [gained[number][-1].finish_reason for number in ids]
            broken += ended.count("error")
            for number, request in zip(ids, requests, strict=True):
                wanted, got = tokens_of(real.alone(request, config)), tokens_of(gained[number])
                assert got == (wanted if gained[number][-1].finish_reason == "length" else wanted[: len(got)])
            assert engine.scheduler.blocks.free == config.blocks
            assert engine.scheduler.windows.free == config.window_blocks
    assert broken > 0
