"""Who runs, who waits, who must go: classes, deadlines, aborts in every state, the bound on the gap between tokens."""

from typing import override

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request
from deepinfer.engine.sequence import SequenceTable
from deepinfer.errors import RequestError
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache

from .checker import (
    EXAMPLES,
    CheckingModel,
    checked_engine,
    drain,
    engine_config,
    greedy,
    lone_run,
    small_config,
    small_ops,
    tokens_of,
)

V41 = small_config()


class Counting(CheckingModel):
    """Keeps the rows of each sequence in each step, and whether any computes a token that it has generated."""

    table: SequenceTable

    def __init__(self) -> None:
        super().__init__(V41)
        self.steps: list[tuple[list[int], bool]] = []

    @override
    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        rows, ends = batch.query_lens.tolist(), batch.context_lens.tolist()
        decodes = [
            count == 1 and end == self.table.lengths[row] and end > self.table[row].prompt_length
            for row, count, end in zip(batch.states.tolist(), rows, ends, strict=True)
        ]
        self.steps.append((rows, any(decodes)))
        return super().forward(batch, cache)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine_of(config: EngineConfig, model: CheckingModel | None = None, clock: Clock | None = None) -> Engine:
    model = CheckingModel(V41) if model is None else model
    return Engine(config, V41, model, small_ops(), CpuAccelerator(), None, clock=clock or Clock())


def request(length: int, tokens: int, priority: int = 0, timeout_s: float | None = None) -> Request:
    prompt = np.random.default_rng(length).integers(3, V41.vocab_size, length).tolist()
    return Request(prompt, greedy(max_tokens=tokens, ignore_eos=True), priority=priority, timeout_s=timeout_s)


@settings(max_examples=EXAMPLES // 4)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 150), st.integers(1, 20), st.integers(0, 1)),
        min_size=1,
        max_size=8,
    ),
    sizes=st.tuples(st.integers(1, 8), st.integers(8, 90), st.integers(1, 40)),
    overlap=st.booleans(),
)
def test_the_gap_between_tokens_is_one_step_of_bounded_rows(
    arrivals: list[tuple[int, int, int, int]], sizes: tuple[int, int, int], overlap: bool
) -> None:
    seqs, budget, prefill = sizes
    config = engine_config(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_prefill_tokens_per_step=prefill, overlap=overlap
    )
    model = Counting()
    engine = engine_of(config, model)
    model.table = engine.scheduler._table
    left = sorted(arrivals)
    talking: set[int] = set()
    same_class = len({priority for *_, priority in arrivals}) == 1
    for step in range(3000):
        while left and left[0][0] <= step:
            _, length, tokens, priority = left.pop(0)
            engine.add(request(length, tokens, priority))
        told = engine.step()
        if same_class:  # else a higher class may take a place
            assert talking <= {progress.request_id for progress in told}, (
                "a step without a token for a decoding sequence"
            )
        talking |= {progress.request_id for progress in told if progress.token_ids}
        talking -= {progress.request_id for progress in told if progress.finish_reason is not None}
        if not left and not engine.has_work:
            break
    assert not engine.has_work
    for rows, decodes in model.steps:
        assert sum(rows) <= budget
        assert len(rows) <= seqs
        if decodes:
            assert sum(rows) <= len(rows) + prefill


@given(classes=st.lists(st.integers(-2, 2), min_size=1, max_size=8))
@settings(max_examples=EXAMPLES // 4)
def test_a_higher_class_goes_first_and_inside_a_class_the_one_that_came_first(classes: list[int]) -> None:
    engine = engine_of(engine_config(max_num_seqs=1))
    ids = [engine.add(request(5, 2, priority)) for priority in classes]
    ended: list[int] = []
    while engine.has_work:
        ended += [progress.request_id for progress in engine.step() if progress.finish_reason is not None]
    assert ended == sorted(ids, key=lambda number: (-classes[number], number))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_higher_class_takes_the_place_of_the_newest_of_the_lowest(overlap: bool) -> None:
    config = engine_config(max_num_seqs=3, overlap=overlap)
    engine = engine_of(config)
    asked = [request(5, 30, 1), request(6, 30, 0), request(7, 30, 0), request(8, 5, 2)]
    first = [engine.add(one) for one in asked[:3]]
    gained: dict[int, list[Progress]] = {number: [] for number in (*first, 3)}

    def step() -> set[int]:
        told = engine.step()
        engine.scheduler.check()
        for progress in told:
            gained[progress.request_id].append(progress)
        return {progress.request_id for progress in told}

    for _ in range(3):
        assert step() == {0, 1, 2}
    assert engine.add(asked[3]) == 3
    seen = [step() for _ in range(7)]
    assert {0, 1, 3} in seen, "the newest of the lowest class made room"
    assert all({0, 1} <= told for told in seen), "the others went on"
    while engine.has_work:
        step()
    for number, one in enumerate(asked):
        assert tokens_of(gained[number]) == lone_run(V41, config, one).token_ids


def test_a_place_that_would_not_help_is_not_taken() -> None:
    config = engine_config(max_num_seqs=4, blocks=4)
    engine = engine_of(config)
    engine.add(request(200, 20, 1))  # two blocks of a class that must not give way
    engine.add(request(100, 20, 0))
    engine.step()
    engine.add(request(400, 5, 1))  # needs four
    for _ in range(3):
        assert {progress.request_id for progress in engine.step()} == {0, 1}
    assert sorted(drain(engine)) == [0, 1, 2]


def test_a_lower_class_does_not_hold_up_a_higher_one_with_its_prefill() -> None:
    config = engine_config(max_num_seqs=4, max_num_batched_tokens=20)
    engine = engine_of(config)
    engine.add(request(400, 2, 0))
    engine.step()
    urgent = engine.add(request(15, 2, 1))
    assert [progress.request_id for progress in engine.step()] == [urgent]


def stalled(config: EngineConfig, state: str, clock: Clock, timeout_s: float | None) -> tuple[Engine, int, Request]:
    """An engine in which request 1 is in `state`."""
    engine = engine_of(config, clock=clock)
    if state == "waiting":
        engine.add(request(5, 60))
        engine.step()
    victim = request(100, 60, 0, timeout_s)
    number = engine.add(victim)
    if state == "prefill":
        engine.step()
    elif state in ("decode", "preempted"):
        for _ in range(12):
            engine.step()
    if state == "preempted":
        engine.add(request(5, 60, 1))
        for _ in range(3):
            engine.step()
    return engine, number, victim


@pytest.mark.parametrize("by", ["abort", "timeout"])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_can_end_in_every_state(state: str, overlap: bool, by: str) -> None:
    config = engine_config(max_num_seqs=1, max_num_batched_tokens=20, overlap=overlap)
    clock = Clock()
    engine, number, victim = stalled(config, state, clock, 3.0 if by == "timeout" else None)
    if by == "abort":
        engine.abort(number)
    else:
        clock.now += 2.9
        assert all(progress.finish_reason is None for progress in engine.step())
        clock.now += 0.2
    told: list[Progress] = []
    for _ in range(3):
        told += [progress for progress in engine.step() if progress.request_id == number]
        engine.scheduler.check()
    assert told[-1].finish_reason == "abort"
    assert ("timeout_s" in (told[-1].error or "")) == (by == "timeout")
    assert number not in drain(engine)
    assert engine.scheduler.blocks.free == config.blocks
    assert engine.scheduler.windows.free == config.window_blocks
    again = engine.add(victim)
    clock.now -= 10
    assert tokens_of(drain(engine)[again]) == lone_run(V41, config, victim).token_ids


def test_a_timeout_keeps_what_was_generated() -> None:
    clock = Clock()
    config = engine_config()
    engine = engine_of(config, clock=clock)
    one = request(5, 60, 0, 10.0)
    number = engine.add(one)
    gained: list[Progress] = []
    while engine.has_work:
        gained += engine.step()
        clock.now += 1
    assert [progress.request_id for progress in gained] == [number] * 11
    assert tokens_of(gained) == lone_run(V41, config, one).token_ids[:10]


def test_a_timeout_that_is_not_reached_does_nothing() -> None:
    engine = engine_of(engine_config())
    number = engine.add(request(5, 6, 0, 1e6))
    assert drain(engine)[number][-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"priority": 1.5}, "priority must be an integer"),
        ({"priority": 2**40}, "priority must be an integer, -2147483648 to 2147483647"),
        ({"timeout_s": -1}, "timeout_s must be a number, at least 0, got -1"),
        ({"timeout_s": "soon"}, "timeout_s must be a number"),
    ],
)
def test_what_is_no_priority_and_no_timeout(changes: dict[str, object], text: str) -> None:
    engine = checked_engine(engine_config(), V41)
    with pytest.raises(RequestError) as caught:
        engine.add(Request([3], greedy(), **changes))  # type: ignore[arg-type]
    assert text in str(caught.value)
