"""Looks at an installation: system, wheels, libraries, accelerators, and which implementation each op has.

Printing is `cli.py`'s; what each accelerator needs is known by its own wheel.
"""

import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.conformance import ALL_SHAPES, TINY, Finding, cases
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.registry import Candidate, list_accelerators, list_drafters, open_accelerator
from deepinfer.accelerator.report import OpReport, report_ops, shapes_of
from deepinfer.errors import AcceleratorError
from deepinfer.installation import libraries, our_wheels
from deepinfer.model.config import ModelConfig

PYTHON = (3, 12)
RELEASED = Precision(torch.bfloat16, round_inputs=True, cache="records")
"""How the released checkpoints are computed by default; the ops are judged for it."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `found` says what is there or, when it is not `ok`, also what to do."""

    topic: str
    ok: bool
    found: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `diagnose` saw; `findings` is None when conformance was not asked for."""

    checks: list[Check]
    accelerators: list[Candidate]
    drafters: list[Candidate]
    ops: list[OpReport]
    findings: list[Finding] | None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {"healthy": self.healthy, **asdict(self)}


def diagnose(accelerator: str, config: ModelConfig | None = None, *, conformance: bool = False) -> Diagnosis:
    """Look at the installation and at `accelerator`, opened as an engine would open it.

    config       judge the ops for this model
    conformance  also run the conformance suite on the accelerator; takes from seconds (CPU) to minutes
    """
    accelerators, drafters = list_accelerators(), list_drafters()
    checks = [*_system(), *_wheels(), *_libraries()]
    checks += [Check(c.name, False, f"{c.wheel}: {c.reason}") for c in (*accelerators, *drafters) if c.broken]
    ops: list[OpReport] = []
    findings = None
    try:
        opened = open_accelerator(accelerator)
    except AcceleratorError as error:
        checks.append(Check("accelerator", False, str(error)))
    else:
        free, total = opened.memory()
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        checks.append(Check("accelerator", True, f"{opened.name}: {opened.description()}, {memory}"))
        steps = "one after the other: an op has finished when it returns" if opened.synchronous else "overlapped"
        checks.append(Check("steps", True, steps))
        ops = report_ops(opened, opened.ops(RELEASED), shapes_of(config) if config else {})
        if conformance:
            findings = _conform(opened)
            checks.append(_judge(findings))
    return Diagnosis(checks, accelerators, drafters, ops, findings)


def render(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as lines of text."""
    lines = [_row("ok" if check.ok else "FAIL", check.topic, check.found) for check in diagnosis.checks]
    lines += ["", "accelerators", *map(_candidate, diagnosis.accelerators)]
    lines += ["", "drafters", *(list(map(_candidate, diagnosis.drafters)) or ["  none"])]
    if diagnosis.ops:
        own = sum(report.reason is None for report in diagnosis.ops)
        lines += ["", f"ops ({own} of {len(diagnosis.ops)} are the accelerator's own)"]
        lines += [f"  {r.op:<16}{r.implementation}{f' ({r.reason})' if r.reason else ''}" for r in diagnosis.ops]
    faults = [finding for finding in diagnosis.findings or [] if finding.fault]
    lines += ["", *(f"  {f.op} {f.case}: {f.fault}" for f in faults)] if faults else []
    return "\n".join(lines)


def _row(verdict: str, topic: str, found: str) -> str:
    return f"{verdict:<5} {topic:<16} {found}"


def _candidate(candidate: Candidate) -> str:
    state = "usable" if candidate.reason is None else candidate.reason
    return f"  {candidate.name:<16}{candidate.wheel}: {state}"


def _system() -> list[Check]:
    linux = platform.system() == "Linux"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    python = platform.python_version()
    wanted = ".".join(map(str, PYTHON))
    return [
        Check("system", linux, system if linux else f"{system}: DeepInfer runs on Linux"),
        Check(
            "python", sys.version_info >= PYTHON, python if sys.version_info >= PYTHON else f"{python}, not {wanted}"
        ),
    ]


def _wheels() -> list[Check]:
    return [
        Check(wheel.name, wheel.fault is None, wheel.fault or wheel.version or "not installed (optional)")
        for wheel in our_wheels()
    ]


def _libraries() -> list[Check]:
    return [Check(library.name, True, library.version) for library in libraries() if library.version is not None]


def _conform(accelerator: Accelerator) -> list[Finding]:
    sizes = [TINY] if accelerator.device.type == "cpu" else ALL_SHAPES
    return [case.judge(accelerator) for case in cases(sizes)]


def _judge(findings: list[Finding]) -> Check:
    wrong = sorted({finding.op for finding in findings if finding.fault})
    if wrong:
        return Check("conformance", False, f"{', '.join(wrong)}: not the reference's results, see below")
    used = max(finding.used for finding in findings)
    return Check("conformance", True, f"{len(findings)} cases, errors at most {used:.0%} of what number formats allow")
