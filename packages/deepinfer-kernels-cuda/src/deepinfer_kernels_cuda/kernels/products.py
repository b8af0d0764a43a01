"""Products with FP8 and FP4 weights: y = x W^T, the weights unpacked to bfloat16 in registers, summed in float32.

Rows of the weight stand where a matrix unit has its many rows, tokens where it has its few columns: a step of few
tokens then wastes little.  Few tokens leave too few programs to read the weight at full speed, so the sum over columns
is cut into parts, which a second kernel adds in order.  Many tokens are cuBLAS's work, on the weight unpacked to
bfloat16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.packing import CHUNK, STEP, PackedWeight, unpack_fp4, unpack_fp8
from deepinfer_kernels_cuda.kernels.rounding import GROUPS, fp8_round, round_bfloat16
from deepinfer_kernels_cuda.kernels.variants import HOPPER, OPERAND, Variant, largest_tile

ROW_TILE = 128
"""Matrices are padded to so many rows, the most that one program multiplies."""
FEW_TOKENS = 64
"""Up to here the number of parts depends on the weight's shape alone."""
PROGRAMS, LARGE_PROGRAMS = 6 * 132, 2 * 132
"""Programs that keep an H200 busy: six of few tokens for each multiprocessor, two of the largest tiles."""
MOST_PARTS = 16
MANY_TOKENS = 1024
"""From here on unpacking the weight costs little beside its product, which is cuBLAS's then."""
SUM_BLOCK = 1024


@triton.jit
def _add(acc, w, x):
    """Acc [rows, tokens] + w [rows, 32] x^T, x bfloat16 [tokens, 32]."""
    return tl.dot(w.to(OPERAND), tl.trans(x.to(OPERAND)), acc)


@triton.jit
def multiply_step(acc, words, factors, x, FP4: tl.constexpr):
    """Add one step of 128 columns to acc [rows, tokens].

    words, factors, x are pointers of [rows, 32] words, [rows] factors (four bytes each) and [tokens, 32] inputs.
    """
    f = tl.load(factors)
    if FP4:
        w0, w1, w2, w3 = unpack_fp4(tl.load(words), f)
    else:
        w0, w1 = unpack_fp8(tl.load(words), f, 0)
        w2, w3 = unpack_fp8(tl.load(words + 2048), f, 1)
    acc = _add(acc, w0, tl.load(x))
    acc = _add(acc, w1, tl.load(x + 32))
    acc = _add(acc, w2, tl.load(x + 64))
    return _add(acc, w3, tl.load(x + 96))


@triton.jit
def weight_pointers(words, factors, chunk, steps, ROWS: tl.constexpr, FP4: tl.constexpr):
    """Pointers of the first step of ROWS rows from chunk `chunk` on: words [ROWS, 32] and factors [ROWS]."""
    tile: tl.constexpr = 2048 if FP4 else 4096
    row = tl.arange(0, ROWS)
    at = (chunk + row // 64).to(tl.int64) * steps
    w = words + (at * tile + row % 64 * 32)[:, None] + tl.arange(0, 32)[None, :]
    return w, factors + at * 64 + row % 64


@triton.jit
def _linear(
    x,
    words,
    factors,
    out,
    tokens,
    x_stride,
    steps,
    part_steps,
    group_chunks,
    rows,
    out_stride,
    FP4: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    chunk = tl.program_id(0) * (ROWS // 64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    group = chunk // group_chunks
    first = part * part_steps
    count = tl.minimum(steps - first, part_steps)
    tile: tl.constexpr = 2048 if FP4 else 4096
    w, f = weight_pointers(words, factors, chunk, steps, ROWS, FP4)
    w += first * tile
    f += first * 64
    known = tl.minimum(token, tokens - 1).to(tl.int64)
    inputs = x + (known * x_stride)[:, None] + (group * steps + first) * 128 + tl.arange(0, 32)[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for _ in range(count):
        acc = multiply_step(acc, w, f, inputs, FP4)
        w += tile
        f += 64
        inputs += 128
    row = (chunk - group * group_chunks) * 64 + tl.arange(0, ROWS)
    place = (part * tokens + token).to(tl.int64)[None, :] * out_stride + (group * rows + row)[:, None]
    kept = (row < rows)[:, None] & (token < tokens)[None, :]
    if out.dtype.element_ty == tl.bfloat16:
        acc = round_bfloat16(acc)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _sum_parts(parts, out, size, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for part in range(1, count):
        total += tl.load(parts + part * size.to(tl.int64) + at, mask=at < size, other=0.0)
    if out.dtype.element_ty == tl.bfloat16:
        total = round_bfloat16(total)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def swiglu(gate, up, limit):
    """Silu(min(gate, limit)) * clamp(up, -limit, limit), float32."""
    gate = tl.minimum(gate, limit)
    return gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def _activate(parts, out, tokens, width, count, limit, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the parts [count, tokens, 2 width] of gate and up, activate, round to bfloat16 and FP8 -> [tokens, width]."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < width
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        at = parts + (part * tokens + token).to(tl.int64) * 2 * width + column
        gate += tl.load(at, mask=kept, other=0.0)
        up += tl.load(at + width, mask=kept, other=0.0)
    value = round_bfloat16(swiglu(gate, up, limit))
    if GROUP:
        value = tl.reshape(fp8_round(tl.reshape(value, (1, BLOCK)), GROUP), (BLOCK,))
    tl.store(out + token.to(tl.int64) * width + column, value.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _unpack(words, factors, out, steps, FP4: tl.constexpr):
    """One step of one chunk as bfloat16: out [chunks * 64, steps * 128]."""
    chunk, step = tl.program_id(0), tl.program_id(1)
    tile: tl.constexpr = 2048 if FP4 else 4096
    w, f = weight_pointers(words, factors, chunk, steps, 64, FP4)
    factor = tl.load(f + step * 64)
    if FP4:
        w0, w1, w2, w3 = unpack_fp4(tl.load(w + step * tile), factor)
    else:
        w0, w1 = unpack_fp8(tl.load(w + step * tile), factor, 0)
        w2, w3 = unpack_fp8(tl.load(w + step * tile + 2048), factor, 1)
    row = (chunk * 64 + tl.arange(0, 64)).to(tl.int64)
    at = out + (row * steps * 128)[:, None] + step * 128 + tl.arange(0, 32)[None, :]
    tl.store(at, w0.to(tl.bfloat16))
    tl.store(at + 32, w1.to(tl.bfloat16))
    tl.store(at + 64, w2.to(tl.bfloat16))
    tl.store(at + 96, w3.to(tl.bfloat16))


_SIZES = ("tokens", "x_stride", "steps", "part_steps", "group_chunks", "rows", "out_stride")


def _linear_variant(tokens: int, out: str, *, fp4: bool) -> Variant:
    types = {"x": "*bf16", "words": "*i16", "factors": "*i32", "out": f"*{out}", **dict.fromkeys(_SIZES, "i32")}
    return Variant(
        name=f"linear {'fp4' if fp4 else 'fp8'} {tokens} tokens {out}",
        kernel=_linear,
        types=types,
        constants={"FP4": fp4, "ROWS": ROW_TILE if tokens > FEW_TOKENS else CHUNK, "TOKENS": tokens},
        warps=8 if tokens > FEW_TOKENS else 4,
        stages=3 if tokens <= FEW_TOKENS else 2,
        unaligned=("tokens", "steps", "part_steps", "group_chunks"),
        newest=HOPPER if tokens > FEW_TOKENS else 999,
    )


TOKEN_TILES = (16, 32, 64, 128)
LINEAR = {
    (tokens, out, fp4): _linear_variant(tokens, out, fp4=fp4)
    for tokens in TOKEN_TILES
    for out in ("bf16", "fp32")
    for fp4 in (False, True)
}
"""By tokens of a tile, type of the result and kind of weight."""
SUM_PARTS = {
    out: Variant(
        name=f"sum_parts {out}",
        kernel=_sum_parts,
        types={"parts": "*fp32", "out": f"*{out}", "size": "i32", "count": "i32"},
        constants={"BLOCK": SUM_BLOCK},
        unaligned=("size", "count"),
    )
    for out in ("bf16", "fp32")
}
ACTIVATE = {
    group: Variant(
        name=f"activate group {group}",
        kernel=_activate,
        types={"parts": "*fp32", "out": "*bf16", **dict.fromkeys(("tokens", "width", "count"), "i32"), "limit": "fp32"},
        constants={"GROUP": group, "BLOCK": SUM_BLOCK},
        unaligned=("tokens", "count"),
    )
    for group in GROUPS
}
UNPACK = {
    fp4: Variant(
        name=f"unpack {'fp4' if fp4 else 'fp8'}",
        kernel=_unpack,
        types={"words": "*i16", "factors": "*i32", "out": "*bf16", "steps": "i32"},
        constants={"FP4": fp4},
        unaligned=("steps",),
    )
    for fp4 in (False, True)
}
VARIANTS = (*LINEAR.values(), *SUM_PARTS.values(), *ACTIVATE.values(), *UNPACK.values())


def token_tile(tokens: int, device: torch.device) -> int:
    """Tokens that one program takes when there are `tokens`."""
    return min(largest_tile(device), next((tile for tile in TOKEN_TILES if tokens <= tile), TOKEN_TILES[-1]))


def parts_of(weight: PackedWeight, tokens: int) -> int:
    """Into how many parts the sum over columns is cut, of at least two steps each."""
    programs, most = weight.chunks, PROGRAMS
    if tokens > FEW_TOKENS:
        programs, most = weight.chunks * CHUNK // ROW_TILE * -(-tokens // TOKEN_TILES[-1]), LARGE_PROGRAMS
    parts = max(1, min(most // programs, weight.steps // 2, MOST_PARTS))
    return -(-weight.steps // -(-weight.steps // parts))


def products(x: Tensor, weight: PackedWeight, *, groups: int = 1, steady: bool = False) -> Tensor:
    """Return the parts [parts, T, groups * rows] float32 of x [T, groups * steps * 128] times the weight's matrix.

    steady: many tokens run as few of them do, so that a row's bits do not depend on how many there are.
    """
    if x.shape[0] >= MANY_TOKENS and not steady and x.device.type == "cuda":
        return _by_library(x, weight, torch.float32, groups).unsqueeze(0)
    parts = parts_of(weight, _sized(x, steady=steady))
    out = torch.empty((parts, x.shape[0], groups * weight.rows), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, groups, parts, steady=steady)
    return out


def linear(x: Tensor, weight: PackedWeight, dtype: torch.dtype, *, groups: int = 1, steady: bool = False) -> Tensor:
    """Return x [T, groups * steps * 128] (bfloat16) times each group's rows of the weight -> [T, groups * rows]."""
    if steady and x.shape[0] > MANY_TOKENS:
        return torch.cat([linear(rows, weight, dtype, groups=groups, steady=True) for rows in x.split(MANY_TOKENS)])
    if x.shape[0] >= MANY_TOKENS and not steady and x.device.type == "cuda":
        return _by_library(x, weight, dtype, groups)
    if parts_of(weight, _sized(x, steady=steady)) == 1:
        out = torch.empty((x.shape[0], groups * weight.rows), dtype=dtype, device=x.device)
        _launch(x, weight, out, groups, 1, steady=steady)
        return out
    parts = products(x, weight, groups=groups, steady=steady)
    out = torch.empty(parts.shape[1:], dtype=dtype, device=x.device)
    variant = SUM_PARTS["bf16" if dtype == torch.bfloat16 else "fp32"]
    variant.launch((-(-out.numel() // SUM_BLOCK),), parts, out, out.numel(), parts.shape[0])
    return out


def unpack(weight: PackedWeight) -> Tensor:
    """Return the weight's numbers as bfloat16 [count, chunks * 64, steps * 128], padding included: exact."""
    count = weight.words.shape[0]
    out = torch.empty(
        (count, weight.chunks * CHUNK, weight.steps * STEP), dtype=torch.bfloat16, device=weight.words.device
    )
    grid = (count * weight.chunks, weight.steps)
    UNPACK[weight.fp4].launch(grid, weight.words, weight.factors.view(torch.int32), out, weight.steps)
    return out


def _by_library(x: Tensor, weight: PackedWeight, dtype: torch.dtype, groups: int) -> Tensor:
    dense = unpack(weight)[0]
    if groups == 1:
        dense = dense[: weight.rows]
        return torch.mm(x, dense.t()) if dtype == torch.bfloat16 else torch.mm(x, dense.t(), out_dtype=dtype)
    out = torch.empty((x.shape[0], groups, weight.rows), dtype=torch.bfloat16, device=x.device)
    inputs = x.unflatten(1, (groups, -1)).transpose(0, 1)
    torch.bmm(inputs, dense.unflatten(0, (groups, -1)).transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1).to(dtype)


def activate(parts: Tensor, limit: float, group: int) -> Tensor:
    """Return the input of w2, bfloat16 [T, width], from the parts [parts, T, 2 width] of gate and up."""
    tokens, width = parts.shape[1], parts.shape[2] // 2
    out = torch.empty((tokens, width), dtype=torch.bfloat16, device=parts.device)
    grid = (tokens, -(-width // SUM_BLOCK))
    ACTIVATE[group].launch(grid, parts, out, tokens, width, parts.shape[0], limit)
    return out


def _sized(x: Tensor, *, steady: bool) -> int:
    """How many rows of x count where kernels are chosen and sums are cut."""
    return min(x.shape[0], FEW_TOKENS) if steady else x.shape[0]


def _launch(x: Tensor, weight: PackedWeight, out: Tensor, groups: int, parts: int, *, steady: bool) -> None:
    tokens = x.shape[0]
    kind = "bf16" if out.dtype == torch.bfloat16 else "fp32"
    variant = LINEAR[token_tile(_sized(x, steady=steady), x.device), kind, weight.fp4]
    grid = (
        weight.chunks * CHUNK // variant.constants["ROWS"],
        -(-tokens // variant.constants["TOKENS"]),
        parts,
    )
    factors = weight.factors.view(torch.int32)
    sizes = (tokens, x.stride(0), weight.steps, -(-weight.steps // parts), weight.chunks // groups, weight.rows)
    variant.launch(grid, x, weight.words, factors, out, *sizes, out.shape[-1])
