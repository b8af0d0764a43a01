"""The whole loop over the checking model: any schedule gives each request what a lone run gives, and leaks nothing."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request, SamplingParams
from deepinfer.engine.speculation import Drafting
from deepinfer.errors import RequestError
from deepinfer.model.config import ModelConfig

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
from .oracle import drafting

V41 = small_config()
V4 = small_config("deepseek_v4")


@st.composite
def configs(draw: st.DrawFn, model: ModelConfig) -> EngineConfig:
    """Engines from roomy to starved; the longest sequence always fits alone."""
    seqs = draw(st.integers(1, 6))
    blocks = draw(st.integers(3, 9))
    replay = draw(st.sampled_from([None, model.window, model.window + 12])) if model.first_decoder_layer else None
    return engine_config(
        decoder_replay=replay,
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(max(seqs, 2), 300)),
        blocks=blocks,
        window_blocks=draw(st.integers(3, 12)),
        max_model_len=draw(st.integers(300, blocks * 128)),
        overlap=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Prompts and lengths on both sides of a block border."""
    length = draw(st.one_of(st.integers(1, 40), st.integers(110, 270)))
    seed = draw(st.integers(0, 2**32 - 1))
    prompt = np.random.default_rng(seed).integers(3, V41.vocab_size, length).tolist()
    rows = draw(st.sampled_from([None, None, None, -1]))
    return Request(prompt, greedy(max_tokens=draw(st.integers(1, 25)), prompt_logprobs=rows))


def _seeded(request: Request, seed: int) -> Request:
    return replace(request, params=replace(request.params, seed=seed))


def _check(model: ModelConfig, config: EngineConfig, request: Request, gained: list[Progress]) -> None:
    wanted = lone_run(model, config, request)
    assert tokens_of(gained) == wanted.token_ids
    assert [part.finish_reason for part in gained[:-1]] == [None] * (len(gained) - 1)
    assert gained[-1].finish_reason == wanted.finish_reason
    rows = [part.prompt_logprobs for part in gained if part.prompt_logprobs is not None]
    if isinstance(wanted.prompt_logprobs, Tensor):
        assert torch.equal(torch.cat([row for row in rows if isinstance(row, Tensor)]), wanted.prompt_logprobs)
    else:
        assert not rows


def _drafting(model: ModelConfig, config: EngineConfig, requests: list[Request], data: st.DataObject) -> Drafting:
    """Drafts that are right as often as an example says, for requests that are told apart by their seeds."""
    texts = {}
    for request in requests:
        assert request.params.seed is not None
        texts[request.params.seed] = [*request.prompt_token_ids, *lone_run(model, config, request).token_ids]
    return drafting(texts, wrong=data.draw(st.sampled_from([0.0, 0.3, 0.9])), seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("model", [V41, V4], ids=["v41", "v4"])
@given(data=st.data())
@settings(max_examples=EXAMPLES // 4)
def test_any_schedule_gives_what_a_lone_run_gives(model: ModelConfig, drafts: bool, data: st.DataObject) -> None:
    config = data.draw(configs(model))
    arrivals = data.draw(st.lists(st.tuples(st.integers(0, 8), requests(), st.integers(0, 40)), min_size=1, max_size=8))
    arrivals = [(when, _seeded(request, seed), doom) for seed, (when, request, doom) in enumerate(arrivals)]
    wanted = [request for _, request, _ in arrivals]
    engine = checked_engine(config, model, _drafting(model, config, wanted, data) if drafts else None)
    ids: dict[int, Request] = {}
    aborts: dict[int, int] = {}
    gained: dict[int, list[Progress]] = {}
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(5000):
        while left and left[0][0] <= step:
            _, request, doom = left.pop(0)
            number = engine.add(request)
            ids[number], gained[number] = request, []
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
    for number, request in ids.items():
        if gained[number][-1].finish_reason == "abort":
            whole = lone_run(model, config, request).token_ids
            assert tokens_of(gained[number]) == whole[: len(tokens_of(gained[number]))]
        else:
            _check(model, config, request, gained[number])
    assert engine.scheduler.blocks.free == config.blocks
    assert engine.scheduler.windows.free == config.window_blocks


def test_a_starved_pool_preempts_and_every_request_still_ends_right() -> None:
    config = engine_config(decoder_replay=V41.window, blocks=4, max_model_len=512, max_num_seqs=4)
    engine = checked_engine(config, V41)
    generator = np.random.default_rng(5)
    requests = [
        Request(generator.integers(3, 40, 120).tolist(), greedy(max_tokens=200, ignore_eos=True)) for _ in range(4)
    ]
    ids = [engine.add(request) for request in requests]
    preempted = 0
    gained: dict[int, list[Progress]] = {number: [] for number in ids}
    running = 0
    while engine.has_work:
        for progress in engine.step():
            gained[progress.request_id].append(progress)
        engine.scheduler.check()
        now = sum(sequence is not None for sequence in engine.sampler._table.sequences)
        ended = sum(bool(parts) and parts[-1].finish_reason is not None for parts in gained.values())
        preempted += max(running - now, 0) if ended == 0 else 0
        running = now
    assert preempted > 0
    for number, request in zip(ids, requests, strict=True):
        _check(V41, config, request, gained[number])


def test_a_decoding_sequence_holds_two_window_blocks_at_most() -> None:
    model = small_config(window=128)
    engine = checked_engine(engine_config(window_blocks=8), model)
    engine.add(Request([5] * 300, greedy(max_tokens=200, ignore_eos=True)))
    engine.step()
    while engine.has_work:
        assert engine.scheduler.windows.size - engine.scheduler.windows.free <= 2
        engine.step()


def test_an_empty_plan_runs() -> None:
    engine = checked_engine(engine_config(), V41)
    assert engine.step() == []


def test_decode_goes_on_while_a_long_prompt_is_prefilled() -> None:
    config = engine_config(max_num_batched_tokens=16, max_num_seqs=4)
    engine = checked_engine(config, V41)
    first = engine.add(Request([3, 4, 5], greedy(max_tokens=30, ignore_eos=True)))
    engine.step()
    engine.add(Request(list(range(3, 39)) * 6, greedy(max_tokens=2)))
    for _ in range(10):
        assert [progress.request_id for progress in engine.step()] == [first]


class FailingModel(CheckingModel):
    """Raises in chosen steps."""

    def __init__(self, model: ModelConfig, errors: dict[int, BaseException]) -> None:
        super().__init__(model)
        self.errors = errors
        self.steps = 0

    def forward(self, *arguments: object) -> object:  # type: ignore[override]
        self.steps += 1
        if self.steps - 1 in self.errors:
            raise self.errors[self.steps - 1]
        return super().forward(*arguments)  # type: ignore[arg-type]


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    model = FailingModel(V41, {2: RuntimeError("the device fell off")})
    config = engine_config(max_num_seqs=2)
    engine = Engine(config, V41, model, small_ops(), CpuAccelerator(), None)
    doomed = [engine.add(Request([5, 6, number], greedy(max_tokens=9, ignore_eos=True))) for number in (7, 8)]
    later = Request([9, 9], greedy(max_tokens=4, ignore_eos=True))
    waiting = engine.add(later)
    gained = drain(engine)
    for number in doomed:
        assert gained[number][-1].finish_reason == "error"
        assert "RuntimeError: the device fell off" in str(gained[number][-1].error)
    _check(V41, config, later, gained[waiting])
    assert engine.scheduler.blocks.free == config.blocks


def test_an_interrupt_loses_no_token() -> None:
    model = FailingModel(V41, {1: KeyboardInterrupt(), 4: KeyboardInterrupt()})
    config = engine_config(max_num_batched_tokens=64, decoder_replay=V41.window)
    engine = Engine(config, V41, model, small_ops(), CpuAccelerator(), None)
    request = Request(list(range(3, 39)) * 4, greedy(max_tokens=5, ignore_eos=True))
    engine.add(request)
    gained: list[Progress] = []
    interrupts = 0
    while engine.has_work:
        try:
            gained += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            engine.scheduler.check()
    assert interrupts == 2
    _check(V41, config, request, gained)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request([], greedy()), "the prompt is empty"),
        (Request([3, 40], greedy()), "token ids must be 0 to 39, got 40 at position 1"),
        (Request([-1], greedy()), "got -1 at position 0"),
        (Request([3, 2, 5], greedy()), "token 2 at position 1 stands for an image"),
        (Request([3.5], greedy()), "must be a flat list of integers"),  # type: ignore[list-item]
        (Request([[3], [4]], greedy()), "must be a flat list of integers"),  # type: ignore[list-item]
        (Request([[3], [4, 5]], greedy()), "must be a flat list of integers"),  # type: ignore[list-item]
        (Request([True, False], greedy()), "must be a flat list of integers"),
        (Request(["a"], greedy()), "must be a flat list of integers"),  # type: ignore[list-item]
        (Request([3], greedy(), images=(object(),)), "images are not supported yet"),
        (Request([3] * 513, greedy(max_tokens=1)), "a prompt of 513 tokens and 1 generated do not fit"),
        (Request([3] * 512, greedy(max_tokens=None)), "512 tokens and at least 1 generated do not fit"),
        (Request([3] * 500, greedy(max_tokens=20)), "max_model_len=512 (the cache holds 32 blocks"),
        (Request([3], greedy(max_tokens=0)), "max_tokens must be an integer, at least 1, got 0"),
        (Request([3], greedy(max_tokens=2.5)), "max_tokens must be an integer"),
        (Request([3], SamplingParams(temperature=-1)), "temperature must be a number, at least 0, got -1"),
        (Request([3], SamplingParams(temperature=float("nan"))), "temperature must be a number"),
        (Request([3], SamplingParams(temperature="hot")), "got 'hot'"),  # type: ignore[arg-type]
        (Request([3], SamplingParams(top_p=0)), "top_p must be above 0"),
        (Request([3], SamplingParams(top_p=1.1)), "top_p must be a number, 0 to 1, got 1.1"),
        (Request([3], SamplingParams(min_p=-0.1)), "min_p must be a number, 0 to 1"),
        (Request([3], SamplingParams(top_k=-2)), "top_k must be an integer, -1 to"),
        (Request([3], SamplingParams(seed=-1)), "seed must be an integer"),
        (Request([3], SamplingParams(seed=2**63)), "seed must be an integer"),
        (Request([3], SamplingParams(logprobs=-2)), "logprobs must be an integer, -1 to 40"),
        (Request([3], SamplingParams(prompt_logprobs=41)), "prompt_logprobs must be an integer, -1 to 40"),
        (Request([3], SamplingParams(stop_token_ids=[40])), "each of stop_token_ids must be an integer, 0 to 39"),
        (Request([3], SamplingParams(stop=[""])), "each stop string must be a text of at least one character"),
        (Request([3], SamplingParams(stop=[5])), "got 5"),  # type: ignore[list-item]
        (Request([3], SamplingParams(stop=5)), "stop must be a list, got 5"),  # type: ignore[arg-type]
        (Request([3], SamplingParams(stop_token_ids=5)), "stop_token_ids must be a list, got 5"),  # type: ignore[arg-type]
        (Request([3], SamplingParams(stop="x")), "stop strings need a tokenizer.json"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_reason(request_: Request, text: str) -> None:
    engine = checked_engine(engine_config(), V41)
    with pytest.raises(RequestError) as caught:
        engine.add(request_)
    assert text in str(caught.value)
    assert not engine.has_work


def test_requests_come_and_go_from_other_threads() -> None:
    config = engine_config(max_num_seqs=3, decoder_replay=V41.window)
    engine = checked_engine(config, V41)
    requests = [Request([3 + i % 30] * (1 + 7 * i), greedy(max_tokens=5, ignore_eos=True)) for i in range(12)]
    ids: dict[int, Request] = {}
    doomed: set[int] = set()

    def come(part: list[Request]) -> None:
        for request in part:
            ids[number := engine.add(request)] = request
            if len(request.prompt_token_ids) % 3 == 0:
                doomed.add(number)
                engine.abort(number)

    threads = [threading.Thread(target=come, args=(requests[i::3],)) for i in range(3)]
    gained: dict[int, list[Progress]] = {}
    for thread in threads:
        thread.start()
    while engine.has_work or any(thread.is_alive() for thread in threads):
        for progress in engine.step():
            gained.setdefault(progress.request_id, []).append(progress)
        engine.scheduler.check()
    assert sorted(ids) == sorted(gained) == list(range(12))
    for number, request in ids.items():
        if gained[number][-1].finish_reason == "abort":
            assert number in doomed
        else:
            _check(V41, config, request, gained[number])


def test_max_tokens_none_fills_the_context() -> None:
    config = engine_config(max_model_len=140)
    engine = checked_engine(config, V41)
    number = engine.add(Request([3] * 100, greedy(max_tokens=None, ignore_eos=True)))
    assert len(tokens_of(drain(engine)[number])) == 40


def test_stop_tokens_end_a_request_and_are_kept() -> None:
    config = engine_config()
    plain = lone_run(V41, config, Request([3, 4], greedy(max_tokens=30, ignore_eos=True))).token_ids
    stop = plain[7]
    engine = checked_engine(config, V41)
    number = engine.add(Request([3, 4], greedy(max_tokens=30, ignore_eos=True, stop_token_ids=[stop])))
    last = drain(engine)[number]
    assert tokens_of(last) == plain[: plain.index(stop) + 1]
    assert (last[-1].finish_reason, last[-1].stop_reason) == ("stop", stop)


def test_prompt_rows_come_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.engine.scheduler.PROMPT_ROWS", 50)
    config = engine_config(decoder_replay=V41.window)
    engine = checked_engine(config, V41)
    request = Request(list(range(3, 39)) * 4, greedy(max_tokens=3, prompt_logprobs=-1, ignore_eos=True))
    number = engine.add(request)
    gained = drain(engine)[number]
    assert [len(part.prompt_logprobs) for part in gained if part.prompt_logprobs is not None] == [50, 50, 44]
    _check(V41, config, request, gained)


def test_best_log_probs_are_those_of_the_whole_rows() -> None:
    config = engine_config(max_num_batched_tokens=16)
    prompt = list(range(3, 39))
    engine = checked_engine(config, V41)
    numbers = [
        engine.add(Request(prompt, greedy(max_tokens=5, ignore_eos=True, logprobs=count, prompt_logprobs=count)))
        for count in (-1, 3, 0)
    ]
    gained = drain(engine)
    tokens = tokens_of(gained[numbers[0]])
    for name, followed in (("prompt_logprobs", [*prompt[1:], None]), ("logprobs", list(tokens))):
        parts = {n: [getattr(part, name) for part in gained[n] if getattr(part, name) is not None] for n in numbers}
        whole = torch.cat(parts[numbers[0]])
        assert whole.dtype == torch.float32
        assert torch.allclose(whole.exp().sum(1), torch.ones(len(whole)))
        for number, count in zip(numbers[1:], (3, 0), strict=True):
            items = [item for part in parts[number] for item in part]
            assert [item.token_id for item in items] == followed
            for row, item in zip(whole, items, strict=True):
                values, ids = row.topk(count)
                assert item.top == dict(zip(ids.tolist(), values.tolist(), strict=True))
                assert item.logprob == (None if item.token_id is None else float(row[item.token_id]))
