"""Reading recorded cases: from the compressed files beside the tests, or from a folder of more."""

import json
import lzma
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"

type Case = dict[str, Any]


def packed_cases(name: str) -> list[Case]:
    """The cases in `data/NAME.jsonl.xz`."""
    text = lzma.decompress((DATA / f"{name}.jsonl.xz").read_bytes()).decode()
    return [json.loads(line) for line in text.split("\n") if line]


def by_area(cases: list[Case]) -> dict[str, list[Case]]:
    """Cases by their area."""
    areas: dict[str, list[Case]] = {}
    for case in cases:
        areas.setdefault(case["area"], []).append(case)
    return areas


def folder_cases(folder: Path) -> list[Case]:
    """All cases in the .jsonl files of a folder."""
    return [
        json.loads(line)
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").split("\n")
        if line
    ]


def compare(case: Case, got: object) -> str | None:
    """What differs between a result and what is expected, as one line; None if nothing does."""
    have, want = json.dumps(got, ensure_ascii=False), json.dumps(case["expected"], ensure_ascii=False)
    if have == want:
        return None
    at = next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))
    return (
        f"{case['id']}: at {at} got {have[max(0, at - 40) : at + 80]!r}, expected {want[max(0, at - 40) : at + 80]!r}"
    )
