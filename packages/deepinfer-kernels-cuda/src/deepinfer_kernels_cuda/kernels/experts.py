"""The routed experts: who works on which rows (`schedule`), gate and up with activation, down, and the sum over picks.

Rows are gathered inside the products and nothing is sent to the host: the number of programs is a bound, those without
work leave at once.  Every sum has a fixed order, and what a row gets does not depend on the other rows of its tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.packing import CHUNK, PackedWeight
from deepinfer_kernels_cuda.kernels.products import ROW_TILE, multiply_step, swiglu, weight_pointers
from deepinfer_kernels_cuda.kernels.rounding import fp8_round, round_bfloat16
from deepinfer_kernels_cuda.kernels.variants import HOPPER, Variant, largest_tile

COUNT_BLOCKS = (128, 2048, 4096)
"""Picks that a program of the schedule looks at at once: few, those of a decode step, or of a prefill chunk."""
SUM_BLOCK = 1024
BINS = 512
"""Room for so many experts less one, which takes what is elsewhere."""


@triton.jit
def _schedule(picks, order, tiles, total, pairs, room, experts, size, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """One program an expert: list its pairs (row, pick) in order, and its tiles as (expert, start, count)."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        pick = tl.load(picks + at, mask=at < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(pick < 0, experts, pick), BINS)
    counts = tl.where(bins < experts, counts, 0)
    tile_counts = (counts + size - 1) // size
    start = tl.sum(tl.where(bins < expert, counts, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tile_counts, 0))
    if expert == 0:
        tl.store(total, tl.sum(tile_counts))
    seen = start
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = (tl.load(picks + at, mask=at < pairs, other=-1).to(tl.int32) == expert).to(tl.int32)
        tl.store(order + seen + tl.cumsum(mine, 0) - 1, at, mask=mine != 0)
        seen += tl.sum(mine)
    for first in range(0, count, size):
        entry = tiles + tile + first // size
        tl.store(entry, expert)
        tl.store(entry + room, start + first)
        tl.store(entry + 2 * room, tl.minimum(count - first, size))


@triton.jit
def _gate_up(
    x,
    words,
    factors,
    shares,
    hidden,
    order,
    tiles,
    total,
    room,
    top_k,
    x_stride,
    steps,
    chunks,
    limit,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Gate and up of ROWS channels for one tile of pairs: weighted, activated and rounded -> hidden [pairs, width]."""
    tile = tl.program_id(1)
    if tile >= tl.load(total):
        return
    chunk = tl.program_id(0) * (ROWS // 64)
    expert, start, count = tl.load(tiles + tile), tl.load(tiles + room + tile), tl.load(tiles + 2 * room + tile)
    slot = tl.arange(0, TOKENS)
    pair = tl.load(order + start + tl.minimum(slot, count - 1))
    size: tl.constexpr = 2048 if FP4 else 4096
    gate_w, gate_f = weight_pointers(words, factors, expert * chunks + chunk, steps, ROWS, FP4)
    up_w, up_f = weight_pointers(words, factors, expert * chunks + chunks // 2 + chunk, steps, ROWS, FP4)
    inputs = x + ((pair // top_k).to(tl.int64) * x_stride)[:, None] + tl.arange(0, 32)[None, :]
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    for _ in range(steps):
        gate = multiply_step(gate, gate_w, gate_f, inputs, FP4)
        up = multiply_step(up, up_w, up_f, inputs, FP4)
        gate_w += size
        gate_f += 64
        up_w += size
        up_f += 64
        inputs += 128
    value = swiglu(gate, up, limit) * tl.load(shares + pair)[None, :]
    value = round_bfloat16(tl.trans(value))
    if GROUP:
        value = fp8_round(value, GROUP)
    place = (start + slot).to(tl.int64)[:, None] * (chunks * 32) + (chunk * 64 + tl.arange(0, ROWS))[None, :]
    tl.store(hidden + place, value.to(hidden.dtype.element_ty), mask=(slot < count)[:, None])


@triton.jit
def _down(
    hidden,
    words,
    factors,
    out,
    order,
    tiles,
    total,
    room,
    steps,
    chunks,
    rows,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Down of ROWS channels for one tile of pairs -> out [pairs as they were picked, rows] float32."""
    tile = tl.program_id(1)
    if tile >= tl.load(total):
        return
    chunk = tl.program_id(0) * (ROWS // 64)
    expert, start, count = tl.load(tiles + tile), tl.load(tiles + room + tile), tl.load(tiles + 2 * room + tile)
    slot = tl.arange(0, TOKENS)
    known = tl.minimum(slot, count - 1)
    size: tl.constexpr = 2048 if FP4 else 4096
    w, f = weight_pointers(words, factors, expert * chunks + chunk, steps, ROWS, FP4)
    inputs = hidden + ((start + known).to(tl.int64) * (steps * 128))[:, None] + tl.arange(0, 32)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for _ in range(steps):
        acc = multiply_step(acc, w, f, inputs, FP4)
        w += size
        f += 64
        inputs += 128
    pair = tl.load(order + start + known).to(tl.int64)
    row = chunk * 64 + tl.arange(0, ROWS)
    kept = (row < rows)[:, None] & (slot < count)[None, :]
    tl.store(out + pair[None, :] * rows + row[:, None], acc, mask=kept)


@triton.jit
def _sum_picks(parts, picks, out, top_k, rows, BLOCK: tl.constexpr):
    """Sum over the local picks of a row, in their order: parts [T * top_k, rows] -> out [T, rows]."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(top_k):
        pair = token * top_k + place
        here = tl.load(picks + pair) >= 0
        total += tl.load(parts + pair * rows + row, mask=(row < rows) & here, other=0.0)
    tl.store(out + token * rows + row, total, mask=row < rows)


TOKEN_TILES = (16, 32, 64, 128)
_TILES = {"order": "*i32", "tiles": "*i32", "total": "*i32", "room": "i32"}

SCHEDULE = {
    block: Variant(
        name=f"schedule block {block}",
        kernel=_schedule,
        types={"picks": "*i64", "order": "*i32", "tiles": "*i32", "total": "*i32"}
        | dict.fromkeys(("pairs", "room", "experts", "size"), "i32"),
        constants={"BINS": BINS, "BLOCK": block},
        warps=8 if block == COUNT_BLOCKS[-1] else 4,
        unaligned=("pairs", "room", "experts"),
    )
    for block in COUNT_BLOCKS
}
GATE_UP = {
    (tokens, group): Variant(
        name=f"gate_up fp4 {tokens} tokens group {group}",
        kernel=_gate_up,
        types={"x": "*bf16", "words": "*i16", "factors": "*i32", "shares": "*fp32", "hidden": "*bf16", **_TILES}
        | {"top_k": "i32", "x_stride": "i32", "steps": "i32", "chunks": "i32", "limit": "fp32"},
        constants={"FP4": True, "ROWS": ROW_TILE if tokens > 64 else CHUNK, "TOKENS": tokens, "GROUP": group},
        warps=8 if tokens > 64 else 4,
        stages=3,
        unaligned=("room", "top_k", "steps", "chunks"),
        newest=HOPPER if tokens > 64 else 999,
    )
    for tokens in TOKEN_TILES
    for group in (0, 32)
}
DOWN = {
    tokens: Variant(
        name=f"down fp4 {tokens} tokens",
        kernel=_down,
        types={"hidden": "*bf16", "words": "*i16", "factors": "*i32", "out": "*fp32", **_TILES}
        | {"steps": "i32", "chunks": "i32", "rows": "i32"},
        constants={"FP4": True, "ROWS": ROW_TILE, "TOKENS": tokens},
        warps=8 if tokens > 64 else 4,
        stages=3,
        unaligned=("room", "steps", "chunks"),
        newest=HOPPER if tokens > 64 else 999,
    )
    for tokens in TOKEN_TILES
}
SUM_PICKS = Variant(
    name="sum_picks",
    kernel=_sum_picks,
    types={"parts": "*fp32", "picks": "*i64", "out": "*fp32", "top_k": "i32", "rows": "i32"},
    constants={"BLOCK": SUM_BLOCK},
    unaligned=("top_k",),
)
VARIANTS = (*SCHEDULE.values(), *GATE_UP.values(), *DOWN.values(), SUM_PICKS)


STEADY_TILE = 64


@dataclass(frozen=True)
class Schedule:
    """Pairs (row, pick) sorted by expert, and the tiles that they fall into.

    order  int32 [pairs]: number of the pair (row * top_k + pick), by expert and then as they came
    tiles  int32 [3, room]: expert, start in `order`, pairs of each tile; only the first `total` [1] are meant
    """

    order: Tensor
    tiles: Tensor
    total: Tensor
    tokens: int


def schedule(picks: Tensor, experts: int, *, steady: bool = False) -> Schedule:
    """Sort picks int64 [T, k] (-1 = elsewhere) by expert, in tiles that fit the mean number of rows of an expert.

    steady: tiles of 64 at most; all of these add in one order.
    """
    pairs = picks.numel()
    tokens = min(STEADY_TILE if steady else largest_tile(picks.device), _tile(pairs / experts))
    room = max(1, min(pairs, experts + pairs // tokens))
    order = torch.empty(pairs, dtype=torch.int32, device=picks.device)
    tiles = torch.empty((3, room), dtype=torch.int32, device=picks.device)
    total = torch.empty(1, dtype=torch.int32, device=picks.device)
    block = next((block for block in COUNT_BLOCKS if pairs <= block), COUNT_BLOCKS[-1])
    SCHEDULE[block].launch((experts,), picks, order, tiles, total, pairs, room, experts, tokens)
    return Schedule(order, tiles, total, tokens)


def gate_up(x: Tensor, shares: Tensor, weight: PackedWeight, plan: Schedule, limit: float, group: int) -> Tensor:
    """Return the input of w2, bfloat16 [pairs in the order of the schedule, width]; x [T, columns], shares [T, k]."""
    width = weight.chunks * CHUNK // 2
    hidden = torch.empty((shares.numel(), width), dtype=torch.bfloat16, device=x.device)
    variant = GATE_UP[plan.tokens, group]
    room = plan.tiles.shape[1]
    operands = (x, weight.words, weight.factors.view(torch.int32), shares, hidden, plan.order, plan.tiles, plan.total)
    sizes = (room, shares.shape[1], x.stride(0), weight.steps, weight.chunks)
    variant.launch((weight.chunks * CHUNK // 2 // variant.constants["ROWS"], room), *operands, *sizes, limit)
    return hidden


def down(hidden: Tensor, picks: Tensor, weight: PackedWeight, plan: Schedule) -> Tensor:
    """Return the sum over local picks of w2 times hidden -> float32 [T, rows]; picks [T, k]."""
    parts = torch.empty((picks.numel(), weight.rows), dtype=torch.float32, device=hidden.device)
    out = torch.empty((picks.shape[0], weight.rows), dtype=torch.float32, device=hidden.device)
    room = plan.tiles.shape[1]
    operands = (hidden, weight.words, weight.factors.view(torch.int32), parts, plan.order, plan.tiles, plan.total)
    grid = (weight.chunks * CHUNK // ROW_TILE, room)
    DOWN[plan.tokens].launch(grid, *operands, room, weight.steps, weight.chunks, weight.rows)
    grid = (picks.shape[0], -(-weight.rows // SUM_BLOCK))
    SUM_PICKS.launch(grid, parts, picks, out, picks.shape[1], weight.rows)
    return out


def _tile(mean: float) -> int:
    """Tokens of a tile where an expert has `mean` rows: the fastest of those measured on an H200."""
    return next((tile for tile, most in ((16, 8), (32, 24), (64, 256)) if mean <= most), TOKEN_TILES[-1])
