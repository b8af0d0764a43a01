"""Number formats of the checkpoints and of cached records: rounding, packing and unpacking, bit by bit.

Pure functions over tensors; which tensor has which format is decided by `projection` and `paged_cache`.
Source: the number formats section of the model card; proven bit-exact by the golden `formats.safetensors`.
"""

import math
from functools import cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_FLOOR = 1e-4
"""Smallest amax of an FP8 group: its scale never falls below that of this value."""

# E2M1 rounds to nearest, ties to the even code: a tie at .25, 1.25, 2.5 and 5 goes down, at .75, 1.75 and 3.5 up.
# With `bucketize` (count of boundaries strictly below x) the upward ties are written as the next number below.
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@cache
def e2m1_boundaries(device: torch.device) -> Tensor:
    """Float32 [7]: x has code k when exactly k boundaries lie below |x|.  Kept, since no graph can copy it."""
    ties = torch.tensor(_E2M1_TIES, dtype=torch.float32)
    below = torch.nextafter(ties, torch.zeros(()))
    up = torch.tensor([False, True, False, True, False, True, False])
    return torch.where(up, below, ties).to(device)


def e2m1_codes(x: Tensor) -> Tensor:
    """Round float32 `x` to E2M1; uint8 codes 0..15 (bit 3 = sign), saturating at 6."""
    magnitude = torch.bucketize(x.abs(), e2m1_boundaries(x.device)).to(torch.uint8)
    return magnitude | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """Float32 values of E2M1 codes 0..15 (any integer dtype)."""
    return _e2m1_table(codes.device)[codes.to(torch.int64)]


@cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=device)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., 2 n] into bytes [..., n]: the even element lies in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`; takes uint8 or int8."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def power_of_two_bytes(x: Tensor) -> Tensor:
    """UE8M0 bytes (int32) of the smallest powers of two that are not below float32 `x` (positive and normal).

    Works on the float's bits, so it is exact where log2 would not be.
    """
    bits = x.contiguous().view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def power_of_two(byte: Tensor) -> Tensor:
    """Float32 2^(b - 127) of integer UE8M0 bytes in 1..254."""
    return (byte.to(torch.int32) << 23).view(torch.float32)


def e8m0_values(scale: Tensor) -> Tensor:
    """Float32 values of float8_e8m0fnu (or its uint8 bytes): 2^(b - 127), NaN for 255."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def has_nan_scale(scale: Tensor) -> bool:
    """Whether any UE8M0 byte is 255 (synchronises with the host)."""
    return bool((scale.view(torch.uint8) == 255).any())


def _groups(x: Tensor, size: int) -> Tensor:
    """Float32 [..., n, size] view of the last dimension, padded with zeros to whole groups."""
    x = x.to(torch.float32).contiguous()
    if short := -x.shape[-1] % size:
        x = torch.nn.functional.pad(x, (0, short))
    return x.view(*x.shape[:-1], x.shape[-1] // size, size)


def fp8_quantise(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise to FP8 in groups along the last dimension.

    Returns E4M3 codes (float8_e4m3fn, shape of x padded to whole groups) and int32 UE8M0 bytes [..., groups].
    Scale = 2^ceil(log2(max(amax, 1e-4) * f32(1 / 448))); value = E4M3(clamp(x / scale)).
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1).clamp_min(FP8_FLOOR)
    byte = power_of_two_bytes(amax * (1.0 / E4M3_MAX))
    scaled = (grouped / power_of_two(byte).unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), byte


def fp8_dequantise(codes: Tensor, byte: Tensor, group: int) -> Tensor:
    """Float32 values of `fp8_quantise`'s result (padding included)."""
    return (_groups(codes, group) * power_of_two(byte).unsqueeze(-1)).flatten(-2)


def fp8_round(x: Tensor, group: int) -> Tensor:
    """Round trip through FP8 in groups; the dtype of `x`, exactly representable in bfloat16."""
    codes, byte = fp8_quantise(x, group)
    return fp8_dequantise(codes, byte, group)[..., : x.shape[-1]].to(x.dtype)


def fp4_quantise(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise to E2M1 in groups of 16 (E4M3 scale) or 32 (UE8M0 scale) along the last dimension.

    Returns uint8 codes [..., n] and uint8 scale bytes [..., groups].
    group 16: scale = E4M3_rne(max(amax, 6 * 2^-9) / 6); group 32: scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)).
    """
    grouped = _groups(x, group)
    amax = grouped.abs().amax(-1)
    if group == 16:
        stored = (amax.clamp_min(6.0 * 2.0**-9) / 6.0).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
        scale, byte = stored.to(torch.float32), stored.view(torch.uint8)
    else:
        exponent = power_of_two_bytes(amax.clamp_min(6.0 * 2.0**-126) / 6.0)
        scale, byte = power_of_two(exponent), exponent.to(torch.uint8)
    return e2m1_codes(grouped / scale.unsqueeze(-1)).flatten(-2), byte


def fp4_dequantise(codes: Tensor, byte: Tensor, group: int) -> Tensor:
    """Float32 values of `fp4_quantise`'s result."""
    scale = byte.view(torch.float8_e4m3fn).to(torch.float32) if group == 16 else e8m0_values(byte)
    return (_groups(e2m1_values(codes), group) * scale.unsqueeze(-1)).flatten(-2)


def fp4_round(x: Tensor, group: int) -> Tensor:
    """Round trip through E2M1 in groups of 16 or 32; keeps the dtype of `x`."""
    codes, byte = fp4_quantise(x, group)
    return fp4_dequantise(codes, byte, group)[..., : x.shape[-1]].to(x.dtype)


def dequantise_fp8_blocks(data: Tensor, scale: Tensor, block: int) -> Tensor:
    """Float32 [out, in] of an FP8 weight: E4M3 codes times the UE8M0 scale of their block x block square."""
    out, width = data.shape
    full = e8m0_values(scale).repeat_interleave(block, 0)[:out].repeat_interleave(block, 1)[:, :width]
    return data.to(torch.float32) * full


def dequantise_rows(data: Tensor, scale: Tensor) -> Tensor:
    """Float32 values of rows with one UE8M0 scale per 32 columns.

    data: E4M3 [..., C], or E2M1 pairs as int8/uint8 [..., C / 2]; scale [..., C / 32].
    """
    values = data.to(torch.float32) if data.dtype == torch.float8_e4m3fn else e2m1_values(unpack_nibbles(data))
    return (_groups(values, 32) * e8m0_values(scale).unsqueeze(-1)).flatten(-2)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension (a power of two), in the dtype of `x`."""
    width = x.shape[-1]
    y = x
    step = 1
    while step < width:
        pairs = y.unflatten(-1, (-1, 2, step))
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return y * (1.0 / math.sqrt(width))
