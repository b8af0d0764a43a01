"""Cases of the mixture of experts: routing with and without given picks, experts in every stored format, the sum."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.accelerator.conformance.case import PRECISIONS, Case, Outcome, roundings
from deepinfer.accelerator.conformance.inputs import Draw, Shapes, distinct
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import RouteSettings, swiglu
from deepinfer.accelerator.ops.projection import dequantise
from deepinfer.accelerator.parameters import StoredExpert

ROWS = 23
LIMIT = 10.0


def expert_cases(sizes: Sequence[Shapes]) -> list[Case]:
    """Return the cases of this module."""
    cases = []
    for label, precision in PRECISIONS.items():
        for shapes in distinct(sizes):
            route = functools.partial(_route, shapes)
            cases.append(Case(Ops.route, f"{shapes.name}-{label}", precision, route))
            combine = functools.partial(_combine, shapes)
            cases.append(Case(Ops.combine, f"{shapes.name}-{label}", precision, combine))
        for shapes in sizes:
            for kind in ("plain", "fp8", "fp4"):
                name = f"{shapes.name}-{kind}-{label}"
                cases.append(Case(Ops.experts, name, precision, functools.partial(_experts, shapes, kind)))
                cases.append(Case(Ops.shared_expert, name, precision, functools.partial(_shared, shapes, kind)))
    return cases


def _route(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(23)
    wide = ops.precision.wide
    experts = 4 * shapes.experts
    x, gate = draw.plain(ROWS, shapes.hidden), draw.wide(experts, shapes.hidden, scale=shapes.hidden**-0.5)
    given, held = ops.tensor(x), ops.tensor(gate, wide)
    mass = float((x.to(torch.float64).abs() @ gate.to(torch.float64).abs().T).max())
    # A score is the root of a softplus; weights are shares of scores, so their errors add up once more.
    accumulated = 8 * roundings(shapes.hidden) * mass + 16
    outcomes = []
    for name, normalise, bias in (
        ("biased", True, draw.wide(experts)),
        ("biased by row", True, draw.wide(ROWS, experts)),
        ("plain", False, None),
    ):
        settings = RouteSettings(shapes.top_k, normalise, 1.5)
        shifts = None if bias is None else ops.tensor(bias, wide)
        picks, weights = ops.route(given, held, shifts, None, settings)
        outcomes += [Outcome(f"{name} picks", picks), Outcome(f"{name} weights", weights, accumulated, rounded=False)]
    table = draw.permutation(experts)[: shapes.top_k].expand(ROWS, -1).contiguous().to(ops.device)
    _, weights = ops.route(given, held, None, table, RouteSettings(shapes.top_k, True, 1.0))
    return [*outcomes, Outcome("weights of given picks", weights, accumulated, rounded=False)]


def _combine(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(24)
    parts = [draw.wide(ROWS, shapes.hidden) for _ in range(2)]
    mass = sum((part.to(torch.float64).abs() for part in parts), torch.zeros((), dtype=torch.float64))
    return [Outcome("sum", ops.combine(*(ops.tensor(part, ops.precision.wide) for part in parts)), mass)]


def draw_expert(draw: Draw, shapes: Shapes, kind: str) -> StoredExpert:
    """Draw an expert stored as `kind`, see `Draw.weight`."""
    block = shapes.fp8_block
    return StoredExpert(
        w1=draw.weight(kind, shapes.intermediate, shapes.hidden, block),
        w2=draw.weight(kind, shapes.hidden, shapes.intermediate, block),
        w3=draw.weight(kind, shapes.intermediate, shapes.hidden, block),
    )


def _experts(shapes: Shapes, kind: str, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(25)
    stored = [draw_expert(draw, shapes, kind) for _ in range(shapes.experts)]
    x = draw.plain(ROWS, shapes.hidden)
    order = torch.stack([draw.permutation(shapes.experts)[: shapes.top_k] for _ in range(ROWS)])
    picks = torch.where(draw.integers(4, *order.shape) == 0, -1, order)
    weights = draw.wide(*order.shape).abs()
    packed = ops.pack_experts(stored)
    total = ops.experts(ops.tensor(x), picks.to(ops.device), ops.tensor(weights, ops.precision.wide), packed, LIMIT)
    bound = _Bound(shapes.hidden, shapes.intermediate, rounds=ops.precision.round_inputs and kind != "plain")
    for expert in range(shapes.experts):
        rows, place = torch.nonzero(picks == expert, as_tuple=True)
        bound.add(x, rows, weights[rows, place].unsqueeze(1), stored[expert])
    return [Outcome("sum", total, bound.accumulated, bound.operands, bound.slack, rounded=False)]


def _shared(shapes: Shapes, kind: str, ops: Ops) -> Sequence[Outcome]:
    draw = Draw(26)
    stored = draw_expert(draw, shapes, kind)
    x = draw.plain(ROWS, shapes.hidden)
    out = ops.shared_expert(ops.tensor(x), ops.pack_experts([stored]), LIMIT)
    bound = _Bound(shapes.hidden, shapes.intermediate, rounds=ops.precision.round_inputs and kind != "plain")
    bound.add(x, torch.arange(ROWS), torch.ones(ROWS, 1), stored)
    return [Outcome("output", out, bound.accumulated, bound.operands, bound.slack, rounded=False)]


class _Bound:
    """Magnitudes of the roundings in sums of experts, by row and channel."""

    def __init__(self, hidden: int, intermediate: int, *, rounds: bool) -> None:
        self._intermediate = intermediate
        self._rounds = rounds
        self.accumulated, self.operands, self.slack = (torch.zeros(ROWS, hidden, dtype=torch.float64) for _ in range(3))

    def add(self, x: Tensor, rows: Tensor, weight: Tensor, stored: StoredExpert) -> None:
        """Add one expert on some rows of x.

        The error of gate and up passes through silu (slope below 1.1) and their product into the hidden row; that is
        rounded to the activation dtype and, with `rounds`, to FP8: at most one element of a row may fall to the other
        side of that rounding, by a step of an eighth.
        """
        w1, w2, w3 = (dequantise(part).to(torch.float64) for part in (stored.w1, stored.w2, stored.w3))
        given = x[rows].to(torch.float64)
        gate, up = given @ w1.T, given @ w3.T
        hidden = swiglu(torch.cat((gate, up), 1), weight.to(torch.float64), LIMIT).abs()
        spread = roundings(x.shape[1])
        off = spread * (given.abs() @ w1.abs().T) * 1.1 * up.clamp(-LIMIT, LIMIT).abs()
        off += spread * (given.abs() @ w3.abs().T) * functional.silu(gate.clamp_max(LIMIT)).abs()
        off = off * weight.to(torch.float64)
        self.accumulated[rows] += off @ w2.abs().T + roundings(self._intermediate) * (hidden @ w2.abs().T)
        self.operands[rows] += hidden @ w2.abs().T
        if self._rounds:
            self.slack[rows] += (hidden.unsqueeze(1) * w2.abs()).amax(2) / 8
