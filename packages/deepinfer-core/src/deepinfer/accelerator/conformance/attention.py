"""Cases of attention and of the index: rotated queries, the core over window and entries, the choice of entries.

Keys have the same magnitude in each channel for every token, so the sum of the terms' magnitudes in an output channel
is known; index scores are small whole numbers, so choices and ties are exact.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordFormat, RecordView, Rope, Selection
from deepinfer.accelerator.conformance.case import AUTO, PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import (
    DECODE,
    DRAFT,
    MIXED,
    RESUMED,
    SPANS,
    Draw,
    Shapes,
    Step,
    batch_of,
    distinct,
    formats,
    past,
    records,
    ropes,
)
from deepinfer.accelerator.conformance.paged_cache import TURN, prepared
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sparse_attention import IndexRequest, KeySources


def attention_cases(sizes: Sequence[Shapes]) -> list[Case]:
    """Return the cases of this module."""
    cases = []
    for label, precision in PRECISIONS.items():
        for shapes in distinct(sizes):
            rotation = functools.partial(_rotate, shapes)
            cases.append(Case(Ops.rotate_queries, f"{shapes.name}-{label}", precision, rotation))
            for step, ratio in [(DRAFT, 0), *itertools.product((MIXED, DECODE, RESUMED), (0, 1, 2, 4, 128))]:
                run = functools.partial(_attention, shapes, step, ratio)
                cases.append(Case(Ops.attention, f"{shapes.name}-{step.name}-ratio{ratio}-{label}", precision, run))
            for ratio in (1, 2, 4):
                run = functools.partial(_select, shapes, ratio)
                cases.append(Case(Ops.select_entries, f"{shapes.name}-ratio{ratio}-{label}", precision, run))
    cases += [
        Case(Ops.select_entries, f"{shapes.name}-hadamard", AUTO, functools.partial(_transformed, shapes))
        for shapes in sizes
    ]
    return cases


def _rotate(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    batch = prepared(ops, shapes, batch_of(ops, SPANS))
    q = Draw(11).plain(batch.positions.shape[0], shapes.heads, shapes.head_dim)
    rope = ropes(ops, shapes.rope)[1]
    outcomes = []
    for eps, name in ((None, "rotated"), (1e-6, "normed and rotated")):
        magnitude = q.to(torch.float64).abs()
        if eps is not None:
            magnitude = magnitude / magnitude.square().mean(-1, keepdim=True).sqrt()
        pairs = magnitude[..., -shapes.rope :].unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(-1, -1, -1, 2)
        mass = torch.cat((magnitude[..., : -shapes.rope], pairs.flatten(-2)), -1)
        got = ops.rotate_queries(ops.tensor(q), batch, rope, eps)
        accumulated = mass * (TURN + roundings(shapes.head_dim))
        outcomes.append(Outcome(name, got, accumulated, operands=0.0 if eps is None else mass))
    return outcomes


@dataclass(frozen=True)
class Memory:
    """Filled cache memory of the sequences of a step, and that step."""

    window: RecordView
    entries: RecordView | None
    batch: Batch
    magnitude: Tensor


def fill(ops: Ops, shapes: Shapes, step: Step, ratio: int, window: RecordFormat, kind: RecordFormat) -> Memory:
    """Write window KV and entries of all tokens, exactly: rotations by zero, rows of mean square 1, one magnitude."""
    draw = Draw(12)
    still = ropes(ops, shapes.rope)[0]
    view = records(ops, window, shapes.head_dim, shapes.rope)
    entries = records(ops, kind, shapes.head_dim, shapes.rope, ratio) if ratio else None
    magnitude = draw.plain(shapes.head_dim).abs() / 2 + 0.5
    norm = ops.tensor(magnitude, ops.precision.wide)
    ratios = (ratio,) if ratio else ()
    batch = batch_of(ops, step.spans)
    for spans, block in ((past(step.spans), 0), (step.spans, step.block)):
        batch = prepared(ops, shapes, batch_of(ops, spans, ratios), ratios, block=block)
        signs = ops.tensor(draw.signs(batch.positions.shape[0], shapes.head_dim))
        ops.write_window(signs, norm, 0.0, batch, still, view)
        if entries is not None:
            latents = draw.signs(batch.groups[ratio].rows.shape[0], shapes.head_dim) * magnitude
            ops.write_entries(ops.tensor(latents), batch, ratio, still, entries)
    # A quantised record may be larger than its vector by half a step: a quarter for FP4.
    return Memory(view, entries, batch, magnitude.to(torch.float64) * 1.25)


def _attention(shapes: Shapes, step: Step, ratio: int, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(13)
    sink = draw.wide(shapes.heads)
    rope = ropes(ops, shapes.rope)[1]
    outcomes = []
    for kind in formats(ops, "fp8_group32", "fp4_group16", "fp8_rope"):
        memory = fill(ops, shapes, step, ratio, "fp8_group32" if kind == "fp4_group16" else kind, kind)
        q = draw.plain(memory.batch.positions.shape[0], shapes.heads, shapes.head_dim)
        given = ops.tensor(q)
        for name, selection in _selections(ops, memory, ratio).items():
            for decoder in (False, True):
                keys = KeySources(memory.window, memory.entries, selection, decoder)
                out = ops.attention(given, keys, ops.tensor(sink, ops.precision.wide), memory.batch, rope)
                half = "decoder" if decoder else "encoder"
                bound = _bound(shapes, memory.magnitude, q)
                outcomes.append(Outcome(f"{kind}, {name}, {half}", out, *bound))
    return outcomes


def _selections(ops: Ops, memory: Memory, ratio: int) -> dict[str, Selection | None]:
    """Which entries are attended to: none, all visible ones, or a few of them in no order."""
    if not ratio:
        return {"window alone": None}
    visible = ((memory.batch.positions.cpu() + 1) // ratio).unsqueeze(1)
    numbers = Draw(14).permutation(max(SPANS[1].end // ratio, 1))[:48].expand(visible.shape[0], -1)
    few = torch.where(numbers < visible, numbers, -1).to(ops.device)
    return {
        "all entries": ops.everything(memory.batch, ratio),
        "few entries": ops.selection(memory.batch, few, ratio),
    }


def _bound(shapes: Shapes, magnitude: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes for `Outcome.accumulated` and `.operands` of attention from q [T, H, D] over keys of `magnitude` [D].

    A score is off by the roundings of its product, which scales its weight by as much; weights sum to at most 1.
    """
    scores = (q.to(torch.float64).abs() * magnitude).sum(-1, keepdim=True) * shapes.head_dim**-0.5
    pairs = magnitude[-shapes.rope :].unflatten(0, (-1, 2)).sum(1, keepdim=True).expand(-1, 2).flatten()
    mass = torch.cat((magnitude[: -shapes.rope], pairs))
    return mass * (2 * roundings(shapes.head_dim) * scores + roundings(512) + TURN), mass


def request_of(
    ops: Ops, shapes: Shapes, ratio: int, batch: Batch, keys: RecordView, *, values: Tensor | None = None
) -> IndexRequest:
    """Ask for 20 entries and 4 candidate blocks; whole numbers as queries unless `values` are given."""
    draw = Draw(15)
    rows = batch.positions.shape[0]
    query = draw.integers(7, rows, shapes.index_heads, shapes.index_dim) - 3.0 if values is None else values
    weights = (draw.integers(5, rows, shapes.index_heads) + 1.0) / 4
    return IndexRequest(
        query=ops.tensor(query),
        weights=ops.tensor(weights, ops.precision.wide),
        keys=keys,
        rope=ropes(ops, shapes.rope)[0],
        ratio=ratio,
        top_k=20,
        block_size=8,
        candidates=None,
        keep_blocks=4,
    )


def _keys(ops: Ops, shapes: Shapes, ratio: int, *, transform: bool = False) -> tuple[RecordView, Batch]:
    """Index keys of small whole numbers, which every record format holds exactly."""
    draw = Draw(16)
    (kind,) = formats(ops, "fp4_group32")
    view = records(ops, kind, shapes.index_dim, shapes.rope, ratio)
    still: Rope = ropes(ops, shapes.rope)[0]
    batch = batch_of(ops, SPANS)
    for spans in (past(SPANS), SPANS):
        batch = prepared(ops, shapes, batch_of(ops, spans, (ratio,)))
        count = batch.groups[ratio].rows.shape[0]
        keys = ops.tensor(draw.integers(7, count, shapes.index_dim) - 3.0)
        ops.write_entries(keys, batch, ratio, still, view, transform=transform)
    return view, batch


def _select(shapes: Shapes, ratio: int, ops: Ops) -> Sequence[Outcome]:
    view, batch = _keys(ops, shapes, ratio)
    request = request_of(ops, shapes, ratio, batch, view)
    selection, blocks = ops.select_entries(request, batch)
    assert blocks is not None
    inside = IndexRequest(**{**vars(request), "candidates": blocks, "keep_blocks": 0})
    narrowed, nothing = ops.select_entries(inside, batch)
    assert nothing is None
    return [
        Outcome("entries", selection.entries.sort(1).values),
        Outcome("slots", selection.slots.sort(1).values),
        Outcome("candidate blocks", blocks.sort(1).values),
        Outcome("entries within candidates", narrowed.entries.sort(1).values),
    ]


def _transformed(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    """With the Hadamard transform queries and keys are rounded from irrational numbers: a few choices may differ."""
    view, batch = _keys(ops, shapes, 4, transform=True)
    query = Draw(17).plain(batch.positions.shape[0], shapes.index_heads, shapes.index_dim)
    request = request_of(ops, shapes, 4, batch, view, values=query)
    request = IndexRequest(**{**vars(request), "transform": True, "keep_blocks": 0})
    selection, _ = ops.select_entries(request, batch)
    chosen = torch.zeros((query.shape[0], batch.max_context), device=ops.device)
    chosen.scatter_(1, torch.where(selection.entries < 0, batch.max_context - 1, selection.entries), 1.0)
    return [Outcome("chosen entries", chosen[:, :-1], 0.0, rounded=False, flips=1 / 64)]
