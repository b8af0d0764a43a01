"""The audit of running engines: owns a total-variation test with a stated error rate, and the protocol it needs.

Worlds that can be enumerated need no samples: see `blocks` and `loops`.

The test.  n token sequences are folded into K classes; D is the total variation between their shares and the law (or
the shares of a second engine's m sequences).  Changing one sequence moves D by at most 1/n, so D exceeds its mean by
sqrt(ln(1/a) (1/n + 1/m) / 2) with chance at most a (McDiarmid); and if the engine is lossless that mean is at most sum
sqrt(p (1-p) / n) / 2, or sqrt(K (1/n + 1/m)) / 2 against a second engine.  The sum of both is the threshold: a lossless
engine fails with chance at most a.  An engine whose true distance is the threshold plus sqrt(ln(1/b) (1/n + 1/m) / 2)
or more passes with chance at most b.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepspark.errors import InputError

__all__ = ["AuditedEngine", "EngineVerdict", "audit_against_law", "audit_engines", "first_tokens"]

Tokens = tuple[int, ...]
Fold = Callable[[Tokens], Hashable]


class AuditedEngine(Protocol):
    """The whole of what an engine must offer to be audited: run its public loop, scheduler and all."""

    def sample(self, seeds: Sequence[int], num_tokens: int) -> list[Tokens]:
        """Return the first `num_tokens` tokens after one fixed prompt, once for each seed; seeds independent
        requests.
        """


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """The outcome of a test.

    distance is the measured total variation, threshold what a lossless engine exceeds with chance at most
    `false_alarm`; a true distance of `detectable` or more is missed with chance at most `missed`.
    """

    distance: float
    threshold: float
    false_alarm: float
    detectable: float
    missed: float

    @property
    def lossless(self) -> bool:
        """Whether nothing was found."""
        return self.distance <= self.threshold


def first_tokens(count: int, classes: int) -> Fold:
    """Return a fold by the first `count` tokens, each taken modulo `classes`: classes ** count classes in all."""

    def fold(tokens: Tokens) -> Hashable:
        return tuple(token % classes for token in tokens[:count])

    return fold


def _slack(chance: float, per_sample: float) -> float:
    return math.sqrt(math.log(1 / chance) * per_sample / 2)


def audit_against_law(
    samples: Sequence[Tokens],
    law: Mapping[Tokens, float],
    fold: Fold,
    *,
    false_alarm: float = 1e-3,
    missed: float = 1e-3,
) -> EngineVerdict:
    """Test samples of an engine against the exact law of plain decoding over the same sequences."""
    if not samples:
        raise InputError("expected samples, got none")
    expected: Counter[Hashable] = Counter()
    for tokens, mass in law.items():
        expected[fold(tokens)] += mass  # type: ignore[assignment]
    seen = Counter(fold(tokens) for tokens in samples)
    n = len(samples)
    distance = sum(abs(seen[key] / n - expected[key]) for key in seen.keys() | expected.keys()) / 2
    mean = sum(math.sqrt(max(p * (1 - p), 0.0) / n) for p in expected.values()) / 2
    threshold = mean + _slack(false_alarm, 1 / n)
    return EngineVerdict(distance, threshold, false_alarm, threshold + _slack(missed, 1 / n), missed)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to sample: `count` sequences of `num_tokens` from each engine, folded, and the error rates wanted."""

    num_tokens: int
    count: int
    fold: Fold
    num_classes: int
    false_alarm: float = 1e-3
    missed: float = 1e-3


def audit_engines(drafting: AuditedEngine, plain: AuditedEngine, plan: Plan) -> EngineVerdict:
    """Test an engine with drafts against the same engine without, where the target's law cannot be enumerated.

    num_classes must bound the classes that the fold can give; seeds of the two runs are disjoint.
    """
    with_drafts = Counter(map(plan.fold, drafting.sample(range(plan.count), plan.num_tokens)))
    without = Counter(map(plan.fold, plain.sample(range(plan.count, 2 * plan.count), plan.num_tokens)))
    classes = with_drafts.keys() | without.keys()
    if len(classes) > plan.num_classes:
        raise InputError(f"the fold gave {len(classes)} classes, more than the stated {plan.num_classes}")
    per_sample = 2 / plan.count
    distance = sum(abs(with_drafts[key] - without[key]) for key in classes) / plan.count / 2
    threshold = math.sqrt(plan.num_classes * per_sample) / 2 + _slack(plan.false_alarm, per_sample)
    detectable = threshold + _slack(plan.missed, per_sample)
    return EngineVerdict(distance, threshold, plan.false_alarm, detectable, plan.missed)
