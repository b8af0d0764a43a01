"""Ops that take rows alone, made ready so that any rows of one set of inputs can be run: for proofs of determinism."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.accelerator.conformance.experts import LIMIT, draw_expert
from deepinfer.accelerator.conformance.inputs import Draw, Shapes
from deepinfer.accelerator.conformance.mixing import SETTINGS, STREAMS, parameters_of
from deepinfer.accelerator.conformance.sampling import sampling_rows
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import RouteSettings
from deepinfer.accelerator.ops.sampling import TokenAdjustments
from deepinfer.accelerator.ops.stream_mixing import Mix
from deepinfer.accelerator.parameters import StoredTable

Run = Callable[[Tensor], tuple[Tensor, ...]]

ROWS = 37
"""Two whole tiles of 16 and a third that is not full."""

VOCABULARY = 1000


def _linear(kind: str, wide: bool, shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(40)
    weight = ops.pack_linear(draw.weight(kind, shapes.q_rank + 24, shapes.hidden, shapes.fp8_block))
    x = ops.tensor(draw.plain(ROWS, shapes.hidden))
    return lambda rows: (ops.linear(x[rows], weight, wide=wide),)


def _embed(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(41)
    table, ids = ops.tensor(draw.plain(50, shapes.hidden)), draw.integers(50, ROWS).to(ops.device)
    return lambda rows: (ops.embed(ids[rows], table),)


def _grouped(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(42)
    width = shapes.heads * shapes.head_dim // 4
    weight = ops.pack_grouped(draw.weight("fp8", 128, width, min(shapes.fp8_block, 32)), 4)
    x = ops.tensor(draw.plain(ROWS, 4, width))
    return lambda rows: (ops.grouped_linear(x[rows], weight),)


def _norm(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(43)
    x, heads = ops.tensor(draw.plain(ROWS, shapes.hidden)), ops.tensor(draw.plain(ROWS, shapes.heads, shapes.head_dim))
    weight = ops.tensor(draw.wide(shapes.hidden), ops.precision.wide)
    return lambda rows: (ops.rms_norm(x[rows], weight, 1e-6), ops.rms_norm(heads[rows], None, 1e-6))


def _mix_in(shifted: bool, shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(44)
    streams = ops.tensor(draw.plain(ROWS, STREAMS, shapes.hidden))
    incoming = ops.tensor(draw.wide(ROWS, STREAMS).abs(), ops.precision.wide)
    norm = ops.tensor(draw.wide(shapes.hidden), ops.precision.wide)
    parameters = parameters_of(draw, ops, shapes, 2 * STREAMS + STREAMS**2, 3)

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        x, mix = ops.mix_in(streams[rows], incoming[rows] if shifted else None, parameters, SETTINGS, norm)
        return x, mix.pre, mix.post, mix.comb

    return run


def _mix_out(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(45)
    streams, y = ops.tensor(draw.plain(ROWS, STREAMS, shapes.hidden)), ops.tensor(draw.plain(ROWS, shapes.hidden))
    post, comb = (ops.tensor(draw.wide(ROWS, *size).abs(), ops.precision.wide) for size in ((STREAMS,), (STREAMS,) * 2))
    return lambda rows: (ops.mix_out(streams[rows], y[rows], Mix(post[rows], post[rows], comb[rows])),)


def _collapse(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(46)
    streams = ops.tensor(draw.plain(ROWS, STREAMS, shapes.hidden))
    weights = ops.tensor(draw.wide(ROWS, STREAMS), ops.precision.wide)
    return lambda rows: (ops.collapse(streams[rows], weights[rows]),)


def _head(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(47)
    streams = ops.tensor(draw.plain(ROWS, STREAMS, shapes.hidden))
    parameters = parameters_of(draw, ops, shapes, STREAMS, 1)
    return lambda rows: (ops.head_weights(streams[rows], parameters, SETTINGS),)


def _route(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(48)
    wide, experts = ops.precision.wide, 4 * shapes.experts
    x, gate = ops.tensor(draw.plain(ROWS, shapes.hidden)), ops.tensor(draw.wide(experts, shapes.hidden) / 8, wide)
    shared, own = ops.tensor(draw.wide(experts), wide), ops.tensor(draw.wide(ROWS, experts), wide)
    given = draw.integers(experts, ROWS, shapes.top_k).to(ops.device)
    settings = RouteSettings(shapes.top_k, True, 1.5)

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        return (
            *ops.route(x[rows], gate, shared, None, settings),
            *ops.route(x[rows], gate, own[rows], None, settings),
            ops.route(x[rows], gate, None, given[rows], settings)[1],
        )

    return run


def _experts(kind: str, shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(49)
    packed = ops.pack_experts([draw_expert(draw, shapes, kind) for _ in range(shapes.experts)])
    x = ops.tensor(draw.plain(ROWS, shapes.hidden))
    picks = torch.stack([draw.permutation(shapes.experts)[: shapes.top_k] for _ in range(ROWS)])
    picks = torch.where(draw.integers(5, *picks.shape) == 0, -1, picks).to(ops.device)
    weights = ops.tensor(draw.wide(*picks.shape).abs(), ops.precision.wide)
    return lambda rows: (ops.experts(x[rows], picks[rows], weights[rows], packed, LIMIT),)


def _shared(kind: str, shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(50)
    packed, x = ops.pack_experts([draw_expert(draw, shapes, kind)]), ops.tensor(draw.plain(ROWS, shapes.hidden))
    return lambda rows: (ops.shared_expert(x[rows], packed, LIMIT),)


def _combine(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(51)
    first, second = (ops.tensor(draw.wide(ROWS, shapes.hidden), ops.precision.wide) for _ in range(2))
    return lambda rows: (ops.combine(first[rows], second[rows]),)


def _lookup(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(52)
    table = StoredTable(draw.wide(500, 64).to(torch.float8_e4m3fn), draw.scales(500, 2))
    found = draw.integers(500, ROWS, 6).to(ops.device)
    return lambda rows: (ops.engram_lookup(found[rows], table),)


def _gate(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(53)
    streams = ops.tensor(draw.plain(ROWS, STREAMS, shapes.hidden))
    memory = ops.tensor(draw.plain(ROWS, (STREAMS + 1) * shapes.hidden))
    first, second = (ops.tensor(draw.wide(STREAMS, shapes.hidden), ops.precision.wide) for _ in range(2))
    images = (draw.integers(3, ROWS) == 0).to(ops.device)
    return lambda rows: (
        ops.engram_gate(streams[rows], memory[rows], (first, second), 1e-6, None),
        ops.engram_gate(streams[rows], memory[rows], (first, second), 1e-6, images[rows]),
    )


def _logits(draw: Draw, ops: Ops) -> Tensor:
    return ops.tensor(draw.wide(ROWS, VOCABULARY, scale=3.0), ops.precision.wide)


def _greedy(shapes: Shapes, ops: Ops) -> Run:
    logits = _logits(Draw(54), ops).round()
    return lambda rows: (ops.greedy(logits[rows]),)


def _sample(filtered: bool, shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(55)
    logits = _logits(draw, ops)
    every = sampling_rows(draw, ops, ROWS, filtered=filtered)
    columns = {name: column for name, column in vars(every).items() if isinstance(column, Tensor)}

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        own: dict[str, Any] = {name: column[rows] for name, column in columns.items()}
        given = replace(every, **own)
        return ops.sample(logits[rows], given), ops.shape_logits(logits[rows], given)

    return run


def _adjust(shapes: Shapes, ops: Ops) -> Run:
    """One logit of each row changes."""
    draw = Draw(58)
    logits, tokens = _logits(draw, ops), draw.integers(VOCABULARY, ROWS).to(ops.device)
    factors, addends = (draw.wide(ROWS).abs().to(torch.float64).to(ops.device) + 0.5 for _ in range(2))

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(rows.shape[0], device=ops.device)
        return (ops.adjust(logits[rows], TokenAdjustments(places, tokens[rows], factors[rows], addends[rows])),)

    return run


def _mask(shapes: Shapes, ops: Ops) -> Run:
    draw = Draw(59)
    logits = _logits(draw, ops)
    words = (draw.integers(2**32, ROWS, -(-VOCABULARY // 32)) - 2**31).to(torch.int32).to(ops.device)
    return lambda rows: (ops.mask_tokens(logits[rows], words[rows]),)


def _log_probs(shapes: Shapes, ops: Ops) -> Run:
    logits = _logits(Draw(56), ops)
    return lambda rows: (ops.log_probs(logits[rows]),)


def _best(shapes: Shapes, ops: Ops) -> Run:
    values = ops.log_probs(_logits(Draw(57), ops).round())
    return lambda rows: ops.best(values[rows], 7)


def _of(make: Callable[..., Run], *choices: object) -> Callable[[Shapes, Ops], Run]:
    return lambda shapes, ops: make(*choices, shapes, ops)


ROW_OPS: dict[str, tuple[Callable[..., object], Callable[[Shapes, Ops], Run]]] = {
    "plain": (Ops.linear, _of(_linear, "plain", False)),
    "fp8": (Ops.linear, _of(_linear, "fp8", False)),
    "fp4": (Ops.linear, _of(_linear, "fp4", True)),
    "table": (Ops.embed, _embed),
    "groups": (Ops.grouped_linear, _grouped),
    "norm": (Ops.rms_norm, _norm),
    "shifted": (Ops.mix_in, _of(_mix_in, True)),
    "own": (Ops.mix_in, _of(_mix_in, False)),
    "streams": (Ops.mix_out, _mix_out),
    "sum": (Ops.collapse, _collapse),
    "head": (Ops.head_weights, _head),
    "router": (Ops.route, _route),
    "plain experts": (Ops.experts, _of(_experts, "plain")),
    "fp8 experts": (Ops.experts, _of(_experts, "fp8")),
    "fp4 experts": (Ops.experts, _of(_experts, "fp4")),
    "fp8 expert": (Ops.shared_expert, _of(_shared, "fp8")),
    "fp4 expert": (Ops.shared_expert, _of(_shared, "fp4")),
    "parts": (Ops.combine, _combine),
    "fp8 table": (Ops.engram_lookup, _lookup),
    "gate": (Ops.engram_gate, _gate),
    "best token": (Ops.greedy, _greedy),
    "tokens": (Ops.sample, _of(_sample, False)),
    "filtered tokens": (Ops.sample, _of(_sample, True)),
    "filtered logits": (Ops.shape_logits, _of(_sample, True)),
    "penalties": (Ops.adjust, _adjust),
    "allowed tokens": (Ops.mask_tokens, _mask),
    "log-probabilities": (Ops.log_probs, _log_probs),
    "best tokens": (Ops.best, _best),
}
"""By a name of the inputs: the op, and what makes it ready."""
