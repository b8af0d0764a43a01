"""One block exactly: owns the law of what a block emits in a world, for one request or for two that share a budget.

Loops of many blocks, where old confidences and noise keys matter, are `loops`'.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepspark.audit.cells import outcomes
from deepspark.audit.world import World, sequences, target_law
from deepspark.verify import Rule

__all__ = ["BlockAudit", "CutView", "JointCut", "SingleCut", "total_variation"]

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class CutView:
    """Everything a cut could look at, allowed or not: drafts, their laws' rows [g, V] and confidences [g]."""

    x: Tokens
    Q: Floats
    conf: Floats


SingleCut = Callable[[CutView], int]
JointCut = Callable[[list[CutView]], list[int]]


def total_variation(law: dict[Tokens, float], other: dict[Tokens, float]) -> float:
    """Return half the summed differences of two laws."""
    return sum(abs(law.get(each, 0.0) - other.get(each, 0.0)) for each in law.keys() | other.keys()) / 2


def emitted_law(world: World, context: Tokens, x: Tokens, ell: int, rule: Rule) -> dict[Tokens, float]:
    """Return the law of what one block with drafts `x` emits when `ell` of them are verified."""
    P, (Q, _) = world.target_rows(context, x), world.draft_rows(context, x)
    law: dict[Tokens, float] = {}
    for box, results in outcomes(P, Q, x, ell, rule):
        volume = float(np.prod([high - low for low, high in box]))
        for (accepted, token), mass in results.items():
            emitted = (*x[:accepted], token)
            law[emitted] = law.get(emitted, 0.0) + volume * mass
    return law


@dataclass
class BlockAudit:
    """Laws of one block of `width` drafts after `context`, completed to width + 1 tokens by plain decoding."""

    world: World
    width: int
    rule: Rule
    context: Tokens = ()
    _completed: dict[tuple[Tokens, int], Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all = sequences(self.world.vocab_size, self.width + 1)
        self._index = {each: i for i, each in enumerate(self.all)}
        law = target_law(self.world, self.context, self.width + 1)
        self.target = np.array([law[each] for each in self.all])
        self.views = []
        self.masses = []
        for x in sequences(self.world.vocab_size, self.width):
            Q, conf = self.world.draft_rows(self.context, x)
            self.views.append(CutView(x, Q, conf))
            self.masses.append(float(np.prod([Q[k, token] for k, token in enumerate(x)])))

    def completed(self, x: Tokens, ell: int) -> Floats:
        """Return the law [V^(g+1)] of the next width + 1 tokens, given drafts `x` and the verified length."""
        key = (x, ell)
        if key not in self._completed:
            law = np.zeros(len(self.all))
            for emitted, mass in emitted_law(self.world, self.context, x, ell, self.rule).items():
                rest = target_law(self.world, self.context + emitted, self.width + 1 - len(emitted))
                for tail, share in rest.items():
                    law[self._index[emitted + tail]] += mass * share
            self._completed[key] = law
        return self._completed[key]

    def tv(self, cut: SingleCut) -> float:
        """Return the total variation between a block under `cut` and plain decoding."""
        law = sum(mass * self.completed(view.x, cut(view)) for view, mass in zip(self.views, self.masses, strict=True))
        return float(np.abs(law - self.target).sum() / 2)

    def joint_tv(self, other: "BlockAudit", cut: JointCut) -> float:
        """Return the total variation of the JOINT law of two requests that `cut` plans together."""
        law = np.zeros((len(self.all), len(other.all)))
        pairs = itertools.product(
            zip(self.views, self.masses, strict=True), zip(other.views, other.masses, strict=True)
        )
        for (mine, mass), (theirs, share) in pairs:
            first, second = cut([mine, theirs])
            law += mass * share * np.outer(self.completed(mine.x, first), other.completed(theirs.x, second))
        return float(np.abs(law - np.outer(self.target, other.target)).sum() / 2)
