"""What is done to one row at a time: RMSNorm and the rotation of queries.

Rotations come as pairs (cos, sin) for each row, as the reference prepares them once a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.rounding import round_bfloat16
from deepinfer_kernels_cuda.kernels.variants import Variant

HEAD_BLOCK = 16


@triton.jit
def rotate(x, turns, HEADS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate adjacent pairs of the last DIM of WIDTH channels of x [HEADS, WIDTH] by turns, pointer to [DIM / 2, 2]."""
    pair = tl.arange(0, WIDTH // 2) - (WIDTH - DIM) // 2
    turning = pair >= 0
    cos = tl.load(turns + 2 * pair, mask=turning, other=1.0)[None, :]
    sin = tl.load(turns + 2 * pair + 1, mask=turning, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    a, b = tl.split(tl.reshape(x, (HEADS, WIDTH // 2, 2)))
    # A product with 1 and 0 would lose the sign of a zero.
    first = tl.where(turning[None, :], a * cos - b * sin, a)
    second = tl.where(turning[None, :], a * sin + b * cos, b)
    return tl.reshape(tl.join(first, second), (HEADS, WIDTH))


@triton.jit
def _rms_norm(x, weight, out, stride, width, eps, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    kept = column < width
    value = tl.load(x + row * stride + column, mask=kept, other=0.0).to(tl.float32)
    value *= 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / width + eps)
    if WEIGHTED:
        value *= tl.load(weight + column, mask=kept, other=0.0)
    tl.store(out + row * width + column, round_bfloat16(value).to(out.dtype.element_ty), mask=kept)


@triton.jit
def _rotate_queries(
    q, turns, out, heads, eps, WIDTH: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = (row * heads + head)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    kept = (head < heads)[:, None]
    value = tl.load(q + at, mask=kept, other=0.0).to(tl.float32)
    if NORM:
        value = round_bfloat16(value * (1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / WIDTH + eps))[:, None])
    value = round_bfloat16(rotate(value, turns + row * DIM, HEADS, WIDTH, DIM, False))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=kept)


def _norm_variant(width: int, *, weighted: bool) -> Variant:
    return Variant(
        name=f"rms_norm {triton.next_power_of_2(width)} {'weighted' if weighted else 'plain'}",
        kernel=_rms_norm,
        types={"x": "*bf16", "weight": "*fp32", "out": "*bf16", "stride": "i32", "width": "i32", "eps": "fp32"},
        constants={"WEIGHTED": weighted, "BLOCK": triton.next_power_of_2(width)},
        warps=4 if width > 512 else 1,
    )


def _query_variant(width: int, dim: int, *, norm: bool) -> Variant:
    return Variant(
        name=f"rotate_queries {width} {dim} {'norm' if norm else 'plain'}",
        kernel=_rotate_queries,
        types={"q": "*bf16", "turns": "*fp32", "out": "*bf16", "heads": "i32", "eps": "fp32"},
        constants={"WIDTH": width, "DIM": dim, "HEADS": HEAD_BLOCK, "NORM": norm},
        unaligned=("heads",),
    )


VARIANTS = (
    *(_norm_variant(width, weighted=True) for width in (512, 1280, 4096, 5120)),
    _norm_variant(512, weighted=False),
    _query_variant(512, 64, norm=False),
    _query_variant(512, 64, norm=True),
)
"""At the shapes of the released models; others are compiled when they come."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the norm of x [N, D] (bfloat16, rows any distance apart), bfloat16; weight [D] float32."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    given = out if weight is None else weight
    _norm_variant(width, weighted=weight is not None).launch((rows,), x, given, out, x.stride(0), width, eps)
    return out


def rotate_queries(q: Tensor, turns: Tensor, norm_eps: float | None) -> Tensor:
    """Return q [T, H, D] (bfloat16) rotated by turns float32 [T, dim / 2, 2]; with an eps each head is normed first."""
    out = torch.empty_like(q)
    tokens, heads, width = q.shape
    variant = _query_variant(width, 2 * turns.shape[1], norm=norm_eps is not None)
    variant.launch((tokens, -(-heads // HEAD_BLOCK)), q, turns, out, heads, norm_eps or 0.0)
    return out
