"""Schedules: owns the pure decisions of how many drafts each request verifies, from confidences and times alone.

State over steps (lags, parking, estimates) is `scheduler`'s; what a decision may see is `admissibility`'s.
Source: DSpark specification, section 3.4.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepspark.errors import InputError

__all__ = [
    "Budget", "Ties", "Walk", "algorithm_one", "allocate", "choose_budget", "expected_tokens", "fill", "survival",
    "survival_threshold", "threshold",
]  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Ties = Literal["position", "request"]
"""Equal survivals: lower position then lower request (the default), or the flat index (lower request first)."""


def survival(conf: Floats) -> Floats:
    """Return a_j = c_1 ... c_j of confidences [R, g]: the chance that the first j drafts are all accepted.

    A NaN or non-positive confidence makes its survival and all later ones 0, and a survival of 0 is never admitted.
    """
    if conf.ndim != 2:
        raise InputError(f"confidences must be [R, g], got {conf.shape}")
    # Column-major, as all decisions walk positions across requests: the product then runs over long rows.
    columns = np.fmax(conf.T, 0.0, order="C")
    np.minimum(columns, 1.0, out=columns)
    return np.multiply.accumulate(columns, axis=0, out=columns).T


def _ranking(survivals: Floats, ties: Ties) -> tuple[Ints, Ints]:
    """Return requests and positions in descending order of survival; stable, so a prefix is never broken."""
    requests, width = survivals.shape
    if ties == "position":
        order = np.argsort(-survivals.T.ravel(), kind="stable")
        return order % requests, order // requests
    order = np.argsort(-survivals.ravel(), kind="stable")
    return order // width, order % width


def _ranked_totals(survivals: Floats) -> Floats:
    """Return the expected tokens [R*g + 1] of a batch [R, g], or of the mean of batches [N, R, g], that verifies its
    0, 1, 2, ... likeliest drafts.
    """
    requests, width = survivals.shape[-2:]
    if survivals.ndim == 2 or len(survivals) == 1:
        ranked = np.sort(survivals.ravel(order="K"))
    else:
        ranked = np.sort(survivals.reshape(-1, requests * width), axis=1).mean(axis=0)
    totals = np.empty(ranked.size + 1)
    totals[0] = requests
    totals[1:] = ranked[::-1]
    return np.cumsum(totals, out=totals)


@dataclass(frozen=True, slots=True)
class Walk:
    """Algorithm 1's lengths [R], and the tokens a millisecond at which it stopped."""

    lengths: Ints
    theta: float


def algorithm_one(survivals: Floats, step_ms: Floats, ties: Ties = "position") -> Walk:
    """Admit survivals [R, g] in descending order while tokens per time strictly rise; stop at the first that does not.

    step_ms: [R*g + 1] times of R, R+1, ... rows (inf: not schedulable).  Admissible with current confidences: each step
    uses only what the walk has revealed.  It stops at the first stair of a stair-shaped table.
    """
    requests, positions = _ranking(survivals, ties)
    ranked = survivals[requests, positions]
    theta = _ranked_totals(survivals) / step_ms
    rises = (theta[1:] > theta[:-1]) & (ranked > 0)
    taken = int(np.argmin(rises)) if not rises.all() else rises.size
    return Walk(np.bincount(requests[:taken], minlength=survivals.shape[0]).astype(np.int64), float(theta[taken]))


@dataclass(frozen=True, slots=True)
class Budget:
    """How many drafts a step verifies over all its requests, and the expected tokens a millisecond."""

    drafts: int
    theta: float


def choose_budget(survivals: Floats, step_ms: Floats) -> Budget:
    """Return the best of ALL budgets (the smallest of equals).  Admissible only with OLD confidences, any search then
    is.

    survivals: [R, g] of one old step, or [N, R, g] of several, each ranked by itself and averaged.
    """
    theta = _ranked_totals(survivals) / step_ms
    best = int(np.argmax(theta))
    return Budget(best, float(theta[best]))


def fill(budget: int, step_ms: Floats) -> int:
    """Raise `budget` while further rows cost nothing (padding of a captured size); depends on the budget and the table
    only.
    """
    while budget + 1 < step_ms.size and step_ms[budget + 1] <= step_ms[budget]:
        budget += 1
    return budget


def allocate(survivals: Floats, budget: int, ties: Ties = "position") -> Ints:
    """Give `budget` drafts to the largest CURRENT survivals [R, g]; return lengths [R].  Survivals of 0 get none."""
    requests, width = survivals.shape
    if budget <= 0:
        return np.zeros(requests, np.int64)
    flat = survivals.T.ravel() if ties == "position" else survivals.ravel()
    last = flat.size - budget
    least = float(np.partition(flat, last)[last]) if last > 0 else 0.0
    if least <= 0:
        return (survivals > 0).sum(axis=1)
    reached = survivals >= least
    if np.count_nonzero(reached) == budget:
        return reached.sum(axis=1)
    lengths = (survivals > least).sum(axis=1)
    equal = np.flatnonzero(flat == least)[: budget - int(lengths.sum())]
    # Ties lie in walking order, and within a request in the order of positions: no prefix is broken.
    return lengths + np.bincount(equal % requests if ties == "position" else equal // width, minlength=requests)


def threshold(conf: Floats, least: float) -> Ints:
    """Return lengths [R]: verify up to the first confidence below `least` (DeepSpec's rule)."""
    return np.cumprod(conf >= least, axis=1).sum(axis=1)


def survival_threshold(survivals: Floats, least: float) -> Ints:
    """Return lengths [R]: verify while the survival is at least `least`, the price of a row in tokens."""
    return np.cumprod((survivals >= least) & (survivals > 0), axis=1).sum(axis=1)


def expected_tokens(survivals: Floats, lengths: Ints) -> float:
    """Return the tokens that a step is expected to emit when request r verifies lengths[r] drafts."""
    judged = np.arange(survivals.shape[1]) < lengths[:, None]
    return float(survivals.shape[0] + survivals[judged].sum())
