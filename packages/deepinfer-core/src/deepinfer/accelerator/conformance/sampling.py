"""Cases of sampling: the same tokens from the same logits, seeds and positions on every device."""

from collections.abc import Callable, Sequence

import torch

from deepinfer.accelerator.conformance.case import PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import Draw
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sampling import SamplingRows, TokenAdjustments

ROWS, VOCABULARY = 24, 1000


def sampling_cases() -> list[Case]:
    """Return the cases of this module."""
    return [Case(op, label, precision, run) for label, precision in PRECISIONS.items() for op, run in RUNS]


def _adjust(ops: Ops) -> Sequence[Outcome]:
    """Rows without entries, rows of many, banned tokens; what is not named stays as it is, bit by bit."""
    draw = Draw(34)
    logits = draw.wide(ROWS, VOCABULARY, scale=3.0)
    places = torch.randperm(ROWS // 2 * VOCABULARY, generator=torch.Generator().manual_seed(35))[:3000]
    addend = draw.wide(len(places)).to(torch.float64)
    addend[::7] = -torch.inf
    adjustments = TokenAdjustments(
        rows=(places // VOCABULARY * 2).to(ops.device),
        tokens=(places % VOCABULARY).to(ops.device),
        repetition=(1.0 + draw.integers(4, len(places)) / 8.0).to(torch.float64).to(ops.device),
        addend=addend.to(ops.device),
    )
    given = ops.tensor(logits, ops.precision.wide)
    got = ops.adjust(given, adjustments)
    others = torch.ones_like(got, dtype=torch.bool)
    others[adjustments.rows, adjustments.tokens] = False
    banned = got == -torch.inf
    size = logits.abs().to(torch.float64) * 2 + 4
    return [
        Outcome("banned tokens", banned),
        Outcome("the given logits", given),
        Outcome("other logits", got[others]),
        Outcome("adjusted logits", torch.where(banned, 0, got), size, rounded=False),
    ]


def _mask_tokens(ops: Ops) -> Sequence[Outcome]:
    """A vocabulary that ends within a word, rows that allow everything, one token, or every other kind of set."""
    draw = Draw(36)
    words = draw.integers(2**32, ROWS, -(-VOCABULARY // 32)) - 2**31
    words[::5] = -1
    words[1::5] = 0
    words[1::5, 7] = 1 << 11
    logits = ops.tensor(draw.wide(ROWS, VOCABULARY, scale=3.0), ops.precision.wide)
    got = ops.mask_tokens(logits, words.to(torch.int32).to(ops.device))
    return [Outcome("masked logits", got), Outcome("the given logits", logits)]


def _greedy(ops: Ops) -> Sequence[Outcome]:
    """Whole numbers from a small range: every row has ties, the lowest index wins."""
    logits = Draw(30).integers(9, ROWS, VOCABULARY) - 4.0
    return [Outcome("tokens", ops.greedy(ops.tensor(logits, ops.precision.wide)))]


def _sample(ops: Ops) -> Sequence[Outcome]:
    draw = Draw(31)
    logits = ops.tensor(draw.wide(ROWS, VOCABULARY, scale=3.0), ops.precision.wide)
    outcomes = []
    for filtered in (False, True):
        rows = sampling_rows(draw, ops, ROWS, filtered=filtered)
        outcomes.append(Outcome("filtered tokens" if filtered else "tokens", ops.sample(logits, rows)))
    return outcomes


def _shape_logits(ops: Ops) -> Sequence[Outcome]:
    """Whole numbers over whole temperatures: a filter must cut where the reference cuts, ties in order."""
    draw = Draw(37)
    logits = ops.tensor(draw.integers(40, ROWS, VOCABULARY) / 4.0, ops.precision.wide)
    shaped = ops.shape_logits(logits, sampling_rows(draw, ops, ROWS, filtered=True))
    left_out = shaped == -torch.inf
    return [
        Outcome("what is left out", left_out),
        Outcome("shaped logits", torch.where(left_out, 0, shaped), 20.0, rounded=False),
    ]


def sampling_rows(draw: Draw, ops: Ops, count: int, *, filtered: bool) -> SamplingRows:
    """Parameters of every kind, each row its own; one in four takes its best token."""
    return SamplingRows(
        temperature=(draw.integers(4, count) / 2.0).to(torch.float64).to(ops.device),
        top_p=(1.0 - draw.integers(3, count) / 10.0).to(torch.float64).to(ops.device),
        top_k=(draw.integers(3, count) * 20).to(ops.device),
        min_p=(draw.integers(2, count) / 50.0).to(torch.float64).to(ops.device),
        seeds=draw.integers(2**62, count).to(ops.device),
        positions=draw.integers(5000, count).to(ops.device),
        filtered=filtered,
    )


def _log_probs(ops: Ops) -> Sequence[Outcome]:
    logits = Draw(32).wide(ROWS, VOCABULARY, scale=3.0)
    got = ops.log_probs(ops.tensor(logits, ops.precision.wide))
    return [Outcome("log-probabilities", got, roundings(VOCABULARY) + 40, rounded=False)]


def _best(ops: Ops) -> Sequence[Outcome]:
    values, ids = ops.best(ops.tensor(Draw(33).wide(ROWS, VOCABULARY), torch.float32), 7)
    return [Outcome("values", values), Outcome("tokens", ids)]


RUNS: tuple[tuple[Callable[..., object], Callable[[Ops], Sequence[Outcome]]], ...] = (
    (Ops.adjust, _adjust),
    (Ops.mask_tokens, _mask_tokens),
    (Ops.greedy, _greedy),
    (Ops.sample, _sample),
    (Ops.shape_logits, _shape_logits),
    (Ops.log_probs, _log_probs),
    (Ops.best, _best),
)
