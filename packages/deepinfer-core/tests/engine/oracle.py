"""A drafter that knows how each request goes on, and is wrong as often as it is told to be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from deepinfer.engine.drafter import DraftRows
from deepinfer.engine.sequence import Integers
from deepinfer.engine.speculation import Drafting

WIDTH = 5


@dataclass(frozen=True)
class Verdict:
    accepted: Integers
    tokens: Integers
    predicted: np.ndarray


@dataclass
class Oracle:
    """Texts by seed: prompt and continuation. `wrong`: chance that a draft is another token than the text's."""

    texts: Mapping[int, Sequence[int]]
    wrong: float
    generator: np.random.Generator
    num_states: int
    proposed: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    width: int = WIDTH
    needs_laws: bool = False
    rests_for: int = 0

    def set_costs(self, target_ms: dict[int, float], draft_ms: dict[int, float]) -> None:
        raise AssertionError("nothing is timed where drafts are forced")

    def rehearse(self, rows: DraftRows) -> None:
        raise AssertionError("nothing is timed where drafts are forced")

    def rest(self, requests: int) -> bool:
        return False

    def observe_draft(self, requests: int, draft_ms: float) -> None:
        assert requests > 0

    def begin(self, state: int) -> None:
        self.proposed.pop(state, None)

    def propose(self, rows: DraftRows, room: int) -> tuple[Integers, Integers] | None:
        assert room >= 0
        assert len(set(rows.states.tolist())) == len(rows.states)
        self.proposed.clear()
        if self.generator.random() < 0.1:
            return None
        counts = np.zeros_like(rows.states)
        drafts = self.generator.integers(3, 40, (len(counts), WIDTH))
        for i, (seed, position) in enumerate(zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True)):
            if rows.limits[i] == 0:  # it has ended, or will with its next token
                continue
            text = self.texts[seed]
            assert text[position] == rows.anchors[i], "the anchor is not the last token of the text"
            true = np.array(text[position + 1 : position + 1 + WIDTH], dtype=np.int64)
            right = self.generator.random(len(true)) >= self.wrong
            drafts[i, : len(true)] = np.where(right, true, drafts[i, : len(true)])
            counts[i] = min(int(self.generator.integers(0, rows.limits[i] + 1)), room)
            room -= int(counts[i])
        for state, tokens, count in zip(rows.states.tolist(), drafts.tolist(), counts.tolist(), strict=True):
            self.proposed[state] = tokens, count
        return drafts, counts

    def verify(self, states: Integers, counts: Integers, drawn: Integers | None, laws: Tensor | None) -> Verdict:
        assert laws is None
        assert drawn is not None
        assert len(drawn) == counts.sum() + len(counts)
        accepted, tokens, start = [], [], 0
        for state, count in zip(states.tolist(), counts.tolist(), strict=True):
            drafts, most = self.proposed[state]
            assert 0 <= count <= most
            came = drawn[start : start + count + 1].tolist()
            passed = next((place for place in range(count) if drafts[place] != came[place]), count)
            accepted.append(passed)
            tokens.append(came[passed])
            start += count + 1
        return Verdict(np.array(accepted), np.array(tokens), np.zeros(len(counts)))

    def observe(self, rows: int, context_tokens: int, target_ms: float) -> None:
        assert rows > 0
        assert target_ms > 0


def drafting(texts: Mapping[int, Sequence[int]], *, wrong: float, seed: int, stages: Any = None) -> Drafting:
    """Drafts of an `Oracle`; `stages` are fed if there are any."""
    stages = stages or SimpleNamespace(draft=SimpleNamespace(block_size=WIDTH), heads=None)

    def made(backbone: object, heads: object, **choices: Any) -> Oracle:
        return Oracle(texts, wrong, np.random.default_rng(seed), choices["num_states"])

    return Drafting(stages, made, mode="on")
