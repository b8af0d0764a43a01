"""Every recorded case of parsing and streaming gives exactly the recorded events and response."""

import json
from pathlib import Path

import pytest

from .case_files import Case, by_area, compare, folder_cases, packed_cases
from .request_runner import TokenizerOf
from .stream_runner import run

CASES = by_area(packed_cases("streams"))


def failures(cases: list[Case], tokenizer_of: TokenizerOf) -> list[str]:
    results = ((case, run(case["input"], tokenizer_of)) for case in cases)
    return [line for case, got in results if (line := compare(case, json.loads(json.dumps(got))))]


def test_all_cases_are_there() -> None:
    assert sum(map(len, CASES.values())) == 712


@pytest.mark.parametrize("area", CASES)
def test_cases(area: str, tokenizer_of: TokenizerOf) -> None:
    assert failures(CASES[area], tokenizer_of) == []


def test_cases_of_a_folder(extra_data: Path, tokenizer_of: TokenizerOf) -> None:
    cases = [case for case in folder_cases(extra_data / "vectors" / "recipe") if "steps" in case["input"]]
    assert cases
    assert failures(cases, tokenizer_of) == []
