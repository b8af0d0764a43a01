"""Exact laws of one block: owns the division of the noise cube into cells on which `verify` gives one outcome.

`verify` itself is run, once in the middle of each cell; nothing of it is reimplemented.  The cell walls come from the
rules' published formulas: were verify's own walls elsewhere, the resulting law would be off, and show.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deepspark.verify import Noise, Rule, verify

__all__ = ["Cell", "accept_walls", "extra_walls", "intervals", "outcomes"]

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Cell = tuple[tuple[Interval, ...], dict[tuple[int, int], float]]
"""One box of the acceptance uniforms, and there the chance of each (accepted, token) over the extra uniform."""


def intervals(walls: Sequence[float], within: Interval = (0.0, 1.0)) -> list[Interval]:
    """Cut `within` at `walls`; return the non-empty pieces."""
    low, high = within
    edges = [low, *sorted({wall for wall in walls if low < wall < high}), high]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def accept_walls(P: Floats, Q: Floats, x: Sequence[int], ell: int) -> list[list[float]]:
    """Return, for each draft, the values of its acceptance uniform at which the chain or the block rule turns."""
    walls: list[list[float]] = []
    weight = 1.0
    for i, token in enumerate(x):
        ratio = P[i, token] / Q[i, token]
        weight = min(1.0, weight * ratio)
        found = [min(1.0, ratio)]
        if i + 1 < ell:
            gain = float(np.maximum(weight * P[i + 1] - Q[i + 1], 0).sum())
            found.append(gain / (gain + 1 - weight) if gain + 1 - weight > 0 else 1.0)
        elif i + 1 == ell:
            found.append(weight)
        walls.append(found)
    return walls


def _cdf(weights: Floats) -> list[float]:
    total = float(weights.sum())
    return [] if total <= 0 else (weights.cumsum() / total).tolist()


def extra_walls(P: Floats, Q: Floats, x: Sequence[int]) -> list[float]:
    """Return the values of the extra uniform at which any token drawn from any row or residual turns."""
    walls: list[float] = []
    weight = 1.0
    for i in range(P.shape[0]):
        walls += _cdf(P[i])
        if i < len(x):
            walls += _cdf(np.maximum(P[i] - Q[i], 0)) + _cdf(np.maximum(weight * P[i] - Q[i], 0))
            weight = min(1.0, weight * float(P[i, x[i]] / Q[i, x[i]]))
    return walls


def outcomes(
    P: Floats, Q: Floats, x: Sequence[int], ell: int, rule: Rule, known: Sequence[Interval] = ()
) -> list[Cell]:
    """Return the exact outcomes of one block: P [g+1, V], Q [g, V], drafts x, verified length ell.

    known: where each acceptance uniform is already known to lie (empty: anywhere); probabilities are conditional on it.
    """
    width = len(x)
    given = list(known) or [(0.0, 1.0)] * width
    sides = [intervals(walls, within) for walls, within in zip(accept_walls(P, Q, x, ell), given, strict=True)]
    boxes = list(itertools.product(*sides))
    extras = intervals(extra_walls(P, Q, x))
    centre = np.array([[(a + b) / 2 for a, b in box] for box in boxes])
    uniforms = torch.from_numpy(np.repeat(centre, len(extras), axis=0))
    last = torch.tensor([(a + b) / 2 for a, b in extras], dtype=torch.float64).repeat(len(boxes))
    rows = uniforms.shape[0]
    verdict = verify(
        torch.from_numpy(P).expand(rows, -1, -1),
        torch.from_numpy(Q).expand(rows, -1, -1),
        torch.tensor(x).expand(rows, -1),
        torch.full((rows,), ell),
        Noise(accept=uniforms, extra=last),
        rule,
    )
    accepted, tokens = verdict.accepted.tolist(), verdict.token.tolist()
    cells: list[Cell] = []
    for index, box in enumerate(boxes):
        law: dict[tuple[int, int], float] = {}
        for offset, (low, high) in enumerate(extras):
            row = index * len(extras) + offset
            outcome = (accepted[row], tokens[row])
            law[outcome] = law.get(outcome, 0.0) + high - low
        cells.append((box, law))
    return cells
