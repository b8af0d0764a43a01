"""Worlds small enough to enumerate: owns random target laws, draft laws and confidences over a tiny vocabulary.

What an engine does in such a world is `loops`' and `cuts`' business.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["World", "sequences", "target_law"]

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]


@dataclass
class World:
    """A target, a drafter and a confidence head as tables that are drawn when first asked for.

    The target reads the last `order` tokens; the draft law and the confidence read the same and the drafts before them.
    agreement: 0 gives unrelated draft laws, 1 draft laws equal to the target's.
    """

    vocab_size: int
    seed: int
    order: int = 2
    agreement: float = 0.5
    _targets: dict[Tokens, Floats] = field(default_factory=dict)
    _drafts: dict[tuple[Tokens, Tokens], Floats] = field(default_factory=dict)
    _confidences: dict[tuple[Tokens, Tokens], float] = field(default_factory=dict)

    def _key(self, context: Tokens) -> Tokens:
        return context[max(len(context) - self.order, 0) :]

    def _rng(self, *parts: Tokens) -> np.random.Generator:
        words = [self.seed]
        for part in parts:
            words += [len(part) + 1000, *part]
        return np.random.default_rng(words)

    def target(self, context: Tokens) -> Floats:
        """Return p(. | context) [V]."""
        key = self._key(context)
        if key not in self._targets:
            self._targets[key] = self._rng(key, (1,)).dirichlet(np.ones(self.vocab_size))
        return self._targets[key]

    def draft(self, context: Tokens, prefix: Tokens) -> Floats:
        """Return q(. | context, drafts so far) [V]."""
        key = (self._key(context), prefix)
        if key not in self._drafts:
            own = self._rng(*key, (2,)).dirichlet(np.ones(self.vocab_size))
            self._drafts[key] = self.agreement * self.target(context + prefix) + (1 - self.agreement) * own
        return self._drafts[key]

    def confidence(self, context: Tokens, prefix: Tokens) -> float:
        """Return c of the draft that comes after `prefix`; it has not seen that draft."""
        key = (self._key(context), prefix)
        if key not in self._confidences:
            self._confidences[key] = float(self._rng(*key, (3,)).uniform(0.05, 1.0))
        return self._confidences[key]

    def draft_rows(self, context: Tokens, x: Tokens) -> tuple[Floats, Floats]:
        """Return the draft laws [g, V] and confidences [g] along the drafts `x`."""
        laws = np.stack([self.draft(context, x[:k]) for k in range(len(x))])
        return laws, np.array([self.confidence(context, x[:k]) for k in range(len(x))])

    def target_rows(self, context: Tokens, x: Tokens) -> Floats:
        """Return the target laws [g+1, V] along the drafts `x`."""
        return np.stack([self.target(context + x[:k]) for k in range(len(x) + 1)])


def sequences(vocab_size: int, length: int) -> list[Tokens]:
    """Return all token sequences of `length`, in counting order."""
    found: list[Tokens] = [()]
    for _ in range(length):
        found = [(*each, token) for each in found for token in range(vocab_size)]
    return found


def target_law(world: World, context: Tokens, length: int) -> dict[Tokens, float]:
    """Return the law of the next `length` tokens of plain decoding."""
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        law = {
            (*each, token): mass * float(p)
            for each, mass in law.items()
            for token, p in enumerate(world.target(context + each))
        }
    return law
