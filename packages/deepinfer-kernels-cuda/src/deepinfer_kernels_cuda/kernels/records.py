"""From vectors to cached records of every quantised format: window KV, entries and index keys, one launch each.

Rotations come as pairs (cos, sin) for each row; which slot a row has is decided by who calls.
"""

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.batch import RecordFormat, RecordView
from deepinfer_kernels_cuda.kernels.rounding import (
    e2m1_bits,
    e4m3_bits,
    group_exponent,
    hadamard,
    power_of_two,
    round_bfloat16,
    round_e2m1,
    round_e4m3,
    scale_of_32,
)
from deepinfer_kernels_cuda.kernels.rows import rotate
from deepinfer_kernels_cuda.kernels.variants import Variant

NONE, FP8, FP4, KEY, ROPE = 0, 8, 4, 2, 9
"""How kernels name formats: no records, E4M3 in groups of 32, E2M1 in groups of 16 and of 32, V4's records."""
FORMATS: dict[RecordFormat, int] = {"fp8_group32": FP8, "fp4_group16": FP4, "fp4_group32": KEY, "fp8_rope": ROPE}
PLAIN_GROUP = 64
"""Channels of V4's records that share a scale."""


def takes_record(view: RecordView) -> bool:
    """Whether kernels read and write records of this kind: quantised, a power of two wide, V4's in whole groups."""
    width = view.width
    if view.format not in FORMATS or not 32 <= width <= 512 or width & (width - 1) or view.rope > width:
        return False
    plain = width - view.rope
    return view.format != "fp8_rope" or (plain > 0 and (plain <= PLAIN_GROUP or view.rope == PLAIN_GROUP))


@triton.jit
def _store_fp8(value, record, WIDTH: tl.constexpr, GROUP: tl.constexpr, PLAIN: tl.constexpr, SCALES: tl.constexpr):
    """The first PLAIN of WIDTH channels as E4M3 in groups, their UE8M0 bytes from SCALES on."""
    groups: tl.constexpr = WIDTH // GROUP
    group = tl.arange(0, groups)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    grouped = tl.where(at < PLAIN, tl.reshape(value, (groups, GROUP)), 0.0)
    exponent = group_exponent(tl.max(tl.abs(grouped), 1))
    scaled = grouped * power_of_two(254 - exponent)[:, None]
    codes = e4m3_bits(round_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0)), grouped)
    tl.store(record + at, codes.to(tl.uint8), mask=at < PLAIN)
    tl.store(record + SCALES + group, exponent.to(tl.uint8), mask=group * GROUP < PLAIN)


@triton.jit
def _store_fp4(value, record, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Nibbles, the even one low, then one scale a group: E4M3 for 16 channels, UE8M0 for 32."""
    groups: tl.constexpr = WIDTH // GROUP
    grouped = tl.reshape(value, (groups, GROUP))
    amax = tl.max(tl.abs(grouped), 1)
    if GROUP == 16:
        scale = round_e4m3(tl.minimum(tl.div_rn(tl.maximum(amax, 0.01171875), 6.0), 448.0))
        scales = e4m3_bits(scale, scale)
        scaled = tl.div_rn(grouped, tl.broadcast_to(scale[:, None], (groups, GROUP)))
    else:
        scales = scale_of_32(amax)
        scaled = grouped * power_of_two(254 - scales)[:, None]
    codes = e2m1_bits(round_e2m1(tl.minimum(tl.maximum(scaled, -6.0), 6.0)), grouped)
    low, high = tl.split(tl.reshape(codes, (WIDTH // 2, 2)))
    tl.store(record + tl.arange(0, WIDTH // 2), (low | (high << 4)).to(tl.uint8))
    tl.store(record + WIDTH // 2 + tl.arange(0, groups), scales.to(tl.uint8))


@triton.jit
def _store_record(value, records, slot, spare, WIDTH: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Store float32 value [1, WIDTH] as the record at `slot` (-1 = the spare one)."""
    at = tl.where(slot < 0, spare, slot)
    if FORMAT == 8:
        _store_fp8(value, records + at * (WIDTH + WIDTH // 32), WIDTH, 32, WIDTH, WIDTH)
    elif FORMAT == 4:
        _store_fp4(value, records + at * (WIDTH // 2 + WIDTH // 16), WIDTH, 16)
    elif FORMAT == 2:
        _store_fp4(value, records + at * (WIDTH // 2 + WIDTH // 32), WIDTH, 32)
    else:
        plain: tl.constexpr = WIDTH - DIM
        scales: tl.constexpr = (plain + 63) // 64
        padded: tl.constexpr = (scales + 7) // 8 * 8
        record = records + at * (plain + 2 * DIM + padded)
        # Fewer channels than a group are one group.
        _store_fp8(value, record, WIDTH, WIDTH if plain < 64 else 64, plain, plain + 2 * DIM)
        channel = tl.arange(0, WIDTH)
        bits = (round_bfloat16(tl.reshape(value, (WIDTH,))).to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tail = (record + plain).to(tl.pointer_type(tl.int16))
        tl.store(tail + channel - plain, bits, mask=channel >= plain)
        rest = tl.arange(0, 8)
        tl.store(
            record + plain + 2 * DIM + padded - 8 + rest, tl.zeros((8,), tl.uint8), mask=rest >= scales - padded + 8
        )


@triton.jit
def _write_window(
    kv,
    norm,
    turns,
    slots,
    records,
    stride,
    slot_stride,
    spare,
    eps,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One row: norm, one rounding, rotation, record."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    value = tl.load(kv + row * stride + column).to(tl.float32)
    value *= 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / WIDTH + eps)
    value = round_bfloat16(value * tl.load(norm + column))
    value = rotate(tl.reshape(value, (1, WIDTH)), turns + row * DIM, 1, WIDTH, DIM, False)
    _store_record(value, records, tl.load(slots + row * slot_stride), spare, WIDTH, DIM, FORMAT)


@triton.jit
def _write_entries(
    latents,
    turns,
    slots,
    records,
    stride,
    spare,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One entry: rotation, transform (STEPS > 0), record."""
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(latents + row * stride + tl.arange(0, WIDTH)).to(tl.float32)
    value = rotate(tl.reshape(value, (1, WIDTH)), turns + row * DIM, 1, WIDTH, DIM, False)
    if STEPS:
        value = hadamard(value, 1, WIDTH, STEPS)
    _store_record(value, records, tl.load(slots + row), spare, WIDTH, DIM, FORMAT)


def _window_variant(width: int, dim: int, kind: int) -> Variant:
    return Variant(
        name=f"write_window {width} {dim} format {kind}",
        kernel=_write_window,
        types={"kv": "*bf16", "norm": "*fp32", "turns": "*fp32", "slots": "*i64", "records": "*u8"}
        | {"stride": "i32", "slot_stride": "i32", "spare": "i64", "eps": "fp32"},
        constants={"WIDTH": width, "DIM": dim, "FORMAT": kind},
        warps=1,
        unaligned=("slot_stride", "spare"),
    )


def _entry_variant(width: int, dim: int, kind: int, *, transform: bool) -> Variant:
    return Variant(
        name=f"write_entries {width} {dim} format {kind}{' transformed' if transform else ''}",
        kernel=_write_entries,
        types={
            "latents": "*bf16",
            "turns": "*fp32",
            "slots": "*i64",
            "records": "*u8",
            "stride": "i32",
            "spare": "i64",
        },
        constants={"WIDTH": width, "DIM": dim, "FORMAT": kind} | {"STEPS": width.bit_length() - 1 if transform else 0},
        warps=1,
        unaligned=("spare",),
    )


VARIANTS = (
    *(_window_variant(512, 64, kind) for kind in (FP8, ROPE)),
    *(_entry_variant(512, 64, kind, transform=False) for kind in (FP8, FP4, ROPE)),
    *(_entry_variant(128, 64, KEY, transform=transform) for transform in (False, True)),
)
"""At the shapes of the released models; others are compiled when they come."""


def write_window(kv: Tensor, norm: Tensor, eps: float, turns: Tensor, slots: Tensor, view: RecordView) -> None:
    """Write the rows kv [T, D] (bfloat16, any distance apart) at `slots` int64 [T]; turns float32 [T, dim / 2, 2]."""
    variant = _window_variant(kv.shape[1], 2 * turns.shape[1], FORMATS[view.format])
    sizes = (kv.stride(0), slots.stride(0), view.data.shape[0] - 1)
    variant.launch((kv.shape[0],), kv, norm, turns, slots, view.data, *sizes, eps)


def write_entries(latents: Tensor, turns: Tensor, slots: Tensor, view: RecordView, *, transform: bool) -> None:
    """Write latents [N, C] (bfloat16) at `slots` int64 [N]; turns float32 [N, dim / 2, 2] of their first tokens."""
    variant = _entry_variant(latents.shape[1], 2 * turns.shape[1], FORMATS[view.format], transform=transform)
    sizes = (latents.stride(0), view.data.shape[0] - 1)
    variant.launch((latents.shape[0],), latents, turns, slots, view.data, *sizes)
