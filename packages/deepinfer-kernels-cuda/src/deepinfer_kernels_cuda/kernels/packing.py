"""How FP4 and FP8 weights lie in device memory: the checkpoint's numbers, reordered for streaming and unpacking.

The kernels that read them are `products.py`'s and `experts.py`'s; `unpack_fp4` and `unpack_fp8` are the inverse.

A weight [out, in] is cut into chunks of 64 rows and steps of 128 columns.  A chunk's steps follow one another, so that
a program reads memory from front to back.  Within a step a 16-bit word holds four E2M1 numbers (columns j, 32 + j,
64 + j, 96 + j) or two E4M3 numbers (columns j, 32 + j of half a step): unpacking a tile of words then gives whole tiles
of 32 columns, each with one scale a row, in the layout that matrix units read words in.

The bits of a word are placed such that a shift and a mask leave a bfloat16 that is 2^-126 (E2M1) or 2^-120 (E4M3) times
the number; the product with the scale, a power of two, takes that back and is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.number_formats import unpack_nibbles
from deepinfer.accelerator.parameters import StoredWeight
from deepinfer_kernels_cuda.kernels.variants import IN_PYTHON

CHUNK, STEP, PART = 64, 128, 32
"""Rows of a chunk, columns of a step, columns that share a scale."""
FP4_SHIFT, FP8_SHIFT = 126, 120
"""Powers of two that unpacking leaves out."""
LARGEST_FACTOR = 254


@dataclass(frozen=True)
class PackedWeight:
    """Matrices [count, out, in] in the order that kernels read.

    words    int16 [count, chunks, steps, 1 (FP4) or 2 (FP8), 64, 32]
    factors  uint8 [count, chunks, steps, 64, 4]: exponent of the bfloat16 that multiplies each part of 32 columns
    rows, columns  of one matrix, without the padding to whole chunks and steps
    """

    words: Tensor
    factors: Tensor
    rows: int
    columns: int
    fp4: bool

    @property
    def chunks(self) -> int:
        """Chunks of one matrix."""
        return self.words.shape[1]

    @property
    def steps(self) -> int:
        """Steps of 128 columns."""
        return self.words.shape[2]


def new_weight(count: int, rows: int, columns: int, device: torch.device, *, fp4: bool) -> PackedWeight:
    """Return zeroed memory for `count` matrices of `rows` (a whole number of chunks) and `columns`."""
    chunks, steps = rows // CHUNK, -(-columns // STEP)
    words = torch.zeros((count, chunks, steps, 1 if fp4 else 2, CHUNK, PART), dtype=torch.int16, device=device)
    factors = torch.zeros((count, chunks, steps, CHUNK, 4), dtype=torch.uint8, device=device)
    return PackedWeight(words, factors, rows, columns, fp4)


def fill_weight(packed: PackedWeight, index: int, first: int, weights: Sequence[StoredWeight]) -> bool:
    """Write `weights`, one below the other and padded to whole chunks, from row `first` of matrix `index` on.

    Returns False, and leaves the memory unusable, when a scale is too large for the kernels (above 2 for FP4 and 2^7
    for FP8: no number of the released checkpoints comes near).
    """
    device = packed.words.device
    codes = torch.cat([_codes(weight, device) for weight in weights])
    exponents = torch.cat([_exponents(weight, device) for weight in weights])
    pad, steps = -codes.shape[0] % CHUNK, packed.steps
    chunk = slice(first // CHUNK, (first + codes.shape[0] + pad) // CHUNK)
    factors = torch.nn.functional.pad(exponents, (0, steps * 4 - exponents.shape[1], 0, pad))
    packed.factors[index, chunk] = factors.unflatten(0, (-1, CHUNK)).unflatten(2, (steps, 4)).transpose(1, 2)
    codes = torch.nn.functional.pad(codes, (0, steps * STEP - codes.shape[1], 0, pad)).to(torch.int32)
    words = fp4_words(codes) if packed.fp4 else fp8_words(codes)
    packed.words[index, chunk] = words.unflatten(0, (-1, CHUNK)).permute(0, 2, 3, 1, 4)
    return bool((exponents <= LARGEST_FACTOR).all())


def _codes(weight: StoredWeight, device: torch.device) -> Tensor:
    """Uint8 codes [out, in]."""
    data = weight.data.to(device)
    return unpack_nibbles(data) if weight.is_fp4 else data.view(torch.uint8)


def _exponents(weight: StoredWeight, device: torch.device) -> Tensor:
    """Int32 exponents [out, in / 32] of what multiplies unpacked numbers."""
    assert weight.scale is not None
    scale = weight.scale.view(torch.uint8).to(device)
    if weight.is_fp4:
        return scale.to(torch.int32) + FP4_SHIFT
    out, parts = weight.data.shape[0], -(-weight.data.shape[1] // PART)
    full = scale.repeat_interleave(weight.block, 0)[:out].repeat_interleave(weight.block // PART, 1)[:, :parts]
    return full.to(torch.int32) + FP8_SHIFT


def fp4_words(codes: Tensor) -> Tensor:
    """Int16 words [N, steps, 1, 32] of E2M1 codes int32 [N, steps * 128].

    Bits of the four numbers, as sign, exponent, mantissa: 15 8 7 6, 12 5 4 3, 9 2 1 0, 14 11 10 13.
    """
    a, b, c, d = codes.unflatten(1, (-1, 4, PART)).unbind(2)
    word = _spread(a) | (_spread(b) >> 3) | (_spread(c) >> 6)
    word |= ((d & 8) << 11) | ((d & 6) << 9) | ((d & 1) << 13)
    return _as_int16(word).unsqueeze(2)


def fp8_words(codes: Tensor) -> Tensor:
    """Int16 words [N, steps, 2, 32] of E4M3 codes int32 [N, steps * 128]: the first of two in the high byte."""
    high, low = codes.unflatten(1, (-1, 2, 2, PART)).unbind(3)
    return _as_int16((high << 8) | low)


def _spread(code: Tensor) -> Tensor:
    return ((code & 8) << 12) | ((code & 7) << 6)


def _as_int16(word: Tensor) -> Tensor:
    return torch.where(word >= 1 << 15, word - (1 << 16), word).to(torch.int16)


_FP4_ASM = tl.constexpr("""
{
.reg .b32 t;
and.b32 $0, $4, 0x81C081C0;
shl.b32 t, $4, 3;
and.b32 $1, t, 0x81C081C0;
shl.b32 t, $4, 6;
and.b32 $2, t, 0x81C081C0;
shl.b32 t, $4, 1;
and.b32 $3, t, 0x80008000;
shr.b32 t, $4, 3;
lop3.b32 $3, t, 0x01800180, $3, 0xEA;
shr.b32 t, $4, 7;
lop3.b32 $3, t, 0x00400040, $3, 0xEA;
mov.b32 t, 0x80008000;
fma.rn.bf16x2 $0, $0, $5, t;
fma.rn.bf16x2 $1, $1, $6, t;
fma.rn.bf16x2 $2, $2, $7, t;
fma.rn.bf16x2 $3, $3, $8, t;
}
""")
_FP8_ASM = tl.constexpr("""
{
.reg .b32 t;
shr.b32 t, $2, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 $0, $2, 0x80008000, t, 0xEA;
shl.b32 t, $2, 4;
and.b32 t, t, 0x07F007F0;
shl.b32 $1, $2, 8;
lop3.b32 $1, $1, 0x80008000, t, 0xEA;
mov.b32 t, 0x80008000;
fma.rn.bf16x2 $0, $0, $3, t;
fma.rn.bf16x2 $1, $1, $4, t;
}
""")


@triton.jit
def _factor(factors, place: tl.constexpr):
    """Bits of a bfloat16 power of two, int16 [rows, 1], from byte `place` of each int32 of `factors` [rows]."""
    return (((factors >> (8 * place)) & 0xFF) << 7).to(tl.int16)[:, None]


@triton.jit
def _number(bits, factor):
    """Float32 value of bfloat16 bits (int32) times that of `factor` (int16 bits)."""
    value = ((bits & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    return value * (factor.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def unpack_fp4(words, factors):
    """Four tiles [rows, 32] of numbers from int16 words [rows, 32] and the int32 factors [rows] of a step."""
    f0, f1, f2, f3 = _factor(factors, 0), _factor(factors, 1), _factor(factors, 2), _factor(factors, 3)
    if IN_PYTHON:
        w = words.to(tl.int32)
        last = ((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040)
        a, b = _number(w & 0x81C0, f0), _number((w << 3) & 0x81C0, f1)
        c, d = _number((w << 6) & 0x81C0, f2), _number(last, f3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _FP4_ASM,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, f0, f1, f2, f3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def unpack_fp8(words, factors, half: tl.constexpr):
    """Two tiles [rows, 32] of numbers from int16 words [rows, 32] of half a step and the int32 factors of the step."""
    f0, f1 = _factor(factors, 2 * half), _factor(factors, 2 * half + 1)
    if IN_PYTHON:
        w = words.to(tl.int32)
        a = _number((w & 0x8000) | ((w >> 4) & 0x07F0), f0)
        b = _number(((w << 8) & 0x8000) | ((w << 4) & 0x07F0), f1)
    else:
        a, b = tl.inline_asm_elementwise(
            _FP8_ASM,
            "=&r,=&r,r,r,r",
            [words, f0, f1],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b
