"""Attention over cached records: window KV and selected entries in any record, unpacked in registers.

A program takes one row and up to 64 heads.  Few rows leave too few programs, so a row's keys are then cut into parts;
the softmax of each is kept as (largest score, sum, weighted keys), and `_join` adds the parts in order.  Sink and
inverse rotation come last.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.records import FP4, FP8, NONE, ROPE
from deepinfer_kernels_cuda.kernels.rounding import round_bfloat16
from deepinfer_kernels_cuda.kernels.rows import rotate
from deepinfer_kernels_cuda.kernels.variants import OPERAND, Variant

KEYS = 32
"""Keys that a program holds at once."""
MOST_HEADS, JOINED_HEADS = 64, 2
STEADY_WINDOW, STEADY_ENTRIES = 32, 64
"""Keys of a part where parts may not depend on the batch."""
MOST_SHARES = 2048
"""Parts of rows that are held at once there."""
HIDDEN = tl.constexpr(-1e30)
"""Score of a key that is not seen; finite, so that a part without any key stays a number and weighs nothing."""


@triton.jit
def _e4m3_value(code):
    """Float32 value of E4M3 codes (int32)."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _read_fp8(records, slot, N: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors [N, WIDTH] of records [codes | one exponent for 32]."""
    record = records + slot * (WIDTH + WIDTH // 32)
    group = tl.arange(0, WIDTH // 32)
    at = record[:, None, None] + group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    code = tl.load(at).to(tl.int32)
    exponent = tl.maximum(tl.load(record[:, None] + WIDTH + group[None, :]).to(tl.int32), 1)
    value = _e4m3_value(code) * (exponent << 23).to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(value, (N, WIDTH))


@triton.jit
def _read_fp4(records, slot, N: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors [N, WIDTH] of records [nibbles, the even one low | one E4M3 scale for 16]."""
    record = records + slot * (WIDTH // 2 + WIDTH // 16)
    group = tl.arange(0, WIDTH // 16)
    at = record[:, None, None] + group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    pair = tl.load(at).to(tl.int32)
    scale = _e4m3_value(tl.load(record[:, None] + WIDTH // 2 + group[None, :]).to(tl.int32))[:, :, None]
    value = tl.join(_e2m1_value(pair & 15) * scale, _e2m1_value(pair >> 4) * scale)
    return tl.reshape(value, (N, WIDTH))


@triton.jit
def _read_rope(records, slot, N: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Vectors [N, WIDTH] of V4's records [codes | DIM channels in bfloat16 | one exponent for 64, padded to 8]."""
    plain: tl.constexpr = WIDTH - DIM
    tail: tl.constexpr = plain + 2 * DIM
    size: tl.constexpr = WIDTH if plain < 64 else 64
    record = records + slot * (tail + ((plain + 63) // 64 + 7) // 8 * 8)
    group = tl.arange(0, WIDTH // size)
    channel = group[:, None] * size + tl.arange(0, size)[None, :]
    turning = (channel >= plain)[None, :, :]
    code = tl.load(record[:, None, None] + channel[None, :, :], mask=~turning, other=0).to(tl.int32)
    scales = record[:, None] + tail + group[None, :]
    exponent = tl.maximum(tl.load(scales, mask=(group * size < plain)[None, :], other=1).to(tl.int32), 1)
    value = _e4m3_value(code) * (exponent << 23).to(tl.float32, bitcast=True)[:, :, None]
    words = (record + plain).to(tl.pointer_type(tl.int16))[:, None, None] + (channel - plain)[None, :, :]
    bits = tl.load(words, mask=turning, other=0).to(tl.int32) << 16
    return tl.reshape(tl.where(turning, bits.to(tl.float32, bitcast=True), value), (N, WIDTH))


@triton.jit
def _e2m1_value(code):
    """Float32 value of E2M1 codes (int32)."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _take(
    q,
    high,
    total,
    acc,
    slots,
    bias,
    records,
    first,
    last,
    scale,
    FORMAT: tl.constexpr,
    N: tl.constexpr,
    DIM: tl.constexpr,
):
    """Add keys first .. last of a row's list to the running softmax (high, total, acc) of q [heads, width]."""
    width: tl.constexpr = q.shape[1]
    for start in range(first, last, N):
        number = start + tl.arange(0, N)
        inside = number < last
        slot = tl.load(slots + number, mask=inside, other=0)
        seen = inside & (slot >= 0) & (tl.load(bias + number, mask=inside, other=-1.0) == 0.0)
        slot = tl.where(seen, slot, 0)
        if FORMAT == 4:
            k = _read_fp4(records, slot, N, width)
        elif FORMAT == 8:
            k = _read_fp8(records, slot, N, width)
        else:
            k = _read_rope(records, slot, N, width, DIM)
        k = tl.where(seen[:, None], k, 0.0).to(OPERAND)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(seen[None, :], score, HIDDEN)
        higher = tl.maximum(high, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        kept = tl.exp(high - higher)
        total = total * kept + tl.sum(weight, 1)
        acc = tl.dot(weight.to(OPERAND), k, acc * kept[:, None])
        high = higher
    return high, total, acc


@triton.jit
def _finish(high, total, acc, sink, turns, HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Output of a row from its whole softmax: the sink joins the sum, the tail turns back."""
    top = tl.maximum(high, sink)
    share = tl.exp(high - top)
    value = acc * (share / (total * share + tl.exp(sink - top)))[:, None]
    return round_bfloat16(rotate(value, turns, HEADS, WIDTH, DIM, True))


@triton.jit
def _attend(
    q,
    window,
    window_slots,
    window_bias,
    entries,
    entry_slots,
    entry_bias,
    sink,
    turns,
    out,
    statistics,
    heads,
    window_count,
    entry_count,
    window_size,
    entry_size,
    scale,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
):
    """One row, HEADS heads and one part of the row's keys; `out` gets the result or, of several parts, its share."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    part = tl.program_id(2)
    place = head[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    known = (head < heads)[:, None]
    x = tl.load(q + row * heads * WIDTH + place, mask=known, other=0.0).to(OPERAND)
    high = tl.full((HEADS,), HIDDEN, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    slots, bias = window_slots + row * window_count, window_bias + row * window_count
    first, last = part * window_size, tl.minimum((part + 1) * window_size, window_count)
    high, total, acc = _take(x, high, total, acc, slots, bias, window, first, last, scale, WINDOW, N, DIM)
    if FORMAT:
        slots, bias = entry_slots + row * entry_count, entry_bias + row * entry_count
        first, last = part * entry_size, tl.minimum((part + 1) * entry_size, entry_count)
        high, total, acc = _take(x, high, total, acc, slots, bias, entries, first, last, scale, FORMAT, N, DIM)
    if PARTS == 1:
        sinks = tl.load(sink + head, mask=head < heads, other=0.0)
        value = _finish(high, total, acc, sinks, turns + row * DIM, HEADS, WIDTH, DIM)
        tl.store(out + row * heads * WIDTH + place, value.to(out.dtype.element_ty), mask=known)
    else:
        at = row * PARTS + part
        tl.store(statistics + at * 2 * heads + head, high, mask=head < heads)
        tl.store(statistics + at * 2 * heads + heads + head, total, mask=head < heads)
        tl.store(out + at * heads * WIDTH + place, acc, mask=known)


@triton.jit
def _join(
    shares,
    statistics,
    sink,
    turns,
    out,
    heads,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
):
    """Add the parts of one row for HEADS heads, in order; weights come first, so that no share waits for another."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = head < heads
    place = head[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    high = tl.full((HEADS,), HIDDEN, tl.float32)
    for part in tl.static_range(PARTS):
        at = statistics + (row * PARTS + part) * 2 * heads + head
        high = tl.maximum(high, tl.load(at, mask=known, other=HIDDEN))
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    for part in tl.static_range(PARTS):
        at = statistics + (row * PARTS + part) * 2 * heads + head
        weight = tl.exp(tl.load(at, mask=known, other=HIDDEN) - high)
        total += tl.load(at + heads, mask=known, other=0.0) * weight
        share = tl.load(shares + (row * PARTS + part) * heads * WIDTH + place, mask=known[:, None], other=0.0)
        acc += share * weight[:, None]
    sinks = tl.load(sink + head, mask=known, other=0.0)
    value = _finish(high, total, acc, sinks, turns + row * DIM, HEADS, WIDTH, DIM)
    tl.store(out + row * heads * WIDTH + place, value.to(out.dtype.element_ty), mask=known[:, None])


@dataclass(frozen=True)
class Keys:
    """A list of records for each row: `records` uint8 [slots + 1, bytes]; slots int64 and bias float32 [T, N]."""

    records: Tensor
    slots: Tensor
    bias: Tensor
    format: int

    def rows(self, own: slice) -> "Keys":
        """The lists of some rows."""
        return Keys(self.records, self.slots[own], self.bias[own], self.format)


_POINTERS = {
    "q": "*bf16",
    "window": "*u8",
    "window_slots": "*i64",
    "window_bias": "*fp32",
    "entries": "*u8",
    "entry_slots": "*i64",
    "entry_bias": "*fp32",
    "sink": "*fp32",
    "turns": "*fp32",
}


def _attend_variant(heads: int, width: int, dim: int, formats: tuple[int, int], parts: int) -> Variant:
    block = min(MOST_HEADS, max(16, triton.next_power_of_2(heads)))
    return Variant(
        name=f"attend {block} heads {width} formats {formats} parts {parts}",
        kernel=_attend,
        types={**_POINTERS, "out": "*bf16" if parts == 1 else "*fp32", "statistics": "*fp32"}
        | {"heads": "i32", "window_count": "i32", "entry_count": "i32"}
        | {"window_size": "i32", "entry_size": "i32", "scale": "fp32"},
        constants={"WINDOW": formats[0], "FORMAT": formats[1], "PARTS": parts, "HEADS": block}
        | {"WIDTH": width, "DIM": dim, "N": KEYS},
        warps=8 if width > 256 else 4,
        stages=1,
        unaligned=("heads", "window_count", "entry_count"),
    )


def _join_variant(width: int, dim: int, parts: int) -> Variant:
    return Variant(
        name=f"join {width} parts {parts}",
        kernel=_join,
        types={"shares": "*fp32", "statistics": "*fp32", "sink": "*fp32", "turns": "*fp32", "out": "*bf16"}
        | {"heads": "i32"},
        constants={"PARTS": parts, "HEADS": JOINED_HEADS, "WIDTH": width, "DIM": dim},
        unaligned=("heads",),
    )


RECORD_PAIRS = ((FP8, NONE), (FP8, FP8), (FP8, FP4), (ROPE, NONE), (ROPE, ROPE))
"""Records of window KV and of entries."""
VARIANTS = (
    *(_attend_variant(64, 512, 64, pair, parts) for pair in RECORD_PAIRS for parts in (1, 4)),
    *(_join_variant(512, 64, parts) for parts in (4, 16)),
)
"""At the shapes of the released models; others are compiled when they come."""


def parts_of(rows: int) -> int:
    """Into how many parts the keys of a row are cut."""
    return next((parts for most, parts in ((8, 16), (16, 8), (40, 4), (80, 2)) if rows <= most), 1)


def cut(rows: int, window: int, entries: int, *, steady: bool) -> tuple[int, int, int]:
    """Return into how many parts the lists of a row are cut, and how many keys of each list a part has.

    steady: parts have so many keys however long lists are and however many rows there are; parts behind a row's last
    key add exact zeros.
    """
    if steady:
        least = max(2, -(-window // STEADY_WINDOW), -(-entries // STEADY_ENTRIES))
        return triton.next_power_of_2(least), STEADY_WINDOW, STEADY_ENTRIES
    parts = parts_of(rows)
    window_size, entry_size = (triton.cdiv(triton.cdiv(count, parts), KEYS) * KEYS for count in (window, entries))
    return parts, window_size, entry_size


def attend(
    q: Tensor, window: Keys, entries: Keys | None, sink: Tensor, turns: Tensor, *, steady: bool = False
) -> Tensor:
    """Return the attention of q [T, H, D] (bfloat16, rotated) -> bfloat16 [T, H, D]; turns float32 [T, dim / 2, 2].

    steady: a row's bits depend on nothing but the row.
    """
    tokens, heads, width = q.shape
    other = window if entries is None else entries
    counts = (window.slots.shape[1], 0 if entries is None else entries.slots.shape[1])
    parts, *sizes = cut(tokens, *counts, steady=steady)
    if steady and tokens > MOST_SHARES // parts:
        piece = MOST_SHARES // parts
        rows = [slice(start, start + piece) for start in range(0, tokens, piece)]
        given = [(q[own], window.rows(own), entries and entries.rows(own), sink, turns[own]) for own in rows]
        return torch.cat([attend(*part, steady=True) for part in given])
    dim, kinds = 2 * turns.shape[1], (window.format, NONE if entries is None else entries.format)
    variant = _attend_variant(heads, width, dim, kinds, parts)
    out = torch.empty_like(q)
    shares = out if parts == 1 else torch.empty((tokens, parts, heads, width), dtype=torch.float32, device=q.device)
    statistics = torch.empty((tokens, parts, 2, heads), dtype=torch.float32, device=q.device)
    lists = (window.records, window.slots, window.bias, other.records, other.slots, other.bias)
    grid = (tokens, -(-heads // variant.constants["HEADS"]), parts)
    variant.launch(grid, q, *lists, sink, turns, shares, statistics, heads, *counts, *sizes, width**-0.5)
    if parts > 1:
        joined = _join_variant(width, dim, parts)
        joined.launch((tokens, -(-heads // JOINED_HEADS)), shares, statistics, sink, turns, out, heads)
    return out
