"""Ops that read or write cache memory, run on a whole step and on its rows one by one: for proofs of determinism.

Alone, a row is a step in which no other sequence has rows, and whose context bound is its own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordFormat, RecordView
from deepinfer.accelerator.conformance.attention import fill, request_of
from deepinfer.accelerator.conformance.inputs import MIXED, SPANS, Draw, Shapes, Span, batch_of, formats, past, records
from deepinfer.accelerator.conformance.inputs import ropes as ropes_of
from deepinfer.accelerator.conformance.inputs import tail as tail_of
from deepinfer.accelerator.conformance.paged_cache import prepared
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.ngram_memory import EngramHash
from deepinfer.accelerator.ops.sparse_attention import KeySources

Ways = dict[str, list[Tensor]]
RATIOS = (1, 2, 4, 128)

HALVES = (
    tuple(Span(s.start, (s.start + s.end + 1) // 2, s.decoder_start) for s in SPANS),
    tuple(Span((s.start + s.end + 1) // 2, s.end, s.decoder_start) for s in SPANS),
)
"""`SPANS` in two steps, as shorter chunks."""

TOTAL = sum(span.end - span.start for span in SPANS)


def one_by_one() -> Iterator[tuple[Span, ...]]:
    """The rows of `SPANS`, each as a step of its own."""
    for own, span in enumerate(SPANS):
        for row in range(span.start, span.end):
            yield tuple(
                Span(row, row + 1, s.decoder_start) if i == own else Span(s.start, s.start) for i, s in enumerate(SPANS)
            )


def _numbers(spans: Sequence[Span]) -> list[int]:
    """Which rows of `SPANS` a step holds."""
    starts = [sum(span.end - span.start for span in SPANS[:i]) for i in range(len(SPANS))]
    return [
        first + row - whole.start
        for first, whole, span in zip(starts, SPANS, spans, strict=True)
        for row in range(span.start, span.end)
    ]


def _ways(run: Callable[[Sequence[tuple[Span, ...]]], list[Tensor]]) -> Ways:
    return {"together": run([SPANS]), "alone": run(list(one_by_one())), "in shorter chunks": run(HALVES)}


def _sorted(steps: Sequence[tuple[Span, ...]], results: Sequence[Tensor]) -> list[Tensor]:
    """The rows of the steps' results in the order of `SPANS`."""
    rows = {
        number: row
        for spans, result in zip(steps, results, strict=True)
        for number, row in zip(_numbers(spans), result, strict=True)
    }
    return [rows[number] for number in range(TOTAL)]


def _kinds(ops: Ops) -> Sequence[RecordFormat]:
    return formats(ops, "fp8_group32", "fp8_rope")


def _rotate(shapes: Shapes, ops: Ops) -> Ways:
    q = ops.tensor(Draw(60).plain(TOTAL, shapes.heads, shapes.head_dim))
    rope = ropes_of(ops, shapes.rope)[1]

    def run(steps: Sequence[tuple[Span, ...]]) -> list[Tensor]:
        results = []
        for spans in steps:
            batch, own = prepared(ops, shapes, batch_of(ops, spans)), q[_numbers(spans)]
            parts = [ops.rotate_queries(own, batch, rope, eps) for eps in (None, 1e-6)]
            results.append(torch.stack(parts, 1))
        return _sorted(steps, results)

    return _ways(run)


def _window(shapes: Shapes, ops: Ops) -> Ways:
    draw = Draw(61)
    kv = ops.tensor(draw.plain(TOTAL, shapes.head_dim))
    norm = ops.tensor(draw.wide(shapes.head_dim), ops.precision.wide)

    def run(steps: Sequence[tuple[Span, ...]]) -> list[Tensor]:
        views = [records(ops, kind, shapes.head_dim, shapes.rope) for kind in _kinds(ops)]
        for spans in steps:
            batch = prepared(ops, shapes, batch_of(ops, spans))
            for view in views:
                ops.write_window(kv[_numbers(spans)], norm, 1e-6, batch, ropes_of(ops, shapes.rope)[1], view)
        return [row for view in views for row in view.data[:-1]]

    return _ways(run)


def _groups_of(batch: Batch, spans: Sequence[Span], ratio: int) -> list[int]:
    """Rows of `SPANS` that end a group in a step; the last group is padding."""
    return [_numbers(spans)[row] for row in batch.groups[ratio].rows.tolist()]


def _entries(ratio: int, shapes: Shapes, ops: Ops) -> Ways:
    latents = ops.tensor(Draw(62).plain(TOTAL, shapes.head_dim))

    def run(steps: Sequence[tuple[Span, ...]]) -> list[Tensor]:
        kinds = formats(ops, "fp8_group32", "fp4_group16", "fp4_group32")
        views = [records(ops, kind, shapes.head_dim, shapes.rope, ratio) for kind in kinds]
        for spans in steps:
            batch = prepared(ops, shapes, batch_of(ops, spans, (ratio,)))
            own, rope = latents[_groups_of(batch, spans, ratio)], ropes_of(ops, shapes.rope)[1]
            for view in views:
                ops.write_entries(own, batch, ratio, rope, view, transform=view.format == "fp4_group32")
        return [row for view in views for row in view.data[:-1]]

    return _ways(run)


def _compress(ratio: int, shapes: Shapes, ops: Ops) -> Ways:
    draw = Draw(63)
    width = shapes.head_dim * (2 if ratio == 4 else 1)
    channels = width if ratio == 1 else 2 * width
    before = sum(span.end for span in past(SPANS))
    projected, old = (ops.tensor(draw.wide(count, channels), ops.precision.wide) for count in (TOTAL, before))
    bias = ops.tensor(draw.wide(ratio, width), ops.precision.wide) if ratio in (4, 128) else None

    def run(steps: Sequence[tuple[Span, ...]]) -> list[Tensor]:
        memory = tail_of(ops, ratio, width) if ratio > 1 else None
        batch = prepared(ops, shapes, batch_of(ops, past(SPANS), (ratio,)))
        ops.compress(old, bias, batch, ratio, memory)
        latents: dict[int, Tensor] = {}
        for spans in steps:
            batch = prepared(ops, shapes, batch_of(ops, spans, (ratio,)))
            own = _numbers(spans)
            pooled = ops.compress(projected[own], bias, batch, ratio, memory)
            latents |= dict(zip(_groups_of(batch, spans, ratio)[:-1], pooled[:-1], strict=True))
        kept = [] if memory is None else [memory.values[:-1], memory.scores[:-1]]
        return [latents[row] for row in sorted(latents)] + kept

    return _ways(run)


def _attention(ratio: int, shapes: Shapes, ops: Ops) -> Ways:
    draw = Draw(64)
    sink = ops.tensor(draw.wide(shapes.heads), ops.precision.wide)
    rope = ropes_of(ops, shapes.rope)[1]
    (kind, *_) = formats(ops, "fp8_group32")
    memory = fill(ops, shapes, MIXED, ratio, kind, kind)
    q = ops.tensor(draw.plain(TOTAL, shapes.heads, shapes.head_dim, scale=2.0))

    def run(steps: Sequence[tuple[Span, ...]]) -> list[Tensor]:
        results = []
        for spans in steps:
            ratios = (ratio,) if ratio else ()
            batch = prepared(ops, shapes, batch_of(ops, spans, ratios), ratios)
            selection = ops.everything(batch, ratio) if ratio else None
            keys = [KeySources(memory.window, memory.entries, selection, half) for half in (False, True)]
            parts = [ops.attention(q[_numbers(spans)], part, sink, batch, rope) for part in keys]
            results.append(torch.stack(parts, 1))
        return _sorted(steps, results)

    return _ways(run)


def _select(ratio: int, shapes: Shapes, ops: Ops) -> Ways:
    """Real-valued keys and queries; choices are compared as sets, with what they lead attention to."""
    draw = Draw(65)
    (kind,) = formats(ops, "fp4_group32")
    view: RecordView = records(ops, kind, shapes.index_dim, shapes.rope, ratio)
    for spans in (past(SPANS), SPANS):
        batch = prepared(ops, shapes, batch_of(ops, spans, (ratio,)))
        keys = ops.tensor(draw.plain(batch.groups[ratio].rows.shape[0], shapes.index_dim))
        ops.write_entries(keys, batch, ratio, ropes_of(ops, shapes.rope)[1], view)
    query = draw.plain(TOTAL, shapes.index_heads, shapes.index_dim)

    def run(steps: Sequence[tuple[Span, ...]]) -> list[Tensor]:
        results = []
        for spans in steps:
            batch, own = prepared(ops, shapes, batch_of(ops, spans)), _numbers(spans)
            whole = request_of(ops, shapes, ratio, prepared(ops, shapes, batch_of(ops, SPANS)), view, values=query)
            request = replace(whole, query=whole.query[own], weights=whole.weights[own])
            first, blocks = ops.select_entries(request, batch)
            assert blocks is not None
            second, _ = ops.select_entries(replace(request, candidates=blocks, keep_blocks=0), batch)
            wide = [_padded(part, width) for part, width in ((first.entries, 20), (second.entries, 20))]
            results.append(torch.cat((*wide, _padded(blocks.sort(1, descending=True).values, 4)), 1))
        return _sorted(steps, results)

    return _ways(run)


def _padded(entries: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(entries, (0, width - entries.shape[1]), value=-1)


def _rows(shapes: Shapes, ops: Ops) -> Ways:
    draw = Draw(66)
    hashing = EngramHash(
        ids=draw.permutation(100).to(ops.device),
        pad=2,
        multipliers=(draw.integers(2**40, 4) * 2**20 + 1).to(ops.device),
        primes=torch.tensor([9973, 9967, 9949, 9941, 9931, 9929], device=ops.device),
        offsets=(torch.arange(6) * 10007).to(ops.device),
    )
    whole = batch_of(ops, SPANS)

    def run(steps: Sequence[tuple[Span, ...]]) -> list[Tensor]:
        results = []
        for spans in steps:
            own = _numbers(spans)
            step = replace(batch_of(ops, spans), token_ids=whole.token_ids[own], history=whole.history[own])
            results.append(ops.ngram_rows(step, hashing))
        return _sorted(steps, results)

    return _ways(run)


STEP_OPS: dict[str, tuple[Callable[..., object], Callable[[Shapes, Ops], Ways]]] = {
    "queries": (Ops.rotate_queries, _rotate),
    "records": (Ops.write_window, _window),
    "n-grams": (Ops.ngram_rows, _rows),
    **{f"ratio{r}": (Ops.write_entries, functools.partial(_entries, r)) for r in RATIOS},
    **{f"groups of {r}": (Ops.compress, functools.partial(_compress, r)) for r in RATIOS},
    **{f"entries of {r}": (Ops.attention, functools.partial(_attention, r)) for r in (0, *RATIOS)},
    **{f"best of {r}": (Ops.select_entries, functools.partial(_select, r)) for r in (1, 2, 4)},
}
"""By a name of the inputs: the op, and all ways to run it."""
