"""The index's queries and scores: rotated, rounded to E2M1, and multiplied with keys of E2M1 in records.

A score is the sum over heads of weight * relu(query . key).  Keys stand where a matrix unit has its many rows, unpacked
in registers; query heads where it has its few columns.  What is chosen by the scores is `selection.py`'s.

A record holds WIDTH / 2 bytes of E2M1 (the even channel in the low nibble) and one UE8M0 byte for 32 channels.  A
product does not care in which order channels are added, so a tile of keys is unpacked into planes: channels 0, 4, 8, ..
of 16-bit words, then 1, 5, 9, .. and so on.  Unpacked keys are 2^-30 times themselves, so that every scale up to 2^31
is a bfloat16; the weights take it back.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.rounding import (
    hadamard,
    power_of_two,
    round_bfloat16,
    round_e2m1,
    scale_of_32,
)
from deepinfer_kernels_cuda.kernels.rows import rotate
from deepinfer_kernels_cuda.kernels.variants import IN_PYTHON, OPERAND, Variant

QUERY_HEADS = 16
KEYS = 128
"""Keys of a tile when a program has one row."""
MOST_COLUMNS = 128
"""Heads of all rows of a program."""
PROGRAMS = 132 * 6
"""Programs that keep an H200 busy."""
WORDS = 128
"""Channels of the records that are read in 16-bit words."""
STRIDE = 16
SHARING = 16
"""Rows of a sequence from which on programs take several of them."""
# Four E2M1 numbers of two 16-bit words: sign to bit 15, the rest to bits 8 .. 6 makes a bfloat16 of 2^-126 times it.
_UNPACK_ASM = tl.constexpr("""
{
.reg .b32 t;
shl.b32 t, $4, 12;
and.b32 t, t, 0x80008000;
shl.b32 $0, $4, 6;
lop3.b32 $0, $0, 0x01C001C0, t, 0xEA;
shl.b32 t, $4, 8;
and.b32 t, t, 0x80008000;
shl.b32 $1, $4, 2;
lop3.b32 $1, $1, 0x01C001C0, t, 0xEA;
shl.b32 t, $4, 4;
and.b32 t, t, 0x80008000;
shr.b32 $2, $4, 2;
lop3.b32 $2, $2, 0x01C001C0, t, 0xEA;
and.b32 t, $4, 0x80008000;
shr.b32 $3, $4, 6;
lop3.b32 $3, $3, 0x01C001C0, t, 0xEA;
mov.b32 t, 0x80008000;
fma.rn.bf16x2 $0, $0, $5, t;
fma.rn.bf16x2 $1, $1, $5, t;
fma.rn.bf16x2 $2, $2, $5, t;
fma.rn.bf16x2 $3, $3, $5, t;
}
""")


@triton.jit
def _number(nibble, factor):
    """Float32 value of E2M1 codes (int32) times a factor in bfloat16 bits (int16), as the device computes it."""
    value = (((nibble & 8) << 28) | ((nibble & 7) << 22)).to(tl.float32, bitcast=True)
    return value * (factor.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _unpack(words, factors):
    """Four planes of numbers from int16 words and their factors, bfloat16 bits of the same shape."""
    if IN_PYTHON:
        w = words.to(tl.int32)
        a, b = _number(w, factors), _number(w >> 4, factors)
        c, d = _number(w >> 8, factors), _number(w >> 12, factors)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK_ASM,
            "=&r,=&r,=&r,=&r,r,r",
            [words, factors],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def _index_queries(
    q,
    turns,
    out,
    heads,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Rotate, transform (STEPS > 0) and round HEADS heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = (row * heads + head)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    kept = (head < heads)[:, None]
    value = tl.load(q + at, mask=kept, other=0.0).to(tl.float32)
    value = rotate(value, turns + row * DIM, HEADS, WIDTH, DIM, False)
    if STEPS:
        value = hadamard(value, HEADS, WIDTH, STEPS)
    grouped = tl.reshape(value, (HEADS, WIDTH // 32, 32))
    exponent = scale_of_32(tl.max(tl.abs(grouped), 2))[:, :, None]
    rounded = round_e2m1(grouped * power_of_two(254 - exponent)) * power_of_two(exponent)
    value = tl.reshape(rounded, (HEADS, WIDTH))
    tl.store(out + at, round_bfloat16(value).to(out.dtype.element_ty), mask=kept)


@triton.jit
def _plane(query, own, kept, plane: tl.constexpr, PLANES: tl.constexpr, W: tl.constexpr):
    """Channels plane, plane + PLANES, .. of the query heads `own` [COLUMNS] of a program: [W, COLUMNS]."""
    at = own[None, :] * (PLANES * W) + (tl.arange(0, W) * PLANES + plane)[:, None]
    return tl.load(query + at, mask=kept[None, :], other=0.0).to(OPERAND)


@triton.jit
def _planes(query, own, kept, WIDTH: tl.constexpr):
    """The planes that records of WIDTH channels are unpacked into: four of words, two of bytes."""
    if WIDTH == 128:
        q0, q1 = _plane(query, own, kept, 0, 4, 32), _plane(query, own, kept, 1, 4, 32)
        q2, q3 = _plane(query, own, kept, 2, 4, 32), _plane(query, own, kept, 3, 4, 32)
    else:
        q0, q1 = _plane(query, own, kept, 0, 2, WIDTH // 2), _plane(query, own, kept, 1, 2, WIDTH // 2)
        q2, q3 = q0, q1
    return q0, q1, q2, q3


@triton.jit
def _products_of_words(records, slot, q0, q1, q2, q3):
    """Products [KEYS, COLUMNS], 2^-30 of them, of records of 128 channels: 34 words, the last two hold the scales."""
    word = tl.arange(0, 32)
    at = records + (slot * 34)[:, None]
    scales = tl.load((records + slot * 34 + 32).to(tl.pointer_type(tl.int32)))
    exponent = ((scales[:, None] >> (word // 8 * 8)[None, :]) & 0xFF) + 96
    factors = (tl.minimum(exponent, 254) << 7).to(tl.int16)
    a, b, c, d = _unpack(tl.load(at + word[None, :]), factors)
    acc = tl.dot(a.to(OPERAND), q0)
    acc = tl.dot(b.to(OPERAND), q1, acc)
    acc = tl.dot(c.to(OPERAND), q2, acc)
    return tl.dot(d.to(OPERAND), q3, acc)


@triton.jit
def _products_of_bytes(records, slot, q0, q1, WIDTH: tl.constexpr):
    """The same for any multiple of 32 channels, byte by byte."""
    byte = tl.arange(0, WIDTH // 2)
    at = records + (slot * (WIDTH // 2 + WIDTH // 32))[:, None]
    exponent = tl.load(at + WIDTH // 2 + (byte // 16)[None, :]).to(tl.int32) + 96
    factors = (tl.minimum(exponent, 254) << 7).to(tl.int16)
    pair = tl.load(at + byte[None, :]).to(tl.int32)
    acc = tl.dot(_number(pair, factors).to(OPERAND), q0)
    return tl.dot(_number(pair >> 4, factors).to(OPERAND), q1, acc)


@triton.jit
def _products(records, slot, q0, q1, q2, q3, WIDTH: tl.constexpr):
    """Products [KEYS, COLUMNS], 2^-30 of them, of the records at `slot` with a program's queries."""
    if WIDTH == 128:
        acc = _products_of_words(records, slot, q0, q1, q2, q3)
    else:
        acc = _products_of_bytes(records, slot, q0, q1, WIDTH)
    return acc


@triton.jit
def _entries(candidates, place, count, visible, BLOCK: tl.constexpr):
    """Entry numbers (int64) at places of a row: themselves or, with BLOCK > 0, those of its blocks (-1 = none)."""
    if BLOCK:
        block = tl.load(candidates + place // BLOCK, mask=place < count, other=-1)
        entry = tl.where(block < 0, -1, block * BLOCK + place % BLOCK)
    else:
        entry = place.to(tl.int64)
    return entry, (entry >= 0) & (entry < visible)


@triton.jit
def _index_scores(
    query,
    weights,
    records,
    tables,
    sequences,
    positions,
    candidates,
    scores,
    entries,
    rows,
    heads,
    table_width,
    count,
    stride,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores of ROWS rows and `tiles` tiles of KEYS entries; with BLOCK > 0, of the entries of one row's blocks.

    Nothing is written behind the last visible entry; an entry of a list that is not visible gets -inf.
    """
    EACH: tl.constexpr = 128 // RATIO
    row = tl.program_id(1) * ROWS
    own = tl.minimum(row + tl.arange(0, ROWS), rows - 1)
    sequence = tl.load(sequences + own)
    visible = (tl.load(positions + own) + 1) // RATIO
    limit = count if BLOCK else tl.minimum(tl.max(visible, 0), count)
    first = tl.program_id(0) * tiles * KEYS
    if first < limit:
        column = tl.arange(0, COLUMNS)
        kept = (row + column // heads < rows) & (column < ROWS * heads)
        head = row.to(tl.int64) * heads + column
        q0, q1, q2, q3 = _planes(query, head, kept, WIDTH)
        weight = tl.load(weights + head, mask=kept, other=0.0) * 1073741824.0
        blocks = candidates + row * (count // BLOCK) if BLOCK else candidates
        last = tl.minimum(first + tiles * KEYS, limit)
        for one in range(tl.min(sequence, 0), tl.max(sequence, 0) + 1):
            table = tables + one * table_width
            for start in range(first, last, KEYS):
                place = start + tl.arange(0, KEYS)
                entry, inside = _entries(blocks, place, count, tl.max(visible, 0), BLOCK)
                known_entry = tl.where(inside, entry, 0)
                slot = tl.load(table + known_entry // EACH, mask=inside, other=0) * EACH + known_entry % EACH
                slot = tl.where(inside & (slot >= 0), slot, 0)
                acc = _products(records, slot, q0, q1, q2, q3, WIDTH)
                weighted = tl.maximum(acc, 0.0) * weight[None, :]
                if ROWS == 1:
                    score = tl.sum(weighted, 1)
                    if BLOCK:
                        score = tl.where(inside, score, float("-inf"))
                        tl.store(entries + row.to(tl.int64) * stride + place, entry.to(tl.int32), mask=place < count)
                    tl.store(scores + row.to(tl.int64) * stride + place, score, mask=place < last)
                else:
                    score = tl.sum(tl.reshape(weighted, (KEYS, ROWS, COLUMNS // ROWS)), 2)
                    target = row + tl.arange(0, ROWS)
                    mine = (sequence == one) & (target < rows)
                    at = scores + target.to(tl.int64)[None, :] * stride + place[:, None]
                    tl.store(at, score, mask=mine[None, :] & (place < last)[:, None])


@dataclass(frozen=True)
class Scored:
    """What a piece of rows is scored against.

    weights     float32 [T, heads]
    records     uint8 [slots + 1, bytes]
    tables      int64 [R, blocks]; sequences, positions int64 [T]
    candidates  int64 [T, blocks] of `block` entries each, or None: all `count` entries of each row's sequence
    """

    weights: Tensor
    records: Tensor
    tables: Tensor
    sequences: Tensor
    positions: Tensor
    ratio: int
    count: int
    candidates: Tensor | None
    block: int


def _query_variant(width: int, dim: int, *, transform: bool) -> Variant:
    return Variant(
        name=f"index_queries {width} {dim} {'transformed' if transform else 'plain'}",
        kernel=_index_queries,
        types={"q": "*bf16", "turns": "*fp32", "out": "*bf16", "heads": "i32"},
        constants={
            "WIDTH": width,
            "DIM": dim,
            "HEADS": QUERY_HEADS,
            "STEPS": width.bit_length() - 1 if transform else 0,
        },
        unaligned=("heads",),
    )


def _score_variant(rows: int, columns: int, width: int, ratio: int, block: int) -> Variant:
    pointers = {"query": "*bf16", "weights": "*fp32", "records": "*i16" if width == WORDS else "*u8"}
    lists = dict.fromkeys(("tables", "sequences", "positions", "candidates"), "*i64")
    sizes = ("rows", "heads", "table_width", "count", "stride", "tiles")
    return Variant(
        name=f"index_scores {rows} rows {columns} columns {width} ratio {ratio} block {block}",
        kernel=_index_scores,
        types={**pointers, **lists, "scores": "*fp32", "entries": "*i32", **dict.fromkeys(sizes, "i32")},
        constants={"ROWS": rows, "COLUMNS": columns, "KEYS": KEYS if rows == 1 else KEYS // 2}
        | {"WIDTH": width, "RATIO": ratio, "BLOCK": block},
        stages=2,
        unaligned=("rows", "heads", "table_width", "count", "tiles"),
    )


VARIANTS = (
    _query_variant(128, 64, transform=False),
    _query_variant(128, 64, transform=True),
    *(_score_variant(rows, 32 * rows, 128, ratio, 0) for rows in (1, 4) for ratio in (1, 2)),
    _score_variant(1, 32, 128, 1, 8),
    _score_variant(1, 64, 128, 4, 0),
    _score_variant(2, 128, 128, 4, 0),
)
"""At the shapes of the released models; others are compiled when they come."""


def index_queries(q: Tensor, turns: Tensor, *, transform: bool) -> Tensor:
    """Return q [T, heads, width] (bfloat16) rotated by turns float32 [T, dim / 2, 2] and rounded to E2M1, bfloat16."""
    tokens, heads, width = q.shape
    out = torch.empty_like(q)
    variant = _query_variant(width, 2 * turns.shape[1], transform=transform)
    variant.launch((tokens, -(-heads // QUERY_HEADS)), q, turns, out, heads)
    return out


def index_scores(query: Tensor, given: Scored, *, alone: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return scores float32 [T, stride] of rounded queries [T, heads, width] and, of candidates, entries int32.

    Without candidates the scores of a row's visible entries are written, nothing else.  With them scores and entry
    numbers of all places are; what is not visible has -inf, what is no candidate -1.
    alone: a program takes one row, however many there are.
    """
    tokens, heads, width = query.shape
    block = given.block if given.candidates is not None else 0
    count = given.count if given.candidates is None else given.candidates.shape[1] * block
    stride = -(-count // STRIDE) * STRIDE
    scores = torch.empty((tokens, stride), dtype=torch.float32, device=query.device)
    entries = None if given.candidates is None else torch.empty_like(scores, dtype=torch.int32)
    rows = 1 if alone else rows_of(tokens, heads, given)
    variant = _score_variant(rows, max(16, triton.next_power_of_2(rows * heads)), width, given.ratio, block)
    keys, groups = variant.constants["KEYS"], -(-tokens // rows)
    tiles = max(1, min(16, -(-count // keys) * groups // PROGRAMS))
    records = given.records.flatten()
    records = records.view(torch.int16) if width == WORDS else records
    candidates = given.positions if given.candidates is None else given.candidates
    lists = (given.tables, given.sequences, given.positions, candidates)
    outputs = (scores, scores.view(torch.int32) if entries is None else entries)
    sizes = (tokens, heads, given.tables.shape[1], count, stride, tiles)
    grid = (-(-count // (keys * tiles)), groups)
    variant.launch(grid, query, given.weights, records, *lists, *outputs, *sizes)
    return scores, entries


def rows_of(tokens: int, heads: int, given: Scored) -> int:
    """Rows that share a program's keys: several where most neighbours belong to one sequence."""
    shared = given.candidates is None and heads & (heads - 1) == 0 and tokens >= SHARING * given.tables.shape[0]
    return max(1, MOST_COLUMNS // heads) if shared and heads >= 16 else 1
