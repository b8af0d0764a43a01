"""Cases of the hyper-connections: reading the streams, the mixing with its Sinkhorn iterations, writing back."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.accelerator.conformance.case import PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import Draw, Shapes, distinct
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.stream_mixing import Mix, MixSettings
from deepinfer.accelerator.parameters import MixParameters

STREAMS = 4
ROWS = 21
SETTINGS = MixSettings(iterations=20, eps=1e-6, norm_eps=1e-6)


def mixing_cases(sizes: Sequence[Shapes]) -> list[Case]:
    """Return the cases of this module."""
    return [
        Case(op, f"{shapes.name}-{run.__name__.strip('_')}-{label}", precision, functools.partial(run, shapes))
        for label, precision in PRECISIONS.items()
        for shapes in distinct(sizes)
        for op, run in (
            (Ops.mix_in, _shifted),
            (Ops.mix_in, _own),
            (Ops.mix_out, _leave),
            (Ops.collapse, _collapse),
            (Ops.head_weights, _head),
        )
    ]


def parameters_of(draw: Draw, ops: Ops, shapes: Shapes, rows: int, scales: int) -> MixParameters:
    """Draw mixing parameters of `rows` logits and as many `scales`."""
    width = STREAMS * shapes.hidden
    fn, base = draw.wide(rows, width, scale=width**-0.5), draw.wide(rows, scale=0.5)
    scale = draw.wide(scales).abs().clamp_max(1.0)
    return MixParameters(*(ops.tensor(part, ops.precision.wide) for part in (fn, base, scale)))


def _logit_mass(streams: Tensor, fn: Tensor) -> Tensor:
    """Sum of the terms' magnitudes in the mixing logits [T, rows]."""
    flat = streams.flatten(1).to(torch.float64)
    return flat.abs() @ fn.cpu().to(torch.float64).abs().T / flat.square().mean(1, keepdim=True).sqrt()


def _mix_bounds(streams: Tensor, parameters: MixParameters, mix: Mix) -> tuple[float, float]:
    """Magnitudes for pre and post, and for comb relative to itself.

    A sigmoid has a slope of at most 1/4 (doubled in post).  An error of the logits scales the terms of comb, which
    normalisation never makes worse in Hilbert's metric; each of its sums and divisions adds its own roundings.
    """
    width = streams[0].numel()
    logits = 1.5 * roundings(width) * float(_logit_mass(streams, parameters.fn).max())
    return logits / 2 + 8, 4 * logits + 2 * SETTINGS.iterations * (STREAMS + 2)


def _mix_outcomes(streams: Tensor, parameters: MixParameters, mix: Mix) -> list[Outcome]:
    gates, comb = _mix_bounds(streams, parameters, mix)
    return [
        Outcome("pre", mix.pre, gates, rounded=False),
        Outcome("post", mix.post, gates, rounded=False),
        Outcome("comb", mix.comb, comb * mix.comb.to(torch.float64), rounded=False),
    ]


def _shifted(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(18)
    return _enter(shapes, ops, draw, draw.wide(ROWS, STREAMS).abs())


def _own(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    return _enter(shapes, ops, Draw(19), None)


def _enter(shapes: Shapes, ops: Ops, draw: Draw, incoming: Tensor | None) -> Sequence[Outcome]:
    streams = draw.plain(ROWS, STREAMS, shapes.hidden)
    norm = draw.wide(shapes.hidden)
    parameters = parameters_of(draw, ops, shapes, 2 * STREAMS + STREAMS**2, 3)
    given = None if incoming is None else ops.tensor(incoming, ops.precision.wide)
    x, mix = ops.mix_in(ops.tensor(streams), given, parameters, SETTINGS, ops.tensor(norm, ops.precision.wide))
    weights = (mix.pre.cpu() if incoming is None else incoming).to(torch.float64)
    mass = torch.einsum("ts,tsd->td", weights, streams.to(torch.float64).abs())
    read = torch.einsum("ts,tsd->td", weights, streams.to(torch.float64))
    mass = mass / read.square().mean(1, keepdim=True).sqrt() * norm.to(torch.float64).abs()
    own = _mix_bounds(streams, parameters, mix)[0] if incoming is None else 0.0
    accumulated = mass * (roundings(shapes.hidden) + 8 + own)
    # The sum over the streams is rounded to the activation dtype before it is normed.
    return [Outcome("input", x, accumulated, operands=mass), *_mix_outcomes(streams, parameters, mix)]


def _leave(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(20)
    streams, y = draw.plain(ROWS, STREAMS, shapes.hidden), draw.plain(ROWS, shapes.hidden)
    post, comb = draw.wide(ROWS, STREAMS).abs(), draw.wide(ROWS, STREAMS, STREAMS).abs()
    wide = ops.precision.wide
    mix = Mix(ops.tensor(post, wide), ops.tensor(post, wide), ops.tensor(comb, wide))
    out = ops.mix_out(ops.tensor(streams), ops.tensor(y), mix)
    mass = torch.einsum("tjs,tjd->tsd", comb.to(torch.float64), streams.to(torch.float64).abs())
    mass += torch.einsum("ts,td->tsd", post.to(torch.float64), y.to(torch.float64).abs())
    return [Outcome("streams", out, mass * roundings(STREAMS + 1))]


def _collapse(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(21)
    streams, weights = draw.plain(ROWS, STREAMS, shapes.hidden), draw.wide(ROWS, STREAMS)
    out = ops.collapse(ops.tensor(streams), ops.tensor(weights, ops.precision.wide))
    mass = torch.einsum("ts,tsd->td", weights.to(torch.float64).abs(), streams.to(torch.float64).abs())
    return [Outcome("sum", out, mass * roundings(STREAMS))]


def _head(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(22)
    streams = draw.plain(ROWS, STREAMS, shapes.hidden)
    parameters = parameters_of(draw, ops, shapes, STREAMS, 1)
    weights = ops.head_weights(ops.tensor(streams), parameters, SETTINGS)
    logits = 1.5 * roundings(STREAMS * shapes.hidden) * _logit_mass(streams, parameters.fn)
    return [Outcome("weights", weights, logits / 4 + 8, rounded=False)]
