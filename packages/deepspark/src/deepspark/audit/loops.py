"""Loops of several blocks exactly: owns the enumeration of everything that can happen until enough tokens are out.

One block is `blocks`'.  Only a loop shows what old confidences and noise keys do: a position can be drafted again, and
a key that repeats hands out a number that an old confidence has already seen.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from deepspark.audit.blocks import total_variation
from deepspark.audit.cells import Cell, Interval, intervals, outcomes
from deepspark.audit.world import World, target_law
from deepspark.scheduler import Allocation, Scheduler, StepRequests
from deepspark.verify import Rule

__all__ = ["KeyKind", "LoopAudit", "OldConfidence", "Planner", "SchedulerPlanner"]

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]
KeyKind = Literal["block", "position"]
Known = dict[tuple[str, int], Interval]


class Planner(Protocol):
    """Plans one request over steps; the enumeration forks it wherever the text can fork."""

    def fork(self) -> Self:
        """Return an independent copy."""

    def plan(self, conf: Floats) -> int:
        """Return the verified length of the block with current confidences [g]."""

    def record(self, accepted: int) -> None:
        """End the step."""


class OldConfidence:
    """Verifies a whole block if the last confidence of the block before was at least `least`, else nothing.

    A harsh use of old knowledge, which any search may use: what keys leak, this shows.  first: the first block's
    length; with `least` 0 and a whole first block it always verifies everything.
    """

    def __init__(self, least: float, width: int, first: int = 0) -> None:
        self._least = least
        self._width = width
        self._budget = self._next = first

    def fork(self) -> Self:
        """Return an independent copy."""
        return copy.copy(self)

    def plan(self, conf: Floats) -> int:
        """Return what the block before decided."""
        self._next = self._width if conf[-1] >= self._least else 0
        return self._budget

    def record(self, accepted: int) -> None:
        """Let this block's confidences decide on the next."""
        self._budget = self._next


class SchedulerPlanner:
    """The shipped scheduler with all its state: history, corrections, parking."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests = StepRequests(np.array([0]), np.array([scheduler.width]))
        self._allocation: Allocation | None = None

    def fork(self) -> Self:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def plan(self, conf: Floats) -> int:
        """Decide and allocate as an engine would."""
        decision = self._scheduler.decide(self._requests)
        self._allocation = self._scheduler.allocate(decision, conf[None] if decision.draft else None, self._requests)
        return int(self._allocation.lengths[0])

    def record(self, accepted: int) -> None:
        """Learn as an engine would."""
        assert self._allocation is not None
        self._scheduler.record(self._requests, self._allocation, np.array([accepted]))


@dataclass
class LoopAudit:
    """A loop in `world` drafting `width` tokens under `rule`, with noise keyed as said."""

    world: World
    width: int
    rule: Rule
    draft_key: KeyKind = "block"
    accept_key: KeyKind = "block"
    _cells: dict[tuple[Tokens, Tokens, int], list[Cell]] = field(default_factory=dict)

    def tv(self, planner: Planner, length: int) -> float:
        """Return the total variation between the loop's first `length` tokens and plain decoding's."""
        return total_variation(self.law(planner, length), target_law(self.world, (), length))

    def law(self, planner: Planner, length: int) -> dict[Tokens, float]:
        """Return the law of the first `length` tokens that the loop emits."""
        law: dict[Tokens, float] = {}
        pending: list[tuple[Tokens, Planner, Known, float]] = [((), planner, {}, 1.0)]
        while pending:
            tokens, state, known, mass = pending.pop()
            if len(tokens) >= length:
                law[tokens[:length]] = law.get(tokens[:length], 0.0) + mass
                continue
            for x, drawn, seen in self._drafts(tokens, known):
                here = state.fork()
                ell = here.plan(self.world.draft_rows(tokens, x)[1])
                for emitted, accepted, share, after in self._outcomes(tokens, x, ell, seen):
                    following = here.fork()
                    following.record(accepted)
                    pending.append((tokens + emitted, following, after, mass * drawn * share))
        return law

    def _drafts(self, tokens: Tokens, known: Known) -> Iterator[tuple[Tokens, float, Known]]:
        """Yield every block of drafts with its chance and what its noise is then known to be."""
        paths: list[tuple[Tokens, float, Known]] = [((), 1.0, known)]
        for offset in range(self.width):
            key = ("draft", len(tokens) + 1 + offset)
            grown = []
            for x, mass, seen in paths:
                within = seen.get(key, (0.0, 1.0)) if self.draft_key == "position" else (0.0, 1.0)
                cdf = self.world.draft(tokens, x).cumsum()
                for low, high in intervals(cdf.tolist(), within):
                    token = min(int(np.searchsorted(cdf, (low + high) / 2, side="right")), self.world.vocab_size - 1)
                    share = (high - low) / (within[1] - within[0])
                    after = {**seen, key: (low, high)} if self.draft_key == "position" else seen
                    grown.append(((*x, token), mass * share, after))
            paths = grown
        yield from paths

    def _outcomes(
        self, tokens: Tokens, x: Tokens, ell: int, known: Known
    ) -> Iterator[tuple[Tokens, int, float, Known]]:
        """Yield what the block can emit: tokens, accepted drafts, chance, and what noise is then known to be."""
        P, (Q, _) = self.world.target_rows(tokens, x), self.world.draft_rows(tokens, x)
        if self.accept_key == "block":
            cells = self._fresh(tokens, x, ell, P, Q)
            merged: dict[tuple[int, int], float] = {}
            for box, law in cells:
                volume = float(np.prod([high - low for low, high in box]))
                for outcome, mass in law.items():
                    merged[outcome] = merged.get(outcome, 0.0) + volume * mass
            for (accepted, token), mass in merged.items():
                yield (*x[:accepted], token), accepted, mass, known
            return
        keys = [("accept", len(tokens) + 1 + offset) for offset in range(self.width)]
        within = [known.get(key, (0.0, 1.0)) for key in keys]
        total = float(np.prod([high - low for low, high in within]))
        for box, law in outcomes(P, Q, x, ell, self.rule, within):
            volume = float(np.prod([high - low for low, high in box])) / total
            after = {**known, **dict(zip(keys, box, strict=True))}
            for (accepted, token), mass in law.items():
                yield (*x[:accepted], token), accepted, volume * mass, after

    def _fresh(self, tokens: Tokens, x: Tokens, ell: int, P: Floats, Q: Floats) -> list[Cell]:
        key = (tokens[-self.world.order :], x, ell)
        if key not in self._cells:
            self._cells[key] = outcomes(P, Q, x, ell, self.rule)
        return self._cells[key]
