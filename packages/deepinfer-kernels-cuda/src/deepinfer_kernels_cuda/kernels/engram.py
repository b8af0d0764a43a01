"""Engram: rows of n-grams from token ids, rows of tables where they lie, and the gate into the streams, a launch each.

Tables in pinned host memory are read by the device itself, row by row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.rounding import round_bfloat16
from deepinfer_kernels_cuda.kernels.variants import Variant

MOST_COLUMNS, MOST_CHANNELS = 64, 8192


@triton.jit
def _rows(
    token_ids,
    history,
    images,
    history_images,
    ids,
    multipliers,
    primes,
    offsets,
    out,
    columns,
    heads,
    width,
    pad,
    GRAMS: tl.constexpr,
    IMAGES: tl.constexpr,
    HISTORY_IMAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One token: hashes of its GRAMS - 1 n-grams, each modulo the primes of its heads."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    kept = column < columns
    result = tl.zeros((COLUMNS,), tl.int64)
    hashed = tl.zeros((), tl.int64)
    cut = token < 0
    for place in tl.static_range(GRAMS):
        if place == 0:
            known = tl.load(token_ids + token)
            if IMAGES:
                cut = cut | tl.load(images + token)
        else:
            known = tl.load(history + token * width + place - 1)
            if HISTORY_IMAGES:
                cut = cut | tl.load(history_images + token * width + place - 1)
        cut = cut | (known < 0)
        gram = tl.where(cut, pad, tl.load(ids + tl.maximum(known, 0)))
        hashed = hashed ^ (gram * tl.load(multipliers + place))
        if place > 0:
            result = tl.where(column // heads == place - 1, hashed, result)
    prime = tl.load(primes + column, mask=kept, other=1)
    rest = result % prime
    rest = tl.where(rest < 0, rest + prime, rest)
    tl.store(out + token * columns + column, rest + tl.load(offsets + column, mask=kept, other=0), mask=kept)


@triton.jit
def _lookup(rows, data, scales, out, columns, width, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """One row of a table, of one token: E4M3 with a UE8M0 scale for 32 channels, or bfloat16."""
    place = tl.program_id(0).to(tl.int64) * columns + tl.program_id(1)
    row = tl.load(rows + place)
    channel = tl.arange(0, BLOCK)
    kept = channel < width
    if SCALED:
        code = tl.load(data + row * width + channel, mask=kept, other=0).to(tl.int32)
        byte = tl.load(scales + row * (width // 32) + channel // 32, mask=kept, other=127).to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        scale = tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)
        broken = ((code & 0x7F) == 0x7F) | (byte == 255)
        value = tl.where(broken, float("nan"), round_bfloat16(value * scale))
    else:
        value = tl.load(data + row * width + channel, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + place * width + channel, value.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _gate(
    streams, memory, q_weight, k_weight, images, out, width, eps, factor, IMAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """One stream of one token: the gate from stream and key, then stream + gate * value."""
    token, stream, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    channel = tl.arange(0, BLOCK)
    kept = channel < width
    own = (token * count + stream) * width + channel
    keys = memory + token * (count + 1) * width + channel
    x = tl.load(streams + own, mask=kept, other=0.0).to(tl.float32)
    key = tl.load(keys + stream * width, mask=kept, other=0.0).to(tl.float32)
    weight = tl.load(q_weight + stream * width + channel, mask=kept, other=0.0)
    weight *= tl.load(k_weight + stream * width + channel, mask=kept, other=0.0)
    scale = 1.0 / (tl.sqrt_rn(tl.sum(x * x, 0) / width + eps) * tl.sqrt_rn(tl.sum(key * key, 0) / width + eps))
    dot = tl.sum(x * key * weight, 0) * scale * factor
    root = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
    root = tl.where(dot > 0.0, root, tl.where(dot < 0.0, -root, 0.0))
    gate = 1.0 / (1.0 + tl.exp(-root))
    if IMAGES:
        gate = tl.where(tl.load(images + token), 0.0, gate)
    value = tl.load(keys + count * width, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + own, round_bfloat16(x + gate * value).to(out.dtype.element_ty), mask=kept)


@dataclass(frozen=True)
class Grams:
    """The tokens of a step: ids [T] and history [T, n] int64, and which are images, bool of the same shapes or None."""

    token_ids: Tensor
    history: Tensor
    images: Tensor | None
    history_images: Tensor | None


@dataclass(frozen=True)
class Hash:
    """The hash of one layer: int64 ids [V], multipliers [n], primes and offsets [columns], and the pad's id."""

    ids: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: int


def _rows_variant(grams: int, *, images: bool, history_images: bool) -> Variant:
    names = ("ids", "multipliers", "primes", "offsets", "out")
    types = {"token_ids": "*i64", "history": "*i64", "images": "*i1", "history_images": "*i1"}
    return Variant(
        name=f"ngram_rows {grams}{' images' if images else ''}{' history' if history_images else ''}",
        kernel=_rows,
        types={**types, **dict.fromkeys(names, "*i64"), **dict.fromkeys(("columns", "heads", "width", "pad"), "i32")},
        constants={"GRAMS": grams, "IMAGES": images, "HISTORY_IMAGES": history_images, "COLUMNS": MOST_COLUMNS},
        warps=1,
        unaligned=("columns", "heads", "width", "pad"),
    )


def _lookup_variant(width: int, *, scaled: bool) -> Variant:
    return Variant(
        name=f"lookup {width} {'fp8' if scaled else 'bf16'}",
        kernel=_lookup,
        types={"rows": "*i64", "data": "*u8" if scaled else "*bf16", "scales": "*u8", "out": "*bf16"}
        | {"columns": "i32", "width": "i32"},
        constants={"SCALED": scaled, "BLOCK": triton.next_power_of_2(width)},
        warps=1,
        unaligned=("columns",),
    )


def _gate_variant(width: int, *, images: bool) -> Variant:
    block = triton.next_power_of_2(width)
    return Variant(
        name=f"engram_gate {block}{' images' if images else ''}",
        kernel=_gate,
        types={"streams": "*bf16", "memory": "*bf16", "q_weight": "*fp32", "k_weight": "*fp32", "images": "*i1"}
        | {"out": "*bf16", "width": "i32", "eps": "fp32", "factor": "fp32"},
        constants={"IMAGES": images, "BLOCK": block},
        warps=8 if block > 1024 else 4,
    )


VARIANTS = (
    _rows_variant(4, images=False, history_images=False),
    _rows_variant(4, images=True, history_images=True),
    _lookup_variant(256, scaled=True),
    _lookup_variant(256, scaled=False),
    _gate_variant(5120, images=False),
    _gate_variant(5120, images=True),
)
"""At the shapes of the released models; others are compiled when they come."""


def ngram_rows(given: Grams, hashing: Hash) -> Tensor:
    """Return the table rows int64 [T, columns] of each token."""
    columns, grams = hashing.primes.shape[0], hashing.multipliers.shape[0]
    out = torch.empty((given.token_ids.shape[0], columns), dtype=torch.int64, device=given.token_ids.device)
    images, past = given.images, given.history_images
    variant = _rows_variant(grams, images=images is not None, history_images=past is not None)
    flags = (out if images is None else images, out if past is None else past)
    tables = (hashing.ids, hashing.multipliers, hashing.primes, hashing.offsets)
    sizes = (columns, columns // (grams - 1), given.history.shape[1], hashing.pad)
    variant.launch((out.shape[0],), given.token_ids, given.history, *flags, *tables, out, *sizes)
    return out


def lookup(rows: Tensor, data: Tensor, scales: Tensor | None) -> Tensor:
    """Return the vectors bfloat16 [T, columns * C] of rows int64 [T, columns].

    data is E4M3 as uint8 [N, C] with scales uint8 [N, C / 32], or bfloat16 [N, C]; a NaN scale makes NaN.
    """
    tokens, columns = rows.shape
    width = data.shape[1]
    out = torch.empty((tokens, columns * width), dtype=torch.bfloat16, device=rows.device)
    variant = _lookup_variant(width, scaled=scales is not None)
    variant.launch((tokens, columns), rows, data, data if scales is None else scales, out, columns, width)
    return out


def engram_gate(
    streams: Tensor, memory: Tensor, weights: tuple[Tensor, Tensor], eps: float, images: Tensor | None
) -> Tensor:
    """Return streams [T, S, D] + gate * value, bfloat16; memory [T, (S + 1) D] bfloat16, weights [S, D] float32."""
    tokens, count, width = streams.shape
    out = torch.empty_like(streams)
    variant = _gate_variant(width, images=images is not None)
    flags = out if images is None else images
    variant.launch((tokens, count), streams, memory, *weights, flags, out, width, eps, width**-0.5)
    return out
