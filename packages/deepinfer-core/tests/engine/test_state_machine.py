"""Any life of an engine over the real tiny model, in float64 and without quantisers: requests come, go, expire and are
preempted, steps break; every request that ends has what a lone cold run gives it, and no block is lost.
"""

import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.cpu_ops import CpuOps
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.report import OPS
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request, SamplingParams, TokenLogprobs
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.tiny import Family, write_tiny
from deepinfer.model.weights import Weights

from .checker import EXAMPLES, drain, engine_config, tokens_of

PRECISION = Precision(torch.float64, round_inputs=False, cache="model")
FAULT = "the device fell off"
ROUNDING = 1e-6
"""Log-probabilities come as float32, whose spacing at their size is below this; the float64 ones differ by 1e-14."""


class FusedOps(CpuOps):
    """The CPU's ops, of which one raises when the fuse has burned down: `left` calls from now, None = never."""

    left: int | None = None

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise RuntimeError(FAULT)


def _burning(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: FusedOps, *given: Any, **options: Any) -> Any:
        self.burn()
        return op(self, *given, **options)

    return run


for _op in OPS:
    setattr(FusedOps, _op.__name__, _burning(getattr(CpuOps, _op.__name__)))


@dataclass(frozen=True)
class Tiny:
    """A tiny model for engines of any configuration, and what requests become when they run alone."""

    config: ModelConfig
    model: DeepSeek
    ops: FusedOps
    known: dict[str, list[Progress]] = field(default_factory=dict)

    def engine(self, config: EngineConfig, clock: Callable[[], float]) -> Engine:
        return Engine(config, self.config, self.model, self.ops, CpuAccelerator(), None, clock=clock)

    @property
    def roomy(self) -> EngineConfig:
        replay = self.config.window + 12 if self.config.first_decoder_layer is not None else None
        return engine_config(precision=PRECISION, decoder_replay=replay, max_model_len=384)

    def alone(self, request: Request) -> list[Progress]:
        """What a request becomes in a cold engine of its own, one step after the other."""
        key = repr((request.prompt_token_ids, request.params))
        if key not in self.known:
            fuse, self.ops.left = self.ops.left, None
            engine = self.engine(replace(self.roomy, overlap=False), lambda: 0.0)
            number = engine.add(replace(request, timeout_s=None))
            self.known[key] = drain(engine)[number]
            self.ops.left = fuse
        return self.known[key]


@pytest.fixture(scope="module", params=["deepseek_v41", "deepseek_v4"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family: Family = request.param
    folder: Path = tmp_path_factory.mktemp("tiny") / family
    write_tiny(folder, family=family)
    checkpoint, ops = Checkpoint(folder), FusedOps(torch.device("cpu"), PRECISION)
    model = DeepSeek(checkpoint.config, Weights(checkpoint, ops, CpuAccelerator()), ops)
    return Tiny(checkpoint.config, model, ops)


STEMS = [np.random.default_rng(seed).integers(30, 255, 260).tolist() for seed in range(2)]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that share long beginnings; most grow over a block border when small pools are full."""
    length = draw(st.sampled_from([1, 20, 90, 118, 122, 124, 126, 150, 256]))
    return draw(st.sampled_from(STEMS))[:length] + draw(st.sampled_from([[], [7], [8, 9, 10]]))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    max_tokens=st.sampled_from([1, 6, 14]),
    ignore_eos=st.just(True),
    seed=st.just(5),
    logprobs=st.sampled_from([None, 2]),
)


class Life(RuleBasedStateMachine):
    """One engine from its first request to its last."""

    def __init__(self, tiny: Tiny) -> None:
        super().__init__()
        self.tiny = tiny
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.gained: dict[int, list[Progress]] = {}
        tiny.ops.left = None

    @initialize(
        seqs=st.integers(1, 5),
        rows=st.sampled_from([5, 30, 200, 400]),
        prefill=st.sampled_from([None, 1, 20]),
        blocks=st.sampled_from([3, 3, 4, 7]),
        windows=st.integers(3, 10),
        overlap=st.booleans(),
    )
    def open(self, seqs: int, rows: int, prefill: int | None, blocks: int, windows: int, overlap: bool) -> None:
        sizes = {"max_num_seqs": seqs, "max_num_batched_tokens": rows, "blocks": blocks, "window_blocks": windows}
        config = replace(self.tiny.roomy, **sizes, overlap=overlap)  # type: ignore[arg-type]
        if prefill is not None:
            config = replace(config, max_prefill_tokens_per_step=prefill)
        self.config = config
        self.engine = self.tiny.engine(config, lambda: self.now)

    @rule(
        prompt=prompts(), params=PARAMS, priority=st.sampled_from([0, 0, 1]), timeout=st.sampled_from([None, None, 5])
    )
    def add(self, prompt: list[int], params: SamplingParams, priority: int, timeout: float | None) -> None:
        request = Request(prompt, params, priority=priority, timeout_s=timeout)
        self.requests[number := self.engine.add(request)] = request
        self.gained[number] = []

    @rule(lengths=st.lists(st.integers(112, 127), min_size=2, max_size=4), temperature=st.sampled_from([0.0, 0.8]))
    def crowd(self, lengths: list[int], temperature: float) -> None:
        """Several that grow over a block border together: where blocks are few, some are preempted on the way."""
        for index, length in enumerate(lengths):
            params = SamplingParams(temperature=temperature, max_tokens=18, ignore_eos=True, seed=6, logprobs=1)
            self.add(STEMS[index % 2][index : index + length], params, 0, None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            for progress in self.engine.step():
                self.gained[progress.request_id].append(progress)
            self.engine.scheduler.check()

    @invariant()
    def nobody_gets_anything_after_the_end(self) -> None:
        for parts in self.gained.values():
            assert all(part.finish_reason is None for part in parts[:-1])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.tiny.ops.left = None
        for number, parts in drain(self.engine).items():
            self.gained[number] += parts
        for number, request in self.requests.items():
            self.compare(self.gained[number], self.tiny.alone(request))
        assert self.engine.scheduler.blocks.free == self.config.blocks
        assert self.engine.scheduler.windows.free == self.config.window_blocks

    def compare(self, got: list[Progress], alone: list[Progress]) -> None:
        """Equal to a lone run; what was ended from outside is as far as it came."""
        tokens, wanted = tokens_of(got), tokens_of(alone)
        reason = got[-1].finish_reason
        assert reason in ("length", *self.early)
        assert tokens == (wanted if reason == "length" else wanted[: len(tokens)])
        for one, other in zip(_logprobs(got), _logprobs(alone), strict=False):
            assert one.token_id == other.token_id
            assert one.top.keys() == other.top.keys()
            for token, value in [(one.token_id, one.logprob), *one.top.items()]:
                assert value == pytest.approx(
                    other.logprob if token is one.token_id else other.top[token], abs=ROUNDING
                )
        assert len(_logprobs(got)) == (len(tokens) if _logprobs(alone) else 0)

    early: tuple[str, ...] = ("abort",)


class BrokenLife(Life):
    """The same on a device that raises in the middle of steps."""

    early = ("abort", "error")

    @rule(calls=st.integers(0, 400))
    def light_the_fuse(self, calls: int) -> None:
        self.tiny.ops.left = calls

    def compare(self, got: list[Progress], alone: list[Progress]) -> None:
        super().compare(got, alone)
        if got[-1].finish_reason == "error":
            assert got[-1].error == f"the step that computed this request failed: RuntimeError: {FAULT}"


def _logprobs(parts: list[Progress]) -> list[TokenLogprobs]:
    return [row for part in parts for row in part.logprobs or () if isinstance(row, TokenLogprobs)]


@pytest.mark.parametrize("life", [Life, BrokenLife])
def test_any_life_gives_every_request_what_a_lone_cold_run_gives(tiny: Tiny, life: type[Life]) -> None:
    few = settings(max_examples=max(EXAMPLES // 20, 5), stateful_step_count=12)
    run_state_machine_as_test(partial(life, tiny), settings=few)  # type: ignore[no-untyped-call]


def test_a_step_that_breaks_at_any_op_ends_its_own_requests_alone(tiny: Tiny) -> None:
    """Each op of a step of two requests raises once; the third one, which waits, is served as if nothing was."""
    config = replace(tiny.roomy, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    requests = [Request(STEMS[0][:length], params) for length in (20, 3, 40)]
    broken = 0
    for calls in range(0, 600, 37):
        for overlap in (False, True):
            engine = tiny.engine(replace(config, overlap=overlap), lambda: 0.0)
            ids = [engine.add(request) for request in requests]
            tiny.ops.left = calls
            gained = drain(engine)
            tiny.ops.left = None
            ended = [gained[number][-1].finish_reason for number in ids]
            broken += ended.count("error")
            for number, request in zip(ids, requests, strict=True):
                wanted, got = tokens_of(tiny.alone(request)), tokens_of(gained[number])
                assert got == (wanted if gained[number][-1].finish_reason == "length" else wanted[: len(got)])
            assert engine.scheduler.blocks.free == config.blocks
            assert engine.scheduler.windows.free == config.window_blocks
    assert broken > 0


SOAK_REQUESTS = 20_000
PAGE = resource.getpagesize()


def test_soak_of_random_requests_returns_every_block_and_takes_no_memory(tiny: Tiny, soak_s: float) -> None:
    """20,000 requests, some aborted, through pools that are too small for them, whatever time was given."""
    del soak_s
    config = replace(tiny.roomy, max_num_seqs=48, max_num_batched_tokens=256, blocks=40, window_blocks=60)
    engine = tiny.engine(config, lambda: 0.0)
    generator = np.random.default_rng(0)
    ended = added = 0
    resident: list[int] = []
    while ended < SOAK_REQUESTS:
        for _ in range(min(60 - (added - ended), SOAK_REQUESTS - added)):
            length = int(generator.choice([1, 5, 20, 126], p=[0.3, 0.4, 0.27, 0.03]))
            params = SamplingParams(temperature=float(generator.integers(2)), max_tokens=int(generator.integers(1, 6)))
            number = engine.add(Request(generator.integers(30, 255, length).tolist(), params, index=added))
            added += 1
            if generator.random() < 0.05:
                engine.abort(number)
        ended += sum(progress.finish_reason is not None for progress in engine.step())
        engine.scheduler.check()
        if ended // 1000 > len(resident):
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)
    assert not engine.has_work
    assert engine.scheduler.blocks.free == config.blocks
    assert engine.scheduler.windows.free == config.window_blocks
    early, late = resident[len(resident) // 4], max(islice(resident, len(resident) // 2, None))
    assert late < early + (16 << 20), [size >> 20 for size in resident]
