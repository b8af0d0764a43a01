"""Hyper-connections: the mixing with its Sinkhorn iterations, the normed input that is read, and what is written back.

Two launches before a sub-layer and one after it.  The mixing's logits are sums over all streams of a row; they are cut
into at most 32 parts, added in order.  float32 parameters are multiplied as three bfloat16 numbers that add
up to them, which is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.rounding import round_bfloat16
from deepinfer_kernels_cuda.kernels.variants import IN_PYTHON, Variant

STREAMS = 4
LOGITS = 2 * STREAMS + STREAMS * STREAMS
MOST_PARTS = 32
COLUMN_BLOCK = 128
PART_WIDTH = 32
"""Numbers that a part keeps of a row: the logits and, last, the sum of squares."""
OUT_BLOCK = 1024


@triton.jit
def exact_dot(x, f, acc):
    """Acc + x f^T: x bfloat16 [n, k], f float32 [m, k] as three bfloat16 numbers that add up to it."""
    if IN_PYTHON:
        acc = tl.dot(x.to(tl.float32), tl.trans(f), acc)
    else:
        high = f.to(tl.bfloat16)
        rest = f - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(low), acc)
        acc = tl.dot(x, tl.trans(middle), acc)
        acc = tl.dot(x, tl.trans(high), acc)
    return acc


@triton.jit
def _logits(streams, fn, parts, tokens, width, columns, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Parts [parts, tokens, 32] of fn [24, width] times rows of streams [tokens, width], and of the sums of squares."""
    part = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    known = tl.minimum(token, tokens - 1).to(tl.int64)
    logit = tl.arange(0, 32)
    acc = tl.zeros((TOKENS, 32), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = part * columns + first + tl.arange(0, BLOCK)
        inside = column < width
        s = tl.load(streams + known[:, None] * width + column[None, :], mask=inside[None, :], other=0.0)
        kept = (logit < 24)[:, None] & inside[None, :]
        f = tl.load(fn + logit[:, None] * width + column[None, :], mask=kept, other=0.0)
        value = s.to(tl.float32)
        squares += tl.sum(value * value, 1)
        acc = exact_dot(s, f, acc)
    out = tl.where(logit[None, :] == 31, squares[:, None], acc)
    at = (part * tokens + token).to(tl.int64)[:, None] * 32 + logit[None, :]
    tl.store(parts + at, out, mask=(token < tokens)[:, None])


@triton.jit
def _sum_of(parts, count, stride, place, SHAPE: tl.constexpr):
    """Sum over a row's parts of the numbers at `place` [4, 4] or [4]; SHAPE is [32, 4, 4] or [32, 4]."""
    part = tl.reshape(tl.arange(0, 32), (32, 1, 1)) if len(SHAPE) == 3 else tl.reshape(tl.arange(0, 32), (32, 1))
    at = tl.broadcast_to(part * stride + place[None], SHAPE)
    return tl.sum(tl.load(parts + at, mask=part < count, other=0.0), 0)


@triton.jit
def _pick(vector, place: tl.constexpr):
    """Element `place` of a vector of 4."""
    return tl.sum(tl.where(tl.arange(0, 4) == place, vector, 0.0), 0)


@triton.jit
def _sinkhorn(logits, iterations, eps):
    """Doubly normalise softmax(logits [4, 4]) + eps: columns first, then rows and columns in turn."""
    high = tl.exp(logits - tl.max(logits, 1)[:, None])
    comb = high * (1.0 / tl.sum(high, 1))[:, None] + eps
    comb = comb * (1.0 / (tl.sum(comb, 0) + eps))[None, :]
    for _ in range(iterations - 1):
        comb = comb * (1.0 / (tl.sum(comb, 1) + eps))[:, None]
        comb = comb * (1.0 / (tl.sum(comb, 0) + eps))[None, :]
    return comb


@triton.jit
def _mix_in(
    streams,
    incoming,
    parts,
    base,
    scale,
    norm,
    x,
    pre,
    post,
    comb,
    tokens,
    hidden,
    count,
    iterations,
    eps,
    norm_eps,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its mixing from the parts, and x = rms(sum_k a_k S_k; norm), a = incoming or, with OWN, its own pre."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    kept = column < hidden
    at = streams + token.to(tl.int64) * 4 * hidden + column
    s0, s1 = tl.load(at, mask=kept, other=0.0), tl.load(at + hidden, mask=kept, other=0.0)
    s2, s3 = tl.load(at + 2 * hidden, mask=kept, other=0.0), tl.load(at + 3 * hidden, mask=kept, other=0.0)
    given = incoming + token * 4
    four = tl.arange(0, 4)
    square = four[:, None] * 4 + four[None, :]
    row = parts + token * 32
    part = tl.arange(0, 32)
    squares = tl.load(row + part * tokens * 32 + 31, mask=part < count, other=0.0)
    share = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / (4 * hidden) + norm_eps)
    gate = _sum_of(row, count, tokens * 32, four, (32, 4)) * share * tl.load(scale) + tl.load(base + four)
    gate = 1.0 / (1.0 + tl.exp(-gate)) + eps
    back = _sum_of(row, count, tokens * 32, 4 + four, (32, 4)) * share * tl.load(scale + 1) + tl.load(base + 4 + four)
    logits = _sum_of(row, count, tokens * 32, 8 + square, (32, 4, 4)) * share * tl.load(scale + 2)
    tl.store(pre + token * 4 + four, gate)
    tl.store(post + token * 4 + four, 2.0 / (1.0 + tl.exp(-back)))
    tl.store(comb + token * 16 + square, _sinkhorn(logits + tl.load(base + 8 + square), iterations, eps))
    w0, w1, w2, w3 = _pick(gate, 0), _pick(gate, 1), _pick(gate, 2), _pick(gate, 3)
    if not OWN:
        w0, w1, w2, w3 = tl.load(given), tl.load(given + 1), tl.load(given + 2), tl.load(given + 3)
    total = w0 * s0.to(tl.float32) + w1 * s1.to(tl.float32) + w2 * s2.to(tl.float32) + w3 * s3.to(tl.float32)
    value = round_bfloat16(total)
    scaled = value * (1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / hidden + norm_eps))
    out = round_bfloat16(scaled * tl.load(norm + column, mask=kept, other=0.0))
    tl.store(x + token.to(tl.int64) * hidden + column, out.to(x.dtype.element_ty), mask=kept)


@triton.jit
def _mix_out(streams, y, post, comb, out, hidden, BLOCK: tl.constexpr):
    """S'_k = post_k y + sum_j comb[j, k] S_j for one row and BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < hidden
    row = streams + token * 4 * hidden + column
    s0 = tl.load(row, mask=kept, other=0.0).to(tl.float32)
    s1 = tl.load(row + hidden, mask=kept, other=0.0).to(tl.float32)
    s2 = tl.load(row + 2 * hidden, mask=kept, other=0.0).to(tl.float32)
    s3 = tl.load(row + 3 * hidden, mask=kept, other=0.0).to(tl.float32)
    added = tl.load(y + token * hidden + column, mask=kept, other=0.0).to(tl.float32)
    c = comb + token * 16
    for k in tl.static_range(4):
        value = tl.load(c + k) * s0 + tl.load(c + 4 + k) * s1 + tl.load(c + 8 + k) * s2 + tl.load(c + 12 + k) * s3
        value = round_bfloat16(value + tl.load(post + token * 4 + k) * added)
        tl.store(out + (token * 4 + k) * hidden + column, value.to(out.dtype.element_ty), mask=kept)


TILES = (16, 64)
BLOCKS = (64, 1024, 2048, 4096, 8192)
LOGIT_PARTS = {
    tokens: Variant(
        name=f"mix_logits {tokens} tokens",
        kernel=_logits,
        types={"streams": "*bf16", "fn": "*fp32", "parts": "*fp32", "tokens": "i32", "width": "i32"}
        | {"columns": "i32"},
        constants={"TOKENS": tokens, "BLOCK": COLUMN_BLOCK},
        warps=4,
        stages=3,
        unaligned=("tokens",),
    )
    for tokens in TILES
}
_MIX_TYPES = {
    "streams": "*bf16",
    **dict.fromkeys(("incoming", "parts", "base", "scale", "norm"), "*fp32"),
    "x": "*bf16",
    **dict.fromkeys(("pre", "post", "comb"), "*fp32"),
    **dict.fromkeys(("tokens", "hidden", "count", "iterations"), "i32"),
    **dict.fromkeys(("eps", "norm_eps"), "fp32"),
}
MIX_IN = {
    (own, block): Variant(
        name=f"mix_in {'own' if own else 'incoming'} {block} columns",
        kernel=_mix_in,
        types=_MIX_TYPES,
        constants={"OWN": own, "BLOCK": block},
        warps=8 if block > 2048 else 4,
        unaligned=("tokens", "count", "iterations"),
    )
    for own in (False, True)
    for block in BLOCKS
}
MIX_OUT = Variant(
    name="mix_out",
    kernel=_mix_out,
    types={"streams": "*bf16", "y": "*bf16", "post": "*fp32", "comb": "*fp32", "out": "*bf16", "hidden": "i32"},
    constants={"BLOCK": OUT_BLOCK},
)
VARIANTS = (*LOGIT_PARTS.values(), *MIX_IN.values(), MIX_OUT)


def logit_parts(streams: Tensor, fn: Tensor, *, steady: bool = False) -> Tensor:
    """Return float32 [parts, T, 32] of streams [T, 4, D] (bfloat16) and fn [24, 4 D]: see the kernel.

    steady: one tile, however many rows there are.
    """
    tokens, width = streams.shape[0], fn.shape[1]
    columns = -(-width // (MOST_PARTS * COLUMN_BLOCK)) * COLUMN_BLOCK
    count = -(-width // columns)
    parts = torch.empty((count, tokens, PART_WIDTH), dtype=torch.float32, device=streams.device)
    tile = TILES[0] if steady or tokens <= 512 else TILES[1]
    LOGIT_PARTS[tile].launch((-(-tokens // tile), count), streams, fn, parts, tokens, width, columns)
    return parts


def mix_in(
    streams: Tensor,
    incoming: Tensor | None,
    parts: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor],
    settings: tuple[int, float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x [T, D], pre [T, 4], post [T, 4] and comb [T, 4, 4] from streams and the parts of their logits.

    parameters: base [24], scale [3] and norm [D], float32.  settings: iterations, eps, norm_eps.
    """
    tokens, _, hidden = streams.shape
    x = torch.empty((tokens, hidden), dtype=streams.dtype, device=streams.device)
    pre, post = (torch.empty((tokens, STREAMS), dtype=torch.float32, device=streams.device) for _ in range(2))
    comb = torch.empty((tokens, STREAMS, STREAMS), dtype=torch.float32, device=streams.device)
    variant = MIX_IN[incoming is None, next(block for block in BLOCKS if hidden <= block)]
    given = pre if incoming is None else incoming
    iterations, eps, norm_eps = settings
    operands = (streams, given, parts, *parameters, x, pre, post, comb)
    variant.launch((tokens,), *operands, tokens, hidden, parts.shape[0], iterations, eps, norm_eps)
    return x, pre, post, comb


def mix_out(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams [T, 4, D] after y [T, D] is written back."""
    out = torch.empty_like(streams)
    grid = (streams.shape[0], -(-streams.shape[2] // OUT_BLOCK))
    MIX_OUT.launch(grid, streams, y, post, comb, out, streams.shape[2])
    return out
