"""Rows of logits become tokens: grammar masks, the best token, and the draw by counter-based Gumbel noise.

A row is cut into chunks, one program each; a second launch takes the best of the chunks, the lowest index among equals.
Noise is that of `deepinfer.accelerator.ops.sampling`, number for number: made in registers, never written to memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.variants import Variant

CHUNK, BLOCK = 4096, 1024
MOST_CHUNKS = 1024
"""Chunks that the last launch holds at once."""

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
FACTOR_A = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
FACTOR_B = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _mask_tokens(logits, words, out, stride, word_stride, vocabulary, BLOCK: tl.constexpr):
    """One block of one row: -inf where its bit is 0."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = token < vocabulary
    word = tl.load(words + row * word_stride + (token >> 5), mask=kept, other=0)
    value = tl.load(logits + row * stride + token, mask=kept, other=0.0)
    value = tl.where(((word >> (token & 31)) & 1) != 0, value, float("-inf"))
    tl.store(out + row * vocabulary + token, value, mask=kept)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on int64, whose own shift copies the sign."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FACTOR_A
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * FACTOR_B
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(key, token):
    """Standard Gumbel noise, float64, of token numbers under one row's key."""
    bits = (_mix(key + (token + 1).to(tl.int64) * GOLDEN) >> 12) & 0xFFFFFFFFFFFFF
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best_of_chunk(
    logits,
    temperatures,
    seeds,
    positions,
    values,
    tokens,
    stride,
    vocabulary,
    DRAWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one chunk of one row, by its logit or (DRAWS) by the scaled logit plus noise."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    best = tl.full((BLOCK,), float("-inf"), tl.float64)
    where = first + tl.arange(0, BLOCK)
    for start in range(0, CHUNK, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        kept = token < vocabulary
        logit = tl.load(logits + row * stride + token, mask=kept, other=float("-inf"))
        value = logit.to(tl.float64)
        if DRAWS:
            temperature = tl.load(temperatures + row)
            if temperature >= 1e-5:
                divisor = tl.broadcast_to(temperature.to(tl.float32), (BLOCK,))
                key = _mix(_mix(_mix(tl.load(seeds + row) + GOLDEN)) + tl.load(positions + row))
                value = tl.div_rn(logit, divisor).to(tl.float64) + _gumbel(key, token)
        better = kept & (value > best)
        best = tl.where(better, value, best)
        where = tl.where(better, token, where)
    top = tl.max(best, 0)
    lowest = tl.min(tl.where(best == top, where, 0x7FFFFFFF), 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + place, top)
    tl.store(tokens + place, lowest)


@triton.jit
def _best_of_row(values, tokens, out, chunks, vocabulary, CHUNKS: tl.constexpr):
    """The best token of one row, from those of its chunks; a number of the vocabulary whatever they hold."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    value = tl.load(values + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    token = tl.load(tokens + row * chunks + chunk, mask=chunk < chunks, other=0x7FFFFFFF)
    best = tl.min(tl.where(value == tl.max(value, 0), token, 0x7FFFFFFF), 0)
    tl.store(out + row, tl.minimum(best, vocabulary - 1).to(tl.int64))


MASK = Variant(
    name="mask_tokens",
    kernel=_mask_tokens,
    types={"logits": "*fp32", "words": "*i32", "out": "*fp32", "stride": "i32", "word_stride": "i32"}
    | {"vocabulary": "i32"},
    constants={"BLOCK": CHUNK},
    warps=8,
    unaligned=("stride", "word_stride", "vocabulary"),
)
CHUNKS = {
    draws: Variant(
        name="draw_chunk" if draws else "best_of_chunk",
        kernel=_best_of_chunk,
        types={"logits": "*fp32", "temperatures": "*fp64", "seeds": "*i64", "positions": "*i64"}
        | {"values": "*fp64", "tokens": "*i32", "stride": "i32", "vocabulary": "i32"},
        constants={"DRAWS": draws, "CHUNK": CHUNK, "BLOCK": BLOCK},
        unaligned=("stride", "vocabulary"),
    )
    for draws in (False, True)
}


def _row_variant(chunks: int) -> Variant:
    width = max(32, triton.next_power_of_2(chunks))
    return Variant(
        name=f"best_of_row {width}",
        kernel=_best_of_row,
        types={"values": "*fp64", "tokens": "*i32", "out": "*i64", "chunks": "i32", "vocabulary": "i32"},
        constants={"CHUNKS": width},
        warps=1,
        unaligned=("chunks", "vocabulary"),
    )


VARIANTS = (MASK, *CHUNKS.values(), _row_variant(32))


def mask_tokens(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Return logits [L, V] float32 with -inf where `bitmask` int32 [L, ceil(V / 32)] has a 0."""
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=logits.dtype, device=logits.device)
    grid = (rows, -(-vocabulary // CHUNK))
    MASK.launch(grid, logits, bitmask, out, logits.stride(0), bitmask.stride(0), vocabulary)
    return out


def best_tokens(logits: Tensor, draw: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """Return the best token int64 [L] of each row of logits [L, V] float32, lowest index among equals.

    draw: None, or temperatures float64, seeds and positions int64 [L]: rows whose temperature is not that of greedy
    decoding are divided by it and get noise.
    """
    rows, vocabulary = logits.shape
    chunks = -(-vocabulary // CHUNK)
    values = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    given = (values, out, out) if draw is None else tuple(column.contiguous() for column in draw)
    sizes = (logits.stride(0), vocabulary)
    CHUNKS[draw is not None].launch((rows, chunks), logits, *given, values, tokens, *sizes)
    _row_variant(chunks).launch((rows,), values, tokens, out, chunks, vocabulary)
    return out
