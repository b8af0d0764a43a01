"""What all layers of a step share, each in one launch: rotations, window slots and masks, visible entries."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.variants import Variant

BLOCK_ENTRIES = 512
TURNED_ROWS = 16


@triton.jit
def _turns(
    positions, rows, frequencies, out, count, back, LISTED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """Cos and sin of (position - back) * frequency: out [count, HALF, 2]; LISTED: positions of the rows listed."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = row < count
    at = tl.load(rows + row, mask=kept, other=0) if LISTED else row
    position = tl.load(positions + at, mask=kept, other=0) - back
    pair = tl.arange(0, HALF)
    angle = position.to(tl.float32)[:, None] * tl.load(frequencies + pair)[None, :]
    place = out + (row * HALF)[:, None] * 2 + pair[None, :] * 2
    tl.store(place, tl.cos(angle), mask=kept[:, None])
    tl.store(place + 1, tl.sin(angle), mask=kept[:, None])


@triton.jit
def _slot(position, tables, sequence, base, start, table_width):
    """Window slots (int64) of positions of one sequence, -1 where there is nothing to see."""
    known = tl.maximum(position, 0)
    local = known // 128 - base
    inside = (position >= start) & (local >= 0) & (local < table_width)
    block = tl.load(tables + sequence * table_width + local, mask=inside, other=-1)
    return tl.where(block >= 0, block * 128 + known % 128, -1)


@triton.jit
def _window(
    positions,
    sequences,
    query_starts,
    tables,
    bases,
    window_starts,
    decoder_starts,
    own_slots,
    slots,
    encoder_bias,
    decoder_bias,
    table_width,
    width,
    first,
    STARTS: tl.constexpr,
    DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row: slots of the keys at `first` .. before its position (DRAFT: its block's first), and masks."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    sequence = tl.load(sequences + row)
    base = tl.load(bases + sequence)
    start = tl.maximum(tl.load(window_starts + sequence), 0) if STARTS else tl.zeros((), tl.int64)
    anchor = tl.load(positions + tl.load(query_starts + sequence)) if DRAFT else position
    place = tl.arange(0, WIDTH)
    read = anchor + first + place
    slot = _slot(read, tables, sequence, base, start, table_width)
    kept = place < width
    at = row * width + place
    visible = slot >= 0
    tl.store(slots + at, slot, mask=kept)
    tl.store(encoder_bias + at, tl.where(visible, 0.0, float("-inf")), mask=kept)
    visible = visible & (read >= tl.load(decoder_starts + sequence))
    tl.store(decoder_bias + at, tl.where(visible, 0.0, float("-inf")), mask=kept)
    own = _slot(position + tl.zeros((1,), tl.int64), tables, sequence, base, start, table_width)
    tl.store(own_slots + row + tl.zeros((1,), tl.int64), own)


@triton.jit
def _everything(
    positions, sequences, tables, entries, slots, bias, count, table_width, RATIO: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: all entries that it sees among the first `count`, their slots and mask."""
    each: tl.constexpr = 128 // RATIO
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    visible = entry < (tl.load(positions + row) + 1) // RATIO
    kept = entry < count
    table = tables + tl.load(sequences + row) * table_width
    block = tl.load(table + tl.minimum(entry // each, table_width - 1), mask=visible & kept, other=0)
    at = row * count + entry
    tl.store(entries + at, tl.where(visible, entry, -1), mask=kept)
    tl.store(slots + at, tl.where(visible, block * each + entry % each, -1), mask=kept)
    tl.store(bias + at, tl.where(visible, 0.0, float("-inf")), mask=kept)


@dataclass(frozen=True)
class WindowRows:
    """What finds a row's window: int64 positions and sequences [T]; of sequences [R] the first row, tables [R, W],
    the first block's number, the first visible position (or None) and the decoder's start.
    """

    positions: Tensor
    sequences: Tensor
    query_starts: Tensor
    tables: Tensor
    bases: Tensor
    window_starts: Tensor | None
    decoder_starts: Tensor


def _turns_variant(half: int, *, listed: bool) -> Variant:
    return Variant(
        name=f"turns {half}{' listed' if listed else ''}",
        kernel=_turns,
        types={"positions": "*i64", "rows": "*i64", "frequencies": "*fp32", "out": "*fp32"}
        | {"count": "i32", "back": "i32"},
        constants={"LISTED": listed, "ROWS": TURNED_ROWS, "HALF": half},
        unaligned=("count", "back"),
    )


def _window_variant(width: int, *, starts: bool, draft: bool) -> Variant:
    names = ("positions", "sequences", "query_starts", "tables", "bases", "window_starts", "decoder_starts")
    return Variant(
        name=f"window {width}{' starts' if starts else ''}{' draft' if draft else ''}",
        kernel=_window,
        types={
            **dict.fromkeys((*names, "own_slots", "slots"), "*i64"),
            "encoder_bias": "*fp32",
            "decoder_bias": "*fp32",
        }
        | dict.fromkeys(("table_width", "width", "first"), "i32"),
        constants={"STARTS": starts, "DRAFT": draft, "WIDTH": width},
        warps=1,
        unaligned=("table_width", "width", "first"),
    )


def _everything_variant(ratio: int) -> Variant:
    return Variant(
        name=f"everything ratio {ratio}",
        kernel=_everything,
        types=dict.fromkeys(("positions", "sequences", "tables", "entries", "slots"), "*i64")
        | {"bias": "*fp32", "count": "i32", "table_width": "i32"},
        constants={"RATIO": ratio, "BLOCK": BLOCK_ENTRIES},
        unaligned=("count", "table_width"),
    )


VARIANTS = (
    _turns_variant(32, listed=False),
    _turns_variant(32, listed=True),
    _window_variant(128, starts=False, draft=False),
    _window_variant(128, starts=True, draft=False),
    _window_variant(256, starts=False, draft=True),
    *(_everything_variant(ratio) for ratio in (1, 2, 4, 128)),
)


def turns(positions: Tensor, rows: Tensor | None, frequencies: Tensor, back: int = 0) -> Tensor:
    """Return float32 [N, dim / 2, 2]: cos and sin at positions int64 [N] (or of `rows` int64 [N]) less `back`."""
    given = positions if rows is None else rows
    half = frequencies.shape[0]
    out = torch.empty((given.shape[0], half, 2), dtype=torch.float32, device=positions.device)
    variant = _turns_variant(half, listed=rows is not None)
    grid = (-(-given.shape[0] // TURNED_ROWS),)
    variant.launch(grid, positions, given, frequencies.to(torch.float32), out, given.shape[0], back)
    return out


def window_tables(given: WindowRows, window: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's own slot [T], the slots it reads [T, W] (int64) and their masks (float32) in both halves.

    block: 0, or the rows of a sequence in a draft step; then W = window + block, else W = window.
    """
    tokens, width, device = given.positions.shape[0], window + block, given.positions.device
    own = torch.empty((tokens,), dtype=torch.int64, device=device)
    slots = torch.empty((tokens, width), dtype=torch.int64, device=device)
    masks = [torch.empty((tokens, width), dtype=torch.float32, device=device) for _ in range(2)]
    starts = given.decoder_starts if given.window_starts is None else given.window_starts
    lists = (given.positions, given.sequences, given.query_starts, given.tables, given.bases, starts)
    sizes = (given.tables.shape[1], width, -window if block else 1 - window)
    variant = _window_variant(triton.next_power_of_2(width), starts=given.window_starts is not None, draft=block > 0)
    variant.launch((tokens,), *lists, given.decoder_starts, own, slots, *masks, *sizes)
    return own, slots, masks[0], masks[1]


def everything(positions: Tensor, sequences: Tensor, tables: Tensor, count: int, ratio: int) -> list[Tensor]:
    """Return entries, slots (int64) and bias (float32), each [T, count]: all that each row sees, -1 = none."""
    shape, device = (positions.shape[0], count), positions.device
    out = [torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.int64, torch.int64, torch.float32)]
    grid = (positions.shape[0], -(-count // BLOCK_ENTRIES))
    _everything_variant(ratio).launch(grid, positions, sequences, tables, *out, count, tables.shape[1])
    return out
