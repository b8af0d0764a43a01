"""Cases of sampling: the same tokens from the same logits, seeds and positions on every device."""

from collections.abc import Sequence

import torch

from deepinfer.accelerator.conformance.case import PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import Draw
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sampling import SamplingRows

ROWS, VOCABULARY = 24, 1000


def sampling_cases() -> list[Case]:
    """Return the cases of this module."""
    return [
        Case(op, label, precision, run)
        for label, precision in PRECISIONS.items()
        for op, run in ((Ops.greedy, _greedy), (Ops.sample, _sample), (Ops.log_probs, _log_probs), (Ops.best, _best))
    ]


def _greedy(ops: Ops) -> Sequence[Outcome]:
    """Whole numbers from a small range: every row has ties, the lowest index wins."""
    logits = Draw(30).integers(9, ROWS, VOCABULARY) - 4.0
    return [Outcome("tokens", ops.greedy(ops.tensor(logits, ops.precision.wide)))]


def _sample(ops: Ops) -> Sequence[Outcome]:
    draw = Draw(31)
    logits = ops.tensor(draw.wide(ROWS, VOCABULARY, scale=3.0), ops.precision.wide)
    outcomes = []
    for filtered in (False, True):
        rows = SamplingRows(
            temperature=(draw.integers(4, ROWS) / 2.0).to(torch.float64).to(ops.device),
            top_p=(1.0 - draw.integers(3, ROWS) / 10.0).to(torch.float64).to(ops.device),
            top_k=(draw.integers(3, ROWS) * 20).to(ops.device),
            min_p=(draw.integers(2, ROWS) / 50.0).to(torch.float64).to(ops.device),
            seeds=draw.integers(2**62, ROWS).to(ops.device),
            positions=draw.integers(5000, ROWS).to(ops.device),
            filtered=filtered,
        )
        outcomes.append(Outcome("filtered tokens" if filtered else "tokens", ops.sample(logits, rows)))
    return outcomes


def _log_probs(ops: Ops) -> Sequence[Outcome]:
    logits = Draw(32).wide(ROWS, VOCABULARY, scale=3.0)
    got = ops.log_probs(ops.tensor(logits, ops.precision.wide))
    return [Outcome("log-probabilities", got, roundings(VOCABULARY) + 40, rounded=False)]


def _best(ops: Ops) -> Sequence[Outcome]:
    values, ids = ops.best(ops.tensor(Draw(33).wide(ROWS, VOCABULARY), torch.float32), 7)
    return [Outcome("values", values), Outcome("tokens", ids)]
