"""The compressor: completed groups of tokens pooled into latents, and the memory of the tokens of an unfinished group.

A group's tokens are rows of the step or lie in the tail; both are found from the batch on the device.  Tails are
written in a launch of their own, after every group has read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.batch import tail_ring, tail_tokens
from deepinfer_kernels_cuda.kernels.rounding import round_bfloat16
from deepinfer_kernels_cuda.kernels.variants import Variant

CHANNELS = 128
"""Channels of a program."""
HIDDEN = tl.constexpr(-1e38)


@triton.jit
def _pool(
    projected,
    bias,
    tail_values,
    tail_scores,
    rows,
    positions,
    sequences,
    query_starts,
    states,
    out,
    stride,
    width,
    spare,
    RATIO: tl.constexpr,
    SPAN: tl.constexpr,
    RING: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One group and BLOCK of its `width` channels: softmax of the scores over its tokens, oldest first, times values.

    With SPAN = 2 RATIO (overlap) the older half of the tokens gives its first `width` channels, the others the second.
    """
    group = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = channel < width
    row = tl.load(rows + group)
    sequence = tl.load(sequences + row)
    start = tl.load(query_starts + sequence)
    state = tl.load(states + sequence)
    state = tl.where(state < 0, spare, state)
    position = tl.load(positions + row)
    halves: tl.constexpr = SPAN // RATIO
    high = tl.full((BLOCK,), HIDDEN, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK,), tl.float32)
    for place in range(SPAN):
        back = SPAN - 1 - place
        own = channel + (place // RATIO) * width
        at = position - back
        if at >= 0:
            if row - back >= start:
                source = projected + (row - back) * stride + own
                value = tl.load(source, mask=kept, other=0.0)
                score = tl.load(source + halves * width, mask=kept, other=0.0)
                if BIASED:
                    score += tl.load(bias + (at % RATIO) * halves * width + own, mask=kept, other=0.0)
            else:
                held = (state * RING + at % RING) * halves * width + own
                value = tl.load(tail_values + held, mask=kept, other=0.0)
                score = tl.load(tail_scores + held, mask=kept, other=0.0)
            higher = tl.maximum(high, score)
            mine, its = tl.exp(high - higher), tl.exp(score - higher)
            total = total * mine + its
            acc = acc * mine + its * value
            high = higher
    pooled = round_bfloat16(acc / total)
    tl.store(out + group * width + channel, pooled.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _keep(
    projected,
    bias,
    tail_values,
    tail_scores,
    positions,
    sequences,
    context_lens,
    states,
    stride,
    width,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its values and biased scores go into the tail, if it is among the last RING tokens of its sequence."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    sequence = tl.load(sequences + row)
    state = tl.load(states + sequence)
    if (position >= tl.load(context_lens + sequence) - RING) & (state >= 0):
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        kept = channel < width
        value = tl.load(projected + row * stride + channel, mask=kept, other=0.0)
        score = tl.load(projected + row * stride + width + channel, mask=kept, other=0.0)
        if BIASED:
            score += tl.load(bias + (position % RATIO) * width + channel, mask=kept, other=0.0)
        at = (state * RING + position % RING) * width + channel
        tl.store(tail_values + at, value, mask=kept)
        tl.store(tail_scores + at, score, mask=kept)


@triton.jit
def _pick(projected, rows, out, stride, width, BLOCK: tl.constexpr):
    """One row of the projection, rounded: a group of one token."""
    group = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + group)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(projected + row * stride + channel, mask=channel < width, other=0.0)
    tl.store(out + group * width + channel, round_bfloat16(value).to(out.dtype.element_ty), mask=channel < width)


@dataclass(frozen=True)
class GroupRows:
    """Where tokens lie, int64: rows [N] that end groups, positions and sequences [T]; of sequences [R] the first row,
    the context's length and the state.
    """

    rows: Tensor
    positions: Tensor
    sequences: Tensor
    query_starts: Tensor
    context_lens: Tensor
    states: Tensor


_SOURCES = {"projected": "*fp32", "bias": "*fp32", "tail_values": "*fp32", "tail_scores": "*fp32"}


def _pool_variant(ratio: int, *, biased: bool) -> Variant:
    lists = dict.fromkeys(("rows", "positions", "sequences", "query_starts", "states"), "*i64")
    return Variant(
        name=f"pool ratio {ratio}{' biased' if biased else ''}",
        kernel=_pool,
        types={**_SOURCES, **lists, "out": "*bf16", "stride": "i32", "width": "i32", "spare": "i64"},
        constants={"RATIO": ratio, "SPAN": tail_tokens(ratio), "RING": tail_ring(ratio), "BIASED": biased}
        | {"BLOCK": CHANNELS},
        warps=1,
        unaligned=("spare",),
    )


def _keep_variant(ratio: int, *, biased: bool) -> Variant:
    lists = dict.fromkeys(("positions", "sequences", "context_lens", "states"), "*i64")
    return Variant(
        name=f"keep ratio {ratio}{' biased' if biased else ''}",
        kernel=_keep,
        types={**_SOURCES, **lists, "stride": "i32", "width": "i32"},
        constants={"RATIO": ratio, "RING": tail_ring(ratio), "BIASED": biased, "BLOCK": 2 * CHANNELS},
        warps=1,
    )


PICK = Variant(
    name="pick",
    kernel=_pick,
    types={"projected": "*fp32", "rows": "*i64", "out": "*bf16", "stride": "i32", "width": "i32"},
    constants={"BLOCK": 4 * CHANNELS},
)
VARIANTS = (
    PICK,
    _pool_variant(2, biased=False),
    _keep_variant(2, biased=False),
    *(_pool_variant(ratio, biased=True) for ratio in (4, 128)),
    *(_keep_variant(ratio, biased=True) for ratio in (4, 128)),
)


def pick(projected: Tensor, rows: Tensor) -> Tensor:
    """Return `rows` of projected [T, C] (float32), bfloat16."""
    width = projected.shape[1]
    out = torch.empty((rows.shape[0], width), dtype=torch.bfloat16, device=projected.device)
    grid = (rows.shape[0], -(-width // PICK.constants["BLOCK"]))
    PICK.launch(grid, projected, rows, out, projected.stride(0), width)
    return out


def pool(projected: Tensor, bias: Tensor | None, tail: tuple[Tensor, Tensor], given: GroupRows, ratio: int) -> Tensor:
    """Return the latents [N, C] (bfloat16) of the groups that end in projected's rows; tail = (values, scores).

    Afterwards the tail holds the last rows of each sequence.
    """
    values, scores = tail
    held = values.shape[2]
    width = held // (tail_tokens(ratio) // ratio)
    out = torch.empty((given.rows.shape[0], width), dtype=torch.bfloat16, device=projected.device)
    sources = (projected, projected if bias is None else bias, values, scores)
    grid = (given.rows.shape[0], -(-width // CHANNELS))
    lists = (given.rows, given.positions, given.sequences, given.query_starts, given.states)
    sizes = (projected.stride(0), width, values.shape[0] - 1)
    _pool_variant(ratio, biased=bias is not None).launch(grid, *sources, *lists, out, *sizes)
    keep = _keep_variant(ratio, biased=bias is not None)
    grid = (given.positions.shape[0], -(-held // keep.constants["BLOCK"]))
    places = (given.positions, given.sequences, given.context_lens, given.states)
    keep.launch(grid, *sources, *places, projected.stride(0), held)
    return out
