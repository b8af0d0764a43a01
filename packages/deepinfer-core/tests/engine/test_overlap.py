"""Overlap = plain: the same tokens, log-probabilities and ends, on a device whose results come as late as they may."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import override

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.plan import Sampled
from deepinfer.engine.request import Progress, Request, SamplingParams
from deepinfer.engine.sampler import Flight, Sampler
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache

from .checker import EXAMPLES, PRECISION, CheckingModel, drain, engine_config, greedy, lone_run, small_config, tokens_of
from .delayed import DelayedAccelerator, DelayedModel

V41 = small_config()
V4 = small_config("deepseek_v4")


def delayed_engine(config: EngineConfig, model: ModelConfig, device: DelayedAccelerator) -> Engine:
    inner = DelayedModel(CheckingModel(model), device, model.vocab_size)
    return Engine(config, model, inner, device.ops(PRECISION), device, None)


def plain_engine(config: EngineConfig, model: ModelConfig) -> Engine:
    host, ops = CpuAccelerator(), Ops(torch.device("cpu"), PRECISION)
    plain = replace(config, overlap=False, max_num_seqs=8, max_num_batched_tokens=512, blocks=64, window_blocks=64)
    return Engine(plain, model, CheckingModel(model), ops, host, None)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    seqs, blocks = draw(st.integers(1, 6)), draw(st.integers(3, 9))
    return engine_config(
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(max(seqs, 2), 300)),
        max_prefill_tokens_per_step=draw(st.sampled_from([1, 7, 300])),
        blocks=blocks,
        window_blocks=draw(st.integers(3, 12)),
        max_model_len=draw(st.integers(300, blocks * 128)),
        overlap=True,
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Prompts on both sides of a block border, ends by token, by end-of-sequence and by length."""
    length = draw(st.one_of(st.integers(1, 40), st.integers(110, 270)))
    prompt = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(3, V41.vocab_size, length).tolist()
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 0, 1.0])),
        top_p=draw(st.sampled_from([1, 0.7])),
        max_tokens=draw(st.integers(1, 25)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(3, 39), max_size=3)),
        logprobs=draw(st.sampled_from([None, None, 2, -1])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        seed=draw(st.integers(0, 1000)),
        presence_penalty=draw(st.sampled_from([0, 0, 0, 1.5])),
    )
    return Request(prompt, params, priority=draw(st.sampled_from([0, 0, 1])))


def result_of(gained: Sequence[Progress]) -> tuple[object, ...]:
    """Everything that a request was given, in a form that compares."""
    rows = [part.logprobs for part in gained if part.logprobs is not None]
    prompt = [row for part in gained for row in part.prompt_logprobs or ()]
    plain = [[row.tolist()] if isinstance(row, Tensor) else row for row in rows]
    return tokens_of(gained), gained[-1].finish_reason, gained[-1].stop_reason, plain, prompt


@pytest.mark.parametrize("model", [V41, V4], ids=["v41", "v4"])
@settings(max_examples=EXAMPLES // 10)
@given(data=st.data())
def test_overlap_is_plain(model: ModelConfig, data: st.DataObject) -> None:
    config = data.draw(configs())
    arrivals = data.draw(st.lists(st.tuples(st.integers(0, 8), requests(), st.integers(0, 40)), min_size=1, max_size=8))
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    gained: dict[int, list[Progress]] = {}
    asked: dict[int, Request] = {}
    with DelayedAccelerator() as device:
        engine = delayed_engine(config, model, device)
        aborts: dict[int, int] = {}
        for step in range(5000):
            while left and left[0][0] <= step:
                _, request, doom = left.pop(0)
                number = engine.add(request)
                asked[number], gained[number] = request, []
                if doom > 30:
                    aborts[number] = step + doom - 30
            for number, when in aborts.items():
                if when == step:
                    engine.abort(number)
            for progress in engine.step():
                gained[progress.request_id].append(progress)
            engine.scheduler.check()
            if not left and not engine.has_work:
                break
    assert not engine.has_work
    assert engine.scheduler.blocks.free == config.blocks
    assert engine.scheduler.windows.free == config.window_blocks
    reference = plain_engine(config, model)
    numbers = {reference.add(request): number for number, request in asked.items()}
    for alone, parts in drain(reference).items():
        had = gained[numbers[alone]]
        assert [part.finish_reason for part in had[:-1]] == [None] * (len(had) - 1)
        if had[-1].finish_reason == "abort":
            assert tokens_of(had) == tokens_of(parts)[: len(tokens_of(had))]
        else:
            assert result_of(had) == result_of(parts)


def test_the_delayed_device_catches_a_token_that_is_read_too_early() -> None:
    with DelayedAccelerator() as device:
        engine = delayed_engine(engine_config(overlap=True), V41, device)
        engine.add(Request([3, 4, 5], greedy(max_tokens=4, ignore_eos=True)))
        flight = engine._launch(engine.scheduler.schedule(0))
        assert flight.host_tokens.tolist() == [-(2**62)]
        for read in (flight.token_ids.tolist, flight.token_ids.item, flight.token_ids.cpu):
            with pytest.raises((AssertionError, RuntimeError)):
                read()
        assert 0 <= engine.sampler.read(flight).token_ids[0] < 40


def test_two_steps_are_in_flight_while_sequences_decode() -> None:
    with DelayedAccelerator() as device:
        engine = delayed_engine(engine_config(overlap=True), V41, device)
        number = engine.add(Request([3, 4, 5], greedy(max_tokens=9, ignore_eos=True)))
        for step in range(8):
            assert [part.request_id for part in engine.step()] == [number]
            assert len(engine.scheduler._launched) == 1, step
        assert engine.step()[0].finish_reason == "length"
        assert not engine.has_work, "a sequence that ends by its limit has no wasted row"


class Breaking(CheckingModel):
    """Raises in chosen steps: where the device computes, after the host has gone on."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__(V41)
        self.errors, self.steps = errors, 0

    @override
    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        self.steps += 1
        if self.steps - 1 in self.errors:
            raise self.errors[self.steps - 1]
        return super().forward(batch, cache)


class BreakingLaunch(DelayedModel):
    """Raises in chosen steps: where the host gives the device its work."""

    def __init__(self, device: DelayedAccelerator, errors: dict[int, BaseException]) -> None:
        super().__init__(CheckingModel(V41), device, V41.vocab_size)
        self.errors, self.steps = errors, 0

    @override
    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        self.steps += 1
        if self.steps - 1 in self.errors:
            raise self.errors[self.steps - 1]
        return super().forward(batch, cache)


LATE = 6
"""A step in which the first requests decode and the last one waits."""


@pytest.mark.parametrize("where", ["launch", "device"])
def test_a_step_that_fails_ends_its_requests_and_no_others(where: str) -> None:
    config = engine_config(overlap=True, max_num_seqs=2)
    errors: dict[int, BaseException] = {LATE: RuntimeError("the device fell off")}
    asked = [Request([5, 6, 7 + i], greedy(max_tokens=12, ignore_eos=True)) for i in range(3)]
    with DelayedAccelerator() as device:
        model = BreakingLaunch(device, errors) if where == "launch" else DelayedModel(Breaking(errors), device, 40)
        engine = Engine(config, V41, model, device.ops(PRECISION), device, None)
        ids = [engine.add(request) for request in asked]
        gained = drain(engine)
    for number, request in zip(ids[:2], asked, strict=False):
        assert gained[number][-1].finish_reason == "error"
        assert "the device fell off" in str(gained[number][-1].error)
        assert tokens_of(gained[number]) == lone_run(V41, config, request).token_ids[:LATE]
    assert tokens_of(gained[ids[2]]) == lone_run(V41, config, asked[2]).token_ids
    assert engine.scheduler.blocks.free == config.blocks


class Interrupting(Sampler):
    """Ctrl-C while a step is waited for."""

    interrupts: Iterator[bool]

    @override
    def read(self, flight: Flight, *, ahead: bool = False) -> Sampled:
        if next(self.interrupts):
            raise KeyboardInterrupt
        return super().read(flight, ahead=ahead)


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("when", range(8))
def test_an_interrupt_of_either_half_loses_no_token(where: str, when: int) -> None:
    config = engine_config(overlap=True, max_num_batched_tokens=64, max_num_seqs=2)
    asked = [Request(list(range(3, 39)) * 2, greedy(max_tokens=5, ignore_eos=True)) for _ in range(3)]
    with DelayedAccelerator() as device:
        model = BreakingLaunch(device, {when: KeyboardInterrupt()} if where == "launch" else {})
        engine = Engine(config, V41, model, device.ops(PRECISION), device, None)
        if where == "wait":
            engine.sampler.__class__ = Interrupting
            engine.sampler.interrupts = iter(step == when for step in range(1000))  # type: ignore[attr-defined]
        ids = [engine.add(request) for request in asked]
        gained: dict[int, list[Progress]] = {number: [] for number in ids}
        interrupts = 0
        while engine.has_work:
            try:
                for progress in engine.step():
                    gained[progress.request_id].append(progress)
            except KeyboardInterrupt:
                interrupts += 1
            engine.scheduler.check()
    assert interrupts == 1
    for number, request in zip(ids, asked, strict=True):
        assert tokens_of(gained[number]) == lone_run(V41, config, request).token_ids
    assert engine.scheduler.blocks.free == config.blocks


def test_a_sequence_that_stops_keeps_its_blocks_until_its_wasted_row_is_over() -> None:
    config = engine_config(overlap=True)
    plain = lone_run(V41, config, Request([3, 4], greedy(max_tokens=30, ignore_eos=True))).token_ids
    stop = greedy(max_tokens=30, ignore_eos=True, stop_token_ids=[plain[7]])
    with DelayedAccelerator() as device:
        engine = delayed_engine(config, V41, device)
        engine.add(Request([3, 4], stop))
        while not any(progress.finish_reason for progress in engine.step()):
            pass
        assert engine.scheduler.blocks.free == config.blocks - 1
        assert engine.has_work
        assert engine.step() == []
        assert engine.scheduler.blocks.free == config.blocks
        assert not engine.has_work


SHARED_TEXT = np.random.default_rng(11).integers(3, V41.vocab_size, 400).tolist()


@pytest.mark.parametrize("model", [V41, V4], ids=["v41", "v4"])
@settings(max_examples=EXAMPLES // 33)
@given(data=st.data())
def test_overlap_with_prefix_hits_is_plain(model: ModelConfig, data: st.DataObject) -> None:
    """Prompts that share a first part arrive while others decode; the last one always finds what the first one left."""
    config = replace(data.draw(configs()), blocks=9, window_blocks=12, max_model_len=512, prefix_cache="exact")
    later = st.tuples(st.integers(0, 30), st.integers(0, 400), st.integers(0, 60), st.integers(1, 25))
    drawn = data.draw(st.lists(later, max_size=6))
    asked = [Request(SHARED_TEXT, greedy(max_tokens=5, ignore_eos=True))]
    for _, shared, more, count in drawn:
        tail = np.random.default_rng(more).integers(3, model.vocab_size, more).tolist()
        prompt = [*SHARED_TEXT[:shared], *tail] or [5]
        asked.append(Request(prompt, greedy(max_tokens=count, ignore_eos=True)))
    left = sorted(zip([0, *(when for when, *_ in drawn)], asked, strict=True), key=lambda arrival: arrival[0])
    gained: list[tuple[Request, list[Progress]]] = []
    with DelayedAccelerator() as device:
        engine = delayed_engine(config, model, device)
        parts: dict[int, list[Progress]] = {}
        for step in range(5000):
            while left and left[0][0] <= step:
                request = left.pop(0)[1]
                parts[engine.add(request)] = own = []
                gained.append((request, own))
            for progress in engine.step():
                parts[progress.request_id].append(progress)
            engine.scheduler.check()
            if not left and not engine.has_work:
                break
        repeated = engine.add(asked[0])
        gained.append((asked[0], drain(engine)[repeated]))
        again = engine.add(asked[0])
        gained.append((asked[0], drain(engine)[again]))
        engine.scheduler.check()
    for request, own in gained:
        assert tokens_of(own) == lone_run(model, config, request).token_ids
        use = own[-1].cache
        assert use is not None
        assert use.hit - use.replayed + use.computed == len(request.prompt_token_ids)
    assert use.hit == 384
    assert not engine.has_work
    assert engine.scheduler.blocks.free == config.blocks
    assert engine.scheduler.windows.free == config.window_blocks
