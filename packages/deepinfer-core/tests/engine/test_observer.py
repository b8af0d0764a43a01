"""An observed engine gives the same tokens, its numbers add up, and its timeline can be read."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deepinfer import LLM, ConfigError, SamplingParams
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.engine.alarms import Alarms
from deepinfer.engine.engine import Engine
from deepinfer.engine.metrics import TIMES_S, Histogram, Snapshot
from deepinfer.engine.observer import Observer, observe
from deepinfer.engine.request import Request
from deepinfer.prometheus import prometheus_text

from .checker import (
    EXAMPLES,
    CheckingModel,
    checked_engine,
    drain,
    engine_config,
    greedy,
    small_config,
    small_ops,
    tokens_of,
)

V41 = small_config()


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, V41.vocab_size, length).tolist()
    return ids


def lasting(length: int, tokens: int, seed: int = 0) -> Request:
    return Request(prompt(length, seed), greedy(max_tokens=tokens, ignore_eos=True))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 270), st.integers(1, 12)), min_size=1, max_size=6),
    budget=st.integers(6, 200),
)
@settings(max_examples=EXAMPLES // 4)
def test_the_numbers_add_up_and_the_tokens_are_the_same(sizes: list[tuple[int, int]], budget: int) -> None:
    config = engine_config(
        max_num_seqs=6, max_num_batched_tokens=budget, blocks=40, window_blocks=40, max_model_len=384
    )
    plain, engine = checked_engine(config, V41), checked_engine(config, V41)
    observer = Observer(engine)
    requests = [lasting(*size, seed) for seed, size in enumerate(sizes)]
    wanted = [plain.add(request) for request in requests]
    ids = [engine.add(request) for request in requests]
    unobserved, gained = drain(plain), drain(engine)
    assert [tokens_of(gained[number]) for number in ids] == [tokens_of(unobserved[number]) for number in wanted]
    told = observer.metrics.snapshot()
    prompts, tokens = sum(size for size, _ in sizes), sum(count for _, count in sizes)
    assert told.value("requests") == told.value("finished_requests", "length") == len(sizes)
    assert told.value("prompt_tokens") == told.value("prefill_rows") == prompts
    assert told.value("generated_tokens") == tokens
    assert told.value("decode_rows") == tokens - len(sizes)
    assert told.value("preemptions") == told.value("failed_steps") == 0
    assert told.spread("time_to_first_token_seconds").count == told.spread("request_time_seconds").count == len(sizes)
    assert told.spread("time_between_tokens_seconds").count == tokens - len(sizes)
    assert told.spread("step_time_seconds").count == told.value("steps")
    assert told.spread("step_part_seconds", "run").count == told.value("steps")
    assert told.spread("step_time_seconds").sum >= told.spread("step_part_seconds", "run").sum


def test_preemptions_and_levels_are_told() -> None:
    config = engine_config(max_num_seqs=2, max_num_batched_tokens=300, blocks=3, window_blocks=6, max_model_len=300)
    engine = checked_engine(config, V41)
    observer = Observer(engine)
    for seed in range(2):
        engine.add(lasting(120, 40, seed))
    engine.step()
    told = observer.metrics.snapshot()
    assert (told.value("running"), told.value("waiting")) == (2, 0)
    assert told.value("free_blocks") == 1
    drain(engine)
    assert observer.metrics.snapshot().value("preemptions") == 1


class Failing(CheckingModel):
    def forward(self, *arguments: object) -> object:  # type: ignore[override]
        raise RuntimeError("the device fell off")


def test_failures_and_aborts_are_told_and_a_closed_observer_is_gone() -> None:
    engine = Engine(engine_config(max_num_seqs=1), V41, Failing(V41), small_ops(), CpuAccelerator(), None)
    rooms = engine.scheduler, engine.builder, engine.runner, engine.sampler
    with Observer(engine) as observer:
        engine.add(lasting(5, 3))
        aborted = engine.add(lasting(5, 3))
        engine.abort(aborted)
        drain(engine)
    told = observer.metrics.snapshot()
    assert told.value("finished_requests", "error") == told.value("finished_requests", "abort") == 1
    assert told.value("failed_steps") == 1
    assert (engine.scheduler, engine.builder, engine.runner, engine.sampler) == rooms


def test_the_timeline_holds_steps_their_parts_and_a_track_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = checked_engine(engine_config(max_num_seqs=2), V41)
    with observe(engine, path) as observer:
        for seed in range(3):
            engine.add(lasting(20, 4, seed))
        drain(engine)
        assert observer.metrics.counters["steps"] > 3
    events: list[dict[str, Any]] = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    steps = [(span["ts"], span["ts"] + span["dur"]) for span in spans if span["name"] == "step"]
    assert len(steps) == observer.metrics.counters["steps"]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(steps))
    for name in ("schedule", "build", "run", "sample", "read", "commit"):
        parts = [(span["ts"], span["ts"] + span["dur"]) for span in spans if span["name"] == name]
        assert len(parts) == len(steps)
        for (begin, end), (first, last) in zip(parts, steps, strict=True):
            assert first - 0.2 <= begin <= end <= last + 0.2  # times are rounded to 0.1 us
    tracks = {span["tid"] for span in spans if span["pid"] == 2}
    assert len(tracks) == 3
    for track in tracks:
        assert [span["name"] for span in spans if span["pid"] == 2 and span["tid"] == track] == [
            "waiting",
            "prefill",
            "decode",
        ]


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    engine = checked_engine(engine_config(), V41)
    with pytest.raises(ConfigError, match="the trace cannot be written"):
        observe(engine, tmp_path / "no" / "trace.json")


def test_llm_tells_metrics_from_the_first_call_on() -> None:
    llm = LLM(accelerator="cpu", max_num_seqs=2, max_model_len=128)
    assert llm.metrics().value("requests") == 0
    llm.generate([[5, 6], [7]], SamplingParams(max_tokens=3, ignore_eos=True))
    told = llm.metrics()
    assert (told.value("requests"), told.value("generated_tokens")) == (2, 6)
    again = llm.observe()
    assert llm.metrics().value("requests") == 0
    again.close()


@given(values=st.lists(st.floats(0, 100), max_size=30))
def test_prometheus_text_holds_what_the_snapshot_says(values: list[float]) -> None:
    engine = checked_engine(engine_config(), V41)
    observer = Observer(engine)
    observer.metrics.counters["steps"] = len(values)
    observer.metrics.finished["stop"] = 3
    for value in values:
        observer.metrics.times["step_time"].add(value)
    snapshot: Snapshot = observer.metrics.snapshot()
    read = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(prometheus_text(snapshot))
        for sample in family.samples
    }
    assert read["deepinfer_steps_total",] == len(values)
    assert read["deepinfer_finished_requests_total", ("reason", "stop")] == 3
    assert read["deepinfer_step_time_seconds_count",] == len(values)
    for bound in TIMES_S:
        assert read["deepinfer_step_time_seconds_bucket", ("le", str(bound))] == sum(value <= bound for value in values)


def test_a_histogram_has_its_mean() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.add(1.0, 3)
    histogram.add(5.0)
    spread = histogram.spread()
    assert (spread.counts, spread.count, spread.mean) == ((3, 3), 4, 2.0)


def test_drafts_are_counted_and_those_without_effect_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(accelerator="cpu", draft="on", max_num_seqs=4, max_model_len=256)
    with llm.observe():
        done = llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    told = llm.metrics()
    reports = [one.drafts for one in done]
    assert told.value("drafts_verified") == sum(report.verified for report in reports if report is not None) > 0
    assert told.value("drafts_accepted") == sum(report.accepted for report in reports if report is not None)
    assert told.value("generated_tokens") == 160
    caplog.clear()
    for accepted, words in ((0, "none of 512"), (512, "all of 512")):
        alarms = Alarms()
        for verified in (511, 512, 600):
            alarms.drafts(verified=verified, accepted=min(accepted, verified))
        alarms.drafts(verified=900, accepted=450)
        (record,) = caplog.records
        assert words in record.getMessage()
        caplog.clear()


def test_cache_hits_are_counted_and_a_cache_without_effect_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(accelerator="cpu", max_num_seqs=2, max_model_len=1024)
    text = [30 + i % 90 for i in range(600)]
    with llm.observe() as observer:
        done = [llm.generate([text], SamplingParams(max_tokens=2, ignore_eos=True))[0] for _ in range(10)]
    told = observer.metrics.snapshot()
    assert told.value("cache_queries") == 10
    assert told.value("cache_query_tokens") == 6000
    uses = [one.cache for one in done if one.cache is not None]
    assert told.value("cache_hit_tokens") == sum(use.hit for use in uses) > 0
    assert told.value("cache_replayed_tokens") == sum(use.replayed for use in uses)
    assert told.value("prefill_rows") == sum(use.computed for use in uses)
    assert "prefix cache" not in caplog.text
    alarms = Alarms()
    for repeats in (7, 8, 9):
        alarms.prefix_cache(repeats=repeats, hits=0)
    assert caplog.text.count("the prefix cache is on, 8 prompts began as an earlier one") == 1


def test_a_constraint_without_effect_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(accelerator="cpu", max_num_seqs=4, max_model_len=256)
    anything, something = {"grammar": r"root ::= [\x01-\U0010ffff]*"}, {"regex": "[a-z ]*"}
    with llm.observe():
        for structured, told in ((something, 0), (anything, 1), (anything, 1)):
            params = SamplingParams(max_tokens=40, structured=structured, seed=3, logit_bias={1: -100.0})
            done = llm.generate(["x"] * 2, params)
            assert all(one.error is None and len(one.token_ids) > 20 for one in done)
            assert caplog.text.count("masks forbade anything: what it must match admits every text") == told
    assert "this is a bug" not in caplog.text
    with llm.observe():
        llm.engine._begin_matching = lambda params: None  # type: ignore[assignment, method-assign, return-value]
        llm.generate("x", SamplingParams(max_tokens=2, structured=something))
    assert caplog.text.count("must match a constraint runs without one") == 1


def test_repeats_count_from_the_end_of_the_first_of_them() -> None:
    engine = checked_engine(engine_config(max_num_seqs=2), V41)
    observer = Observer(engine)
    for _ in range(2):
        for _ in range(2):
            engine.add(lasting(200, 2))
        drain(engine)
    engine.add(lasting(100, 2))
    engine.add(lasting(200, 2, seed=1))
    assert observer._repeats == 2
