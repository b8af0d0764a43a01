import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from deepspark.cli import main
from deepspark.testing import run_vectors

ROWS = {
    "confidence": 44,
    "dialects": 60,
    "draft": 6,
    "estimators": 16,
    "greedy": 80,
    "logprobs": 30,
    "match": 80,
    "ragged": 40,
    "round_law": 16,
    "schedule": 150,
    "stops": 80,
    "transforms": 160,
    "verify": 240,
    "world_trace": 8,
}


def test_all_vectors_pass(vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_vectors(vectors)
    assert report.failures == []
    assert capsys.readouterr().out == f"{sum(ROWS.values())} passed, 0 failed\n"


def test_the_folder_is_whole(vectors: Path) -> None:
    counts = Counter({file.stem: len(file.read_text().splitlines()) for file in vectors.glob("*.jsonl")})
    assert counts == ROWS


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("verify", lambda row: row["block"].update(accepted=row["block"]["accepted"] + 1)),
        ("schedule", lambda row: row.update(budget=row["budget"] + 1)),
        ("confidence", lambda row: row.update(brier=row["brier"] + 1e-3)),
        ("round_law", lambda row: row["chain_1"].update(emitted=row["chain_1"]["emitted"] + 1e-3)),
        ("stops", lambda row: row.update(finish="length" if row["finish"] != "length" else None)),
    ],
)
def test_a_wrong_row_is_reported(vectors: Path, tmp_path: Path, name: str, change: object) -> None:
    first, second = (vectors / f"{name}.jsonl").read_text().splitlines()[:2]
    row = json.loads(second)
    change(row)  # type: ignore[operator]
    (tmp_path / f"{name}.jsonl").write_text(f"{first}\n{json.dumps(row)}\n")
    report = run_vectors(tmp_path, quiet=True)
    assert report.passed == 1
    assert report.failed == 1
    assert report.failures[0].startswith(f"{name}.jsonl:2: AssertionError")


def test_nothing_is_passed_over(vectors: Path, tmp_path: Path) -> None:
    assert main(["vectors", str(tmp_path)]) == 1
    (tmp_path / "new_kind.jsonl").write_text("{}\n")
    shutil.copy(vectors / "greedy.jsonl", tmp_path)
    report = run_vectors(tmp_path, quiet=True)
    assert report.failures == ["new_kind.jsonl: no check for this file"]
    assert report.passed == ROWS["greedy"]


def test_vectors_of_the_extra_folder(extra_data: Path) -> None:
    assert run_vectors(extra_data / "vectors" / "dspark", quiet=True).failures == []
