"""What a benchmark sends: the same requests at every rate, at the right moments, with the prefix that was asked for."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import ConfigError
from deepinfer.bench.load import AT_ONCE, Lengths, LoadOptions, at_rate, from_facts, read_file
from deepinfer.model.checkpoint import open_checkpoint

MODEL = open_checkpoint("tiny").config


@given(
    rate=st.floats(0.1, 1000),
    requests=st.integers(1, 40),
    low=st.integers(1, 50),
    more=st.integers(0, 50),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**40),
)
def test_requests_are_those_that_were_asked_for(
    rate: float, requests: int, low: int, more: int, share: float, seed: int
) -> None:
    options = LoadOptions(
        requests=requests,
        prompt_tokens=Lengths(low, low + more),
        output_tokens=Lengths(2, 5),
        shared_prefix=share,
        seed=seed,
    )
    load, twice, at_once = (at_rate(r, options, MODEL) for r in (rate, 2 * rate, AT_ONCE))
    assert [(one.prompt, one.output_tokens) for one in load] == [(one.prompt, one.output_tokens) for one in at_once]
    assert [one.time_s for one in load] == pytest.approx([2 * one.time_s for one in twice])
    assert {one.time_s for one in at_once} == {0.0}
    assert [one.time_s for one in load] == sorted(one.time_s for one in load)
    special = {MODEL.bos_token_id, MODEL.image_token_id, *MODEL.eos_token_ids}
    longest = max((one.prompt for one in load), key=len)
    for one in load:
        assert low <= len(one.prompt) <= low + more
        assert 2 <= one.output_tokens <= 5
        assert special.isdisjoint(one.prompt)
        shared = round(len(one.prompt) * share)
        assert one.prompt[:shared] == longest[: round(len(longest) * share)][:shared]


def test_gaps_are_those_of_a_poisson_process() -> None:
    load = at_rate(20.0, LoadOptions(requests=4000, prompt_tokens=Lengths(1, 1)), MODEL)
    gaps = np.diff([one.time_s for one in load])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.1)
    assert (gaps < math.log(2) / 20).mean() == pytest.approx(0.5, abs=0.05)


def test_prompts_without_a_shared_prefix_differ() -> None:
    load = at_rate(AT_ONCE, LoadOptions(requests=8), MODEL)
    assert len({one.prompt[:8] for one in load}) == 8


def test_a_file_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text(
        '{"time": 2.5, "prompt_tokens": 7, "output_tokens": 3}\n\n{"time": 0, "prompt_tokens": 4, "output_tokens": 1}\n'
    )
    load = from_facts(read_file(path), LoadOptions(), MODEL)
    assert [(one.time_s, len(one.prompt), one.output_tokens) for one in load] == [(0.0, 4, 1), (2.5, 7, 3)]


@pytest.mark.parametrize(
    "line",
    [
        "7",
        "[]",
        "{",
        '{"time": 1}',
        '{"time": -1, "prompt_tokens": 7, "output_tokens": 3}',
        '{"time": NaN, "prompt_tokens": 7, "output_tokens": 3}',
        '{"time": "1", "prompt_tokens": 7, "output_tokens": 3}',
        '{"time": 1, "prompt_tokens": 0, "output_tokens": 3}',
        '{"time": 1, "prompt_tokens": 7.5, "output_tokens": 3}',
        '{"time": 1, "prompt_tokens": 7, "output_tokens": true}',
    ],
)
def test_a_line_that_is_no_request_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text('{"time": 0, "prompt_tokens": 4, "output_tokens": 1}\n' + line)
    with pytest.raises(ConfigError, match="line 2: expected"):
        read_file(path)


def test_what_makes_no_sense_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="found none"):
        read_file(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="expected a file of JSON lines"):
        read_file(tmp_path / "gone.jsonl")
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="above 0, or inf"):
            at_rate(rate, LoadOptions(), MODEL)
    for text in ("", "0", "8:4", "-3", "x", "1:2:3"):
        with pytest.raises(ConfigError, match="--prompt-tokens is expected"):
            Lengths.parse(text, "--prompt-tokens")
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="share from 0 to 1"):
            LoadOptions(shared_prefix=share)
    with pytest.raises(ConfigError, match="at least 1"):
        LoadOptions(requests=0)
