"""Cases of embedding, linear layers over every stored format, and RMSNorm."""

import functools
from collections.abc import Sequence

import torch

from deepinfer.accelerator.conformance.case import PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import TINY, Draw, Shapes
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.projection import dequantise

ROWS = (1, 37)
"""A decoding step and a prefill chunk that fills no tile."""


def projection_cases(sizes: Sequence[Shapes]) -> list[Case]:
    """Return the cases of this module."""
    cases = []
    for label, precision in PRECISIONS.items():
        for shapes in sizes:
            for kind in ("plain", "fp8", "fp4"):
                for rows in ROWS:
                    run = functools.partial(_linear, shapes, kind, rows)
                    cases.append(Case(Ops.linear, f"{shapes.name}-{kind}-{rows}-{label}", precision, run))
            for kind in ("plain", "fp8"):
                grouped = functools.partial(_grouped, shapes, kind)
                cases.append(Case(Ops.grouped_linear, f"{shapes.name}-{kind}-{label}", precision, grouped))
            norm = functools.partial(_rms_norm, shapes)
            cases.append(Case(Ops.rms_norm, f"{shapes.name}-{label}", precision, norm))
        cases.append(Case(Ops.embed, f"{TINY.name}-{label}", precision, functools.partial(_embed, TINY)))
    return cases


def _embed(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(2)
    table = ops.tensor(draw.plain(50, shapes.hidden))
    return [Outcome("embedding", ops.embed(draw.integers(50, 9).to(ops.device), table))]


def _linear(shapes: Shapes, kind: str, rows: int, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(3)
    weight = draw.weight(kind, shapes.q_rank + 32, shapes.hidden, shapes.fp8_block)
    x = draw.plain(rows, shapes.hidden)
    packed, given = ops.pack_linear(weight), ops.tensor(x)
    # Rounding the inputs to FP8 is exact on both sides: it starts from the same numbers.  It may make them larger by
    # half a step, 1/16, which the constant in `roundings` covers.
    mass = x.to(torch.float64).abs() @ dequantise(weight).to(torch.float64).abs().T
    accumulated = roundings(shapes.hidden) * mass
    return [
        Outcome("product", ops.linear(given, packed), accumulated),
        Outcome("wide product", ops.linear(given, packed, wide=True), accumulated, rounded=False),
    ]


def _grouped(shapes: Shapes, kind: str, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(4)
    groups, out = 4, 32
    width = shapes.heads * shapes.head_dim // groups
    block = min(shapes.fp8_block, 32)
    weight = draw.weight(kind, groups * out, width, block)
    x = draw.plain(21, groups, width)
    packed = ops.pack_grouped(weight, groups)
    dense = dequantise(weight).to(torch.float64).abs().unflatten(0, (groups, out))
    mass = torch.einsum("tgk,grk->tgr", x.to(torch.float64).abs(), dense).flatten(1)
    return [Outcome("product", ops.grouped_linear(ops.tensor(x), packed), roundings(width) * mass)]


def _rms_norm(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(5)
    x = ops.tensor(draw.plain(19, shapes.hidden, scale=3.0))
    weight = ops.tensor(draw.wide(shapes.hidden), ops.precision.wide)
    plain, weighted = ops.rms_norm(x, None, 1e-6), ops.rms_norm(x, weight, 1e-6)
    # The mean is a sum of positive terms, and the square root halves its relative error.
    share = roundings(shapes.hidden) / 2 + 4
    return [
        Outcome("scaled", plain, share * plain.to(torch.float64).abs()),
        Outcome("normed", weighted, share * weighted.to(torch.float64).abs()),
    ]
