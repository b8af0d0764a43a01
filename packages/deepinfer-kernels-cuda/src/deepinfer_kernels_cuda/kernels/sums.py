"""Sums that end an op with one rounding: routed and shared experts, and the streams collapsed into one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.rounding import round_bfloat16
from deepinfer_kernels_cuda.kernels.variants import Variant

BLOCK_CHANNELS = 1024


@triton.jit
def _combine(a, b, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = at < size
    value = tl.load(a + at, mask=kept, other=0.0) + tl.load(b + at, mask=kept, other=0.0)
    tl.store(out + at, round_bfloat16(value).to(out.dtype.element_ty), mask=kept)


@triton.jit
def _collapse(streams, weights, out, width, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK channels of one row: the sum over streams, in their order, of weight times stream."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = channel < width
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        value = tl.load(streams + (row * STREAMS + stream) * width + channel, mask=kept, other=0.0).to(tl.float32)
        total += value * tl.load(weights + row * STREAMS + stream)
    tl.store(out + row * width + channel, round_bfloat16(total).to(out.dtype.element_ty), mask=kept)


def _collapse_variant(streams: int) -> Variant:
    return Variant(
        name=f"collapse {streams}",
        kernel=_collapse,
        types={"streams": "*bf16", "weights": "*fp32", "out": "*bf16", "width": "i32"},
        constants={"STREAMS": streams, "BLOCK": BLOCK_CHANNELS},
    )


COMBINE = Variant(
    name="combine",
    kernel=_combine,
    types={"a": "*fp32", "b": "*fp32", "out": "*bf16", "size": "i32"},
    constants={"BLOCK": BLOCK_CHANNELS},
    unaligned=("size",),
)
VARIANTS = (COMBINE, _collapse_variant(4))


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b (float32, contiguous, one shape), rounded to bfloat16."""
    out = torch.empty(a.shape, dtype=torch.bfloat16, device=a.device)
    COMBINE.launch((-(-a.numel() // BLOCK_CHANNELS),), a, b, out, a.numel())
    return out


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Return bfloat16 [T, D]: streams [T, S, D] (bfloat16) summed with weights [T, S] (float32)."""
    tokens, count, width = streams.shape
    out = torch.empty((tokens, width), dtype=torch.bfloat16, device=streams.device)
    grid = (tokens, -(-width // BLOCK_CHANNELS))
    _collapse_variant(count).launch(grid, streams, weights, out, width)
    return out
