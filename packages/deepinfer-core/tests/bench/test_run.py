"""What a benchmark measures: times from the arrival on, sums that add up, failures that are counted and told."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from deepinfer import LLM, ConfigError
from deepinfer.bench.command import BenchOptions, draw_into, run_all
from deepinfer.bench.load import AT_ONCE, Arrival, Lengths, LoadOptions
from deepinfer.bench.report import as_dict, table
from deepinfer.bench.run import Answer, Times, answer, measure, summarise

SMALL = LoadOptions(requests=3, prompt_tokens=Lengths(4, 9), output_tokens=Lengths(2, 3))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(accelerator="cpu", max_model_len=128, max_num_seqs=4)


def arrival(time_s: float, tokens: int = 3, prompt: int = 4) -> Arrival:
    return Arrival(time_s, (5,) * prompt, tokens)


def test_no_request_is_sent_before_its_time(llm: LLM) -> None:
    load = [arrival(0.0), arrival(0.3), arrival(0.3, tokens=1), arrival(0.6)]
    answers = answer(llm.engine, load, 1.0)
    for one in answers:
        assert one.error is None
        assert one.tokens == one.arrival.output_tokens
        assert one.first_s is not None
        assert one.ended_s is not None
        assert one.arrival.time_s < one.first_s <= one.last_s <= one.ended_s
    assert not llm.engine.has_work or llm.engine.step() == []


def test_a_request_that_cannot_be_served_is_counted_and_told(llm: LLM) -> None:
    result = measure(llm.engine, [arrival(0.0), arrival(0.0, prompt=400), arrival(0.0)], rate=AT_ONCE)
    assert (result.requests, result.failed, result.output_tokens, result.prompt_tokens) == (3, 1, 6, 8)
    assert "max_model_len=128" in result.errors[0]
    nothing = measure(llm.engine, [arrival(0.0, prompt=400)], rate=AT_ONCE)
    assert nothing.requests_per_s == 0
    assert json.loads(json.dumps(as_dict([nothing])))["runs"][0]["end_to_end"]["p50"] is None


def test_times_count_from_the_arrival_however_late_the_engine_takes_it() -> None:
    early, late = Answer(arrival(1.0, tokens=5)), Answer(arrival(2.0, tokens=1))
    early.first_s, early.last_s, early.ended_s, early.tokens = 3.0, 5.0, 5.0, 5
    late.first_s, late.last_s, late.ended_s, late.tokens = 10.0, 10.0, 10.0, 1
    result = summarise([early, late], 2.0)
    assert (result.time_to_first_token.p50, result.time_to_first_token.mean) == (5.0, 5.0)
    assert result.time_per_output_token == Times(0.5, 0.5, 0.5, 0.5)
    assert result.end_to_end.mean == 6.0
    assert (result.duration_s, result.output_tokens_per_s, result.tokens_per_s) == (10.0, 0.6, 1.4)


def test_each_rate_is_a_run_with_a_picture_and_a_table(llm: LLM, tmp_path: Path) -> None:
    results = run_all(llm, BenchOptions(load=SMALL, rates=(50.0, AT_ONCE), warmup=1))
    assert [result.rate for result in results] == [50.0, AT_ONCE]
    assert len({(result.prompt_tokens, result.output_tokens) for result in results}) == 1
    path = tmp_path / "load.png"
    draw_into(path, results, "tiny")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="the picture cannot be written"):
        draw_into(tmp_path / "no" / "load.png", results, "tiny")
    screen = io.StringIO()
    Console(width=80, file=screen).print(table(results))
    shown = screen.getvalue()
    for word in ("50/s", "all at once", "to first token", "per output token", "end to end", "p99"):
        assert word in shown
    assert as_dict(results)["runs"][1]["rate"] == "inf"


def test_arrivals_come_from_a_file(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text('{"time": 0.1, "prompt_tokens": 4, "output_tokens": 2}\n' * 2)
    (result,) = run_all(llm, BenchOptions(load=SMALL, arrivals=path, warmup=0))
    assert (result.rate, result.requests, result.output_tokens) == (None, 2, 4)


def test_a_picture_without_matplotlib_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "deepinfer.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'deepinfer-core\[plot\]'"):
        draw_into(tmp_path / "load.png", [], "tiny")
