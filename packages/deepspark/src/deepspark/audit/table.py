"""The table of admissible cuts: owns its rows, and the check that classes and enumerated laws say the same.

Source: DSpark specification, section 3.3.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspark.admissibility import Sees, tolerates
from deepspark.audit.blocks import BlockAudit, CutView
from deepspark.audit.cuts import (
    BestOfCurrent,
    FixedLength,
    LookAhead,
    OwnProbability,
    Threshold,
    TopOfCurrent,
    WalkOfCurrent,
)
from deepspark.audit.loops import KeyKind, LoopAudit, OldConfidence, Planner
from deepspark.audit.world import World
from deepspark.verify import Rule

__all__ = ["EXACT", "Line", "admissibility_table", "noise_key_table"]

EXACT = 1e-12
"""Laws are summed in float64: an exact rule leaves a total variation of a few 1e-16."""

WRONG = 1e-3
"""Over the worlds of a table a wrong rule shows at least this."""

_WIDTH = 3
_RULES: tuple[Rule, ...] = ("chain", "coupled", "block")


@dataclass(frozen=True)
class Line:
    """One cell of the table: the largest total variation over its worlds, and whether the rule should be exact
    there.
    """

    cut: str
    rule: str
    tv: float
    should_be_exact: bool

    @property
    def as_expected(self) -> bool:
        """Whether exact is exact, and wrong is caught."""
        return self.tv <= EXACT if self.should_be_exact else self.tv >= WRONG


_Cut = Callable[[list[CutView]], list[int]]


def _single(tables: list[NDArray[np.float64]]) -> dict[str, tuple[Sees, list[_Cut]]]:
    """Return the cuts of one request; a name with several is judged by the worst."""
    return {
        "whole block / any fixed length": (Sees.PAST, [FixedLength(length) for length in range(_WIDTH + 1)]),
        "first confidence below a threshold": (Sees.PAST, [Threshold(0.3), Threshold(0.6)]),
        "Algorithm 1, current confidences": (Sees.PAST, [WalkOfCurrent(times) for times in tables]),
        "best of all budgets, current confidences": (BestOfCurrent.sees, [BestOfCurrent(times) for times in tables]),
        "next confidence must be high (look-ahead)": (LookAhead.sees, [LookAhead(0.5)]),
        "stop before a draft because of itself": (OwnProbability.sees, [OwnProbability(0.3)]),
    }


def _joint(tables: list[NDArray[np.float64]]) -> dict[str, tuple[Sees, list[_Cut]]]:
    """Return the cuts that plan two requests together."""
    return {
        "two requests: Algorithm 1": (Sees.PAST, [WalkOfCurrent(times) for times in tables]),
        "two requests: top of a given budget": (Sees.PAST, [TopOfCurrent(budget) for budget in (1, 3, 4)]),
        "two requests: best of all budgets, current": (Sees.BLOCK, [BestOfCurrent(times) for times in tables]),
    }


def _times(seed: int, requests: int) -> list[NDArray[np.float64]]:
    """Return a smooth table, which Algorithm 1 can walk, and stairs: there late confidences decide on all or none."""
    count = requests * _WIDTH
    smooth = np.cumsum([requests, *np.sort(np.random.default_rng([seed, requests]).exponential(0.3, count))])
    flat = 0.01 * np.arange(count)
    return [smooth, *(np.array([requests, *(requests * (1 + height) + flat)]) for height in (0.4, 0.7, 1.0))]


def admissibility_table(worlds: int = 20, vocab_size: int = 3) -> list[Line]:
    """Enumerate every cut under every sampling rule; the joint cuts under the chain rule, over two requests' joint
    law.
    """
    worst: dict[tuple[str, str], float] = {}
    exact: dict[tuple[str, str], bool] = {}

    def note(name: str, rule: Rule, sees: Sees, tv: float) -> None:
        worst[name, rule] = max(worst.get((name, rule), 0.0), tv)
        exact[name, rule] = sees <= tolerates(rule)

    for seed in range(worlds):
        world = World(vocab_size, seed)
        for rule in _RULES:
            block = BlockAudit(world, _WIDTH, rule)
            for name, (sees, cuts) in _single(_times(seed, 1)).items():
                for cut in cuts:
                    note(name, rule, sees, block.tv(lambda view, cut=cut: cut([view])[0]))  # type: ignore[misc]
        pair = BlockAudit(world, _WIDTH, "chain"), BlockAudit(world, _WIDTH, "chain", context=(0, 1))
        for name, (sees, cuts) in _joint(_times(seed, 2)).items():
            for cut in cuts:
                note(name, "chain", sees, pair[0].joint_tv(pair[1], cut))
    return [Line(name, rule, tv, exact[name, rule]) for (name, rule), tv in worst.items()]


def noise_key_table(worlds: int = 4) -> list[Line]:
    """Enumerate loops of several blocks whose budget comes from the block before, with right and wrong noise keys."""
    old, whole = OldConfidence(0.5, _WIDTH), OldConfidence(0.0, _WIDTH, first=_WIDTH)
    loops: list[tuple[str, Rule, Planner, KeyKind, KeyKind]] = [
        ("old budget, noise keyed by block", "chain", old, "block", "block"),
        ("old budget, noise keyed by block", "block", old, "block", "block"),
        ("old budget, DRAFT noise keyed by position", "chain", old, "position", "block"),
        ("whole blocks, acceptance noise keyed by position", "chain", whole, "block", "position"),
        ("whole blocks, ACCEPTANCE noise keyed by position", "block", whole, "block", "position"),
    ]
    lines = []
    for name, rule, planner, draft_key, accept_key in loops:
        audits = [
            LoopAudit(World(2, seed, agreement=0.2), _WIDTH, rule, draft_key, accept_key) for seed in range(worlds)
        ]
        tv = max(audit.tv(planner, length=2) for audit in audits)
        right = draft_key == "block" and (accept_key == "block" or rule == "chain")
        lines.append(Line(name, rule, tv, right))
    return lines
