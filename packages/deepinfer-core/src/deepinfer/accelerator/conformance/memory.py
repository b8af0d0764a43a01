"""Cases of Engram: rows of n-grams, rows of tables in every stored format, the gate into the streams."""

import functools
from collections.abc import Sequence

import torch

from deepinfer.accelerator.conformance.case import PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import SPANS, Draw, Shapes, batch_of, distinct
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.ngram_memory import EngramHash
from deepinfer.accelerator.parameters import StoredTable

ROWS, STREAMS = 17, 4


def memory_cases(sizes: Sequence[Shapes]) -> list[Case]:
    """Return the cases of this module."""
    cases = []
    for label, precision in PRECISIONS.items():
        cases.append(Case(Ops.ngram_rows, label, precision, _rows))
        cases.append(Case(Ops.engram_lookup, label, precision, _lookup))
        for shapes in distinct(sizes):
            gate = functools.partial(_gate, shapes)
            cases.append(Case(Ops.engram_gate, f"{shapes.name}-{label}", precision, gate))
    return cases


def _rows(ops: Ops) -> Sequence[Outcome]:
    """Hashes wrap around as int64 products do, so the multipliers are large."""
    draw = Draw(27)
    batch = batch_of(ops, SPANS)
    hashing = EngramHash(
        ids=draw.permutation(100).to(ops.device),
        pad=2,
        multipliers=(draw.integers(2**40, 4) * 2**20 + 1).to(ops.device),
        primes=torch.tensor([9973, 9967, 9949, 9941, 9931, 9929], device=ops.device),
        offsets=(torch.arange(6) * 10007).to(ops.device),
    )
    return [Outcome("rows", ops.ngram_rows(batch, hashing))]


def _lookup(ops: Ops) -> Sequence[Outcome]:
    """Tables stay in host memory; what is read is exact in every activation dtype."""
    draw = Draw(28)
    width = 64
    rows = draw.integers(500, ROWS, 6).to(ops.device)
    fp8 = StoredTable(draw.wide(500, width).to(torch.float8_e4m3fn), draw.scales(500, width // 32))
    plain = StoredTable(draw.plain(500, width).to(torch.bfloat16))
    return [
        Outcome("FP8 rows", ops.engram_lookup(rows, fp8)),
        Outcome("bfloat16 rows", ops.engram_lookup(rows, plain)),
    ]


def _gate(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(29)
    wide = ops.precision.wide
    streams, memory = draw.plain(ROWS, STREAMS, shapes.hidden), draw.plain(ROWS, (STREAMS + 1) * shapes.hidden)
    weights = (ops.tensor(draw.wide(STREAMS, shapes.hidden), wide), ops.tensor(draw.wide(STREAMS, shapes.hidden), wide))
    images = draw.integers(3, ROWS) == 0
    values = memory[:, -shapes.hidden :].to(torch.float64).abs().unsqueeze(1)
    # The gate is a sigmoid of a square root, whose slope is large where the dot product is small: at 1e-6 it is 500.
    accumulated = streams.to(torch.float64).abs() + values * (500 * roundings(shapes.hidden))
    outcomes = []
    for name, rows in (("text", None), ("with images", images.to(ops.device))):
        out = ops.engram_gate(ops.tensor(streams), ops.tensor(memory), weights, 1e-6, rows)
        outcomes.append(Outcome(f"streams, {name}", out, accumulated))
    return outcomes
