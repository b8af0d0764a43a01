"""The golden-vector runner: owns reading vector files, calling deepspark as a user would, and comparing.

One function a file name; each takes one row and the folder and returns nothing or raises AssertionError.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspark.testing import draft_vectors, law_vectors, schedule_vectors, verify_vectors

__all__ = ["VectorReport", "run_vectors"]

Check = Callable[[dict[str, Any], Path], None]

CHECKS: dict[str, Check] = {
    "confidence": schedule_vectors.confidence,
    "dialects": schedule_vectors.dialects,
    "draft": draft_vectors.draft,
    "estimators": schedule_vectors.estimators,
    "greedy": verify_vectors.greedy,
    "logprobs": verify_vectors.logprobs,
    "match": verify_vectors.match,
    "ragged": verify_vectors.ragged,
    "round_law": law_vectors.round_law,
    "schedule": schedule_vectors.schedule,
    "stops": verify_vectors.stops,
    "transforms": verify_vectors.transforms,
    "verify": verify_vectors.verify_rules,
    "world_trace": law_vectors.world_trace,
}
"""What each `NAME.jsonl` is checked by."""


@dataclass(slots=True)
class VectorReport:
    """How many rows passed and failed, and one line for each failure."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Number of failures."""
        return len(self.failures)


def run_vectors(folder: str | Path, *, quiet: bool = False) -> VectorReport:
    """Run every known `NAME.jsonl` in `folder`; write each failure and 'N passed, M failed' to standard output.

    A file of an unknown name counts as one failure, so that nothing is passed over in silence.
    """
    report = VectorReport()
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        report.failures.append(f"{folder}: expected *.jsonl, found none")
    for file in files:
        check = CHECKS.get(file.stem)
        if check is None:
            report.failures.append(f"{file.name}: no check for this file")
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                check(json.loads(line), file.parent)
            except Exception as error:  # noqa: BLE001 - a row that raises is a row that failed
                report.failures.append(f"{file.name}:{number}: {type(error).__name__}: {error}")
            else:
                report.passed += 1
    if not quiet:
        sys.stdout.writelines(f"{failure}\n" for failure in report.failures)
        sys.stdout.write(f"{report.passed} passed, {report.failed} failed\n")
    return report
