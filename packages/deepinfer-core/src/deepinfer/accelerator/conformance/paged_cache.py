"""Cases of cached records: what is written must be read back, byte for byte where the inputs leave nothing to round."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView
from deepinfer.accelerator.conformance.case import AUTO, PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import (
    NEXT_SPANS,
    RESUMED_SPANS,
    RETAKEN_SPANS,
    SPANS,
    VERIFY_SPANS,
    Draw,
    Shapes,
    Span,
    batch_of,
    distinct,
    formats,
    past,
    records,
    ropes,
    tail,
)
from deepinfer.accelerator.ops import Ops

TURN = 320
"""Roundings of a rotation: its angle, a position below 320 times a frequency, is off by as many units of eps."""


def cache_cases(sizes: Sequence[Shapes]) -> list[Case]:
    """Return the cases of this module."""
    cases = []
    for label, precision in PRECISIONS.items():
        for shapes in distinct(sizes):
            for op, run in ((Ops.write_window, _window), (Ops.write_entries, _entries), (Ops.write_window, _turned)):
                name = f"{shapes.name}-{run.__name__.strip('_')}-{label}"
                cases.append(Case(op, name, precision, functools.partial(run, shapes)))
            for ratio in (1, 2, 4, 128):
                name = f"{shapes.name}-ratio{ratio}-{label}"
                cases.append(Case(Ops.compress, name, precision, functools.partial(_compress, shapes, ratio)))
                resumed = functools.partial(_resumed, shapes, ratio)
                cases.append(Case(Ops.compress, f"{shapes.name}-resumed-ratio{ratio}-{label}", precision, resumed))
    cases += [Case(Ops.write_entries, f"{s.name}-hadamard", AUTO, functools.partial(_hadamard, s)) for s in sizes]
    return cases


def everything_in(ops: Ops, view: RecordView, slots: int) -> Tensor:
    """Read all records but the spare one."""
    return ops.read_records(view, torch.arange(slots, device=ops.device))


def prepared(ops: Ops, shapes: Shapes, batch: Batch, dense: tuple[int, ...] = (), *, block: int = 0) -> Batch:
    """Let `ops` prepare a batch for the model of `shapes`."""
    return ops.prepare(batch, shapes.window, ropes(ops, shapes.rope), dense, block=block)


def _slots(view: RecordView, ratio: int = 1) -> int:
    return len(SPANS) * 3 * 128 // ratio


def _window(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    """A rotation by zero and rows whose mean square is 1: nothing is rounded before the record is made."""
    outcomes = []
    for kind in formats(ops, "fp8_group32", "fp8_rope"):
        draw = Draw(6)
        view = records(ops, kind, shapes.head_dim, shapes.rope)
        norm = ops.tensor(draw.plain(shapes.head_dim, scale=2.0), ops.precision.wide)
        for spans in (past(SPANS), SPANS, NEXT_SPANS):
            batch = prepared(ops, shapes, batch_of(ops, spans))
            kv = ops.tensor(draw.signs(batch.positions.shape[0], shapes.head_dim))
            ops.write_window(kv, norm, 0.0, batch, ropes(ops, shapes.rope)[0], view)
        outcomes.append(Outcome(f"{kind} records", everything_in(ops, view, _slots(view))))
    return outcomes


def _entries(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    outcomes = []
    for ratio in (1, 2, 4, 128):
        for kind in formats(ops, "fp8_group32", "fp4_group16", "fp8_rope", "fp4_group32"):
            draw = Draw(7)
            view = records(ops, kind, shapes.head_dim, shapes.rope, ratio)
            for spans in (past(SPANS), SPANS, NEXT_SPANS, RESUMED_SPANS):
                batch = prepared(ops, shapes, batch_of(ops, spans, (ratio,)))
                latents = ops.tensor(draw.plain(batch.groups[ratio].rows.shape[0], shapes.head_dim, scale=3.0))
                ops.write_entries(latents, batch, ratio, ropes(ops, shapes.rope)[0], view)
            outcomes.append(Outcome(f"{kind} entries of ratio {ratio}", everything_in(ops, view, _slots(view, ratio))))
    return outcomes


def _turned(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    """Norm and rotation as in a model: a record may fall to a neighbouring code, in few elements and by one step."""
    outcomes = []
    for kind in formats(ops, "fp8_group32", "fp8_rope"):
        draw = Draw(8)
        view = records(ops, kind, shapes.head_dim, shapes.rope)
        norm = ops.tensor(draw.plain(shapes.head_dim), ops.precision.wide)
        batch = prepared(ops, shapes, batch_of(ops, past(SPANS)))
        kv = ops.tensor(draw.plain(batch.positions.shape[0], shapes.head_dim))
        ops.write_window(kv, norm, 1e-6, batch, ropes(ops, shapes.rope)[1], view)
        got = everything_in(ops, view, _slots(view))
        mass = _with_partner(got.to(torch.float64).abs(), shapes.rope)
        accumulated = mass * (roundings(shapes.head_dim) / 2 + TURN)
        step = 0.0 if kind == "float32" else _fp8_step(mass)
        flips = 0.0 if kind == "float32" else 1 / 16
        outcomes += [
            Outcome(f"{kind} records, most", got, accumulated, operands=mass, flips=flips),
            Outcome(f"{kind} records, all", got, accumulated, operands=mass, slack=step),
        ]
    return outcomes


def _hadamard(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(9)
    view = records(ops, "fp4_group32", shapes.index_dim, shapes.rope, 4)
    batch = prepared(ops, shapes, batch_of(ops, past(SPANS), (4,)))
    latents = ops.tensor(draw.plain(batch.groups[4].rows.shape[0], shapes.index_dim))
    ops.write_entries(latents, batch, 4, ropes(ops, shapes.rope)[0], view, transform=True)
    got = everything_in(ops, view, _slots(view, 4))
    largest = got.to(torch.float64).abs().amax(-1, keepdim=True)
    return [
        Outcome("transformed keys, most", got, 0.0, flips=1 / 64),
        Outcome("transformed keys, all", got, 0.0, slack=largest),
    ]


def _compress(shapes: Shapes, ratio: int, ops: Ops) -> Sequence[Outcome]:
    return _compressed(shapes, ratio, (past(SPANS), SPANS, NEXT_SPANS, VERIFY_SPANS, RETAKEN_SPANS), ops)


def _resumed(shapes: Shapes, ratio: int, ops: Ops) -> Sequence[Outcome]:
    """Groups that are there already have no latent; what the rows of the step leave in the memory is the same."""
    return _compressed(shapes, ratio, (past(SPANS), RESUMED_SPANS, NEXT_SPANS), ops)


def _compressed(shapes: Shapes, ratio: int, steps: Sequence[Sequence[Span]], ops: Ops) -> Sequence[Outcome]:
    draw = Draw(10)
    halves = 2 if ratio == 4 else 1
    memory = tail(ops, ratio, halves * shapes.head_dim) if ratio > 1 else None
    outcomes = []
    for spans, when in zip(steps, ("first", "second", "third", "fourth", "fifth"), strict=False):
        batch = prepared(ops, shapes, batch_of(ops, spans, (ratio,)))
        shape = (batch.positions.shape[0], halves * shapes.head_dim)
        values = draw.wide(*shape)
        given = [values] if ratio == 1 else [values, draw.wide(*shape, scale=2.0)]
        bias = ops.tensor(draw.wide(ratio, shape[1]), ops.precision.wide) if ratio in (4, 128) else None
        latents = ops.compress(ops.tensor(torch.cat(given, 1), ops.precision.wide), bias, batch, ratio, memory)
        # A softmax of scores below 10 and a sum of positive weights: each weight is off by some 20 eps of itself.
        accumulated = (roundings(halves * ratio) + 20) * float(values.abs().max()) if ratio > 1 else None
        # The last row is padding: its entry goes to the spare record, whatever it is.
        outcomes.append(Outcome(f"latents of the {when} step", latents[:-1], accumulated))
    if memory is not None:
        outcomes += [Outcome("tail values", memory.values[:-1]), Outcome("tail scores", memory.scores[:-1])]
    return outcomes


def _with_partner(magnitude: Tensor, rope: int) -> Tensor:
    """Add to each rotated channel the magnitude of the other one of its pair."""
    pairs = magnitude[..., -rope:].unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(*(-1,) * magnitude.ndim, 2)
    return torch.cat((magnitude[..., :-rope], pairs.flatten(-2)), -1)


def _fp8_step(magnitude: Tensor) -> Tensor:
    """At most one step of E4M3: an eighth of the value, or of its group's smallest normal number where it is below."""
    return magnitude / 8 + magnitude.amax(-1, keepdim=True) * 2.0**-12
