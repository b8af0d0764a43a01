"""The best of a row's scores: the `most` largest, ties to the smaller number, bit for bit what a full sort would give.

A program holds up to 8,192 scores of a row and halves the range of their bits until the wanted number of them lies
above; of equal scores the smallest numbers are taken in the same way.  Longer rows are cut into pieces, whose best are
cut again.  Nothing is counted with atomics, and what is chosen comes out in the order in which it lay.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.variants import Variant

PIECE = 8192
"""Scores that a program holds."""
LOWEST = tl.constexpr(-2147483648)
"""Key of what may not be chosen."""
LAST = tl.constexpr(2147483647)


@triton.jit
def _ordered(score):
    """Int32 keys that order as float32 scores do, a zero of either sign is the same."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    """The score of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(key, wanted):
    """Largest key that at least `wanted` (1 or more) of `key` reach; or a smaller one that exactly as many reach."""
    low = tl.min(tl.where(key == LOWEST, LAST, key), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        if count >= wanted:
            low = middle
        else:
            high = middle - 1
        if count == wanted:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _smallest(number, tied, wanted):
    """Smallest number that at least `wanted` of the tied ones do not exceed."""
    low = tl.min(tl.where(tied, number, LAST), 0).to(tl.int64)
    high = tl.max(tl.where(tied, number, -1), 0).to(tl.int64)
    while low < high:
        middle = (low + high) // 2
        count = tl.sum((tied & (number <= middle.to(tl.int32))).to(tl.int32), 0)
        if count >= wanted:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def _choose(key, number, most):
    """Which of the keys are among the `most` best, and how many are; LOWEST never is."""
    total = tl.sum((key != LOWEST).to(tl.int32), 0)
    wanted = tl.minimum(total, most)
    least = tl.full((), LOWEST + 1, tl.int32)
    last = tl.full((), LAST, tl.int32)
    if total > most:
        least = _threshold(key, wanted)
        missing = wanted - tl.sum((key > least).to(tl.int32), 0)
        if tl.sum((key == least).to(tl.int32), 0) > missing:
            last = _smallest(number, key == least, missing)
    return (key > least) | ((key == least) & (number <= last)), wanted


@triton.jit
def _visible(scores, place, seen, count, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Scores at places of a row that sees `seen` entries, -inf behind; of groups the largest, inf for the newest."""
    valid = place < tl.minimum((seen + GROUP - 1) // GROUP, count)
    score = tl.full((SIZE,), float("-inf"), tl.float32)
    for part in tl.static_range(GROUP):
        inside = valid & (place * GROUP + part < seen)
        score = tl.maximum(score, tl.load(scores + place * GROUP + part, mask=inside, other=float("-inf")))
    if GROUP > 1:
        score = tl.where(valid & (place == (seen - 1) // GROUP), float("inf"), score)
    return score


@triton.jit
def _select(
    scores,
    numbers,
    positions,
    sequences,
    tables,
    best,
    chosen_numbers,
    chosen_slots,
    bias,
    stride,
    count,
    most,
    table_width,
    LISTED: tl.constexpr,
    GROUP: tl.constexpr,
    RATIO: tl.constexpr,
    FINAL: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One piece of one row.

    LISTED  scores come with their numbers, -1 = none; else place n has number n and is valid when it is visible
    GROUP   places are groups of so many scores, and count by their largest; the newest visible group always counts
    FINAL   results are int64 numbers, with SLOTS also their slots and bias; else scores and int32 numbers to cut again
    """
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    place = piece * SIZE + tl.arange(0, SIZE)
    if LISTED:
        number = tl.load(numbers + row * stride + place, mask=place < count, other=-1)
        score = tl.load(scores + row * stride + place, mask=number >= 0, other=float("-inf"))
    else:
        number = place
        seen = (tl.load(positions + row) + 1) // RATIO
        score = _visible(scores + row * stride, place, seen, count, GROUP, SIZE)
    key = tl.where(score > float("-inf"), _ordered(score), LOWEST)
    chosen, wanted = _choose(key, number, most)
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    out = (row * tl.num_programs(1) + piece) * most
    tl.store(chosen_numbers + out + rank, number.to(chosen_numbers.dtype.element_ty), mask=chosen)
    if not FINAL:
        tl.store(best + out + rank, _score(key), mask=chosen)
    rest = tl.arange(0, WIDTH)
    unused = (rest >= wanted) & (rest < most)
    none = tl.full((WIDTH,), -1, chosen_numbers.dtype.element_ty)
    tl.store(chosen_numbers + out + rest, none, mask=unused)
    if SLOTS:
        # What was scattered is read back in its order: a program's own writes, behind a barrier.
        tl.debug_barrier()
        each: tl.constexpr = 128 // RATIO
        entry = tl.load(chosen_numbers + out + rest, mask=rest < wanted, other=0)
        table = tables + tl.load(sequences + row) * table_width
        block = tl.load(table + entry // each, mask=rest < wanted, other=0)
        slot = tl.where(unused, -1, block * each + entry % each)
        tl.store(chosen_slots + out + rest, slot, mask=rest < most)
        tl.store(bias + out + rest, tl.where(unused, float("-inf"), 0.0), mask=rest < most)


@dataclass(frozen=True)
class Rows:
    """What finds a row's entries in memory: positions and sequences int64 [T], block tables int64 [R, blocks]."""

    positions: Tensor
    sequences: Tensor
    tables: Tensor
    ratio: int


def _variant(size: int, width: int, ratio: int, group: int, *, listed: bool, final: bool, slots: bool) -> Variant:
    kind = f"{'listed' if listed else 'visible'} {'final' if final else 'piece'}{' slots' if slots else ''}"
    pointers = {"scores": "*fp32", "numbers": "*i32", **dict.fromkeys(("positions", "sequences", "tables"), "*i64")}
    outputs = {"best": "*fp32", "chosen_numbers": "*i64" if final else "*i32", "chosen_slots": "*i64", "bias": "*fp32"}
    sizes = ("stride", "count", "most", "table_width")
    return Variant(
        name=f"select {size} of {width} ratio {ratio} groups of {group} {kind}",
        kernel=_select,
        types={**pointers, **outputs, **dict.fromkeys(sizes, "i32")},
        constants={"LISTED": listed, "GROUP": group, "RATIO": ratio, "FINAL": final, "SLOTS": slots}
        | {"SIZE": size, "WIDTH": width},
        warps=(16 if group > 1 else 8) if size > 4096 else 4,
        registers=128,
        unaligned=("stride", "count", "most", "table_width"),
    )


VARIANTS = (
    _variant(PIECE, 512, 1, 1, listed=False, final=True, slots=True),
    _variant(PIECE, 512, 2, 1, listed=False, final=False, slots=False),
    _variant(PIECE, 512, 1, 1, listed=True, final=True, slots=True),
    _variant(2048, 512, 2, 1, listed=True, final=True, slots=True),
    _variant(PIECE, 2048, 1, 8, listed=False, final=True, slots=False),
    _variant(PIECE, 2048, 1, 8, listed=False, final=False, slots=False),
)
"""Of the shapes of the released models the largest, of each kind; others are compiled when they come."""


def select(
    scores: Tensor, numbers: Tensor | None, rows: Rows, count: int, most: int, *, group: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best of scores float32 [T, stride]: numbers, slots (int64) and bias (float32), each [T, most].

    numbers int32 [T, stride]: what the first `count` places hold, -1 = none; None: the entries 0, 1, .., of which the
    first `count` are looked at as far as they are visible.  With `group` > 1 places are groups of so many entries, of
    which there are `count`, and slots and bias are not filled.  Results ascend where numbers do; behind them is -1.
    Neither -inf nor NaN is chosen.
    """
    tokens, device = scores.shape[0], scores.device
    width, listed = max(16, triton.next_power_of_2(most)), numbers is not None
    given = scores.view(torch.int32) if numbers is None else numbers
    with_slots = group == 1
    while True:
        pieces = max(1, -(-count // PIECE))
        final = pieces == 1
        size = min(PIECE, max(128, triton.next_power_of_2(count)))
        variant = _variant(size, width, rows.ratio, group, listed=listed, final=final, slots=final and with_slots)
        shape = (tokens, pieces * most)
        chosen = torch.empty(shape, dtype=torch.int64 if final else torch.int32, device=device)
        best = torch.empty(shape if not final else (1,), dtype=torch.float32, device=device)
        slots = torch.empty(shape, dtype=torch.int64, device=device) if final else chosen
        bias = torch.empty(shape, dtype=torch.float32, device=device) if final else best
        lists = (rows.positions, rows.sequences, rows.tables)
        sizes = (scores.stride(0), count, most, rows.tables.shape[1])
        variant.launch((tokens, pieces), scores, given, *lists, best, chosen, slots, bias, *sizes)
        if final:
            return chosen, slots, bias
        scores, given, count, group, listed = best, chosen, pieces * most, 1, True
