"""Rounding to FP8 in groups, as the inputs of FP8 and FP4 weights pass it; results are kept as bfloat16, exactly.

Source: the number formats of the model card.  No FP8 type is used, so that every device from SM80 on can run it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.variants import Variant

ROUND_COLUMNS = 1024
GROUPS = (0, 32, 128)
"""Widths of a group: 0 = not rounded, 32 and 128 = the blocks of FP8 weights of the two families."""


@triton.jit
def group_exponent(amax):
    """Biased exponent (int32) of 2^ceil(log2(max(amax, 1e-4) / 448)) for float32 amax, from its bits."""
    bits = (tl.maximum(amax, 1e-4) * 0.002232142857142857).to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """Float32 power of two with the biased exponent (int32)."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_bfloat16(x):
    """Nearest bfloat16 number of float32 x, ties to even, as float32; the same in the interpreter and on a device."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x):
    """Nearest E4M3 number of float32 |x| <= 448, ties to even: adding and taking away a large number rounds there."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    large = power_of_two(exponent + 20) * 1.5
    return (x + large) - large


@triton.jit
def fp8_round(x, GROUP: tl.constexpr):
    """Round float32 x [rows, columns] through FP8 in groups of GROUP columns."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    grouped = tl.reshape(x, (rows, columns // GROUP, GROUP))
    exponent = group_exponent(tl.max(tl.abs(grouped), 2))[:, :, None]
    scaled = tl.minimum(tl.maximum(grouped * power_of_two(254 - exponent), -448.0), 448.0)
    return tl.reshape(round_e4m3(scaled) * power_of_two(exponent), (rows, columns))


@triton.jit
def scale_of_32(amax):
    """Biased exponent (int32) of 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) for float32 amax: the scale of 32 E2M1."""
    bits = tl.div_rn(tl.maximum(amax, 7.052966104933725e-38), 6.0).to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def round_e2m1(x):
    """Nearest E2M1 number of float32 |x| <= 6, ties to even."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127)
    large = power_of_two(exponent + 22) * 1.5
    return (x + large) - large


@triton.jit
def e2m1_bits(x, sign):
    """Codes, int32, of float32 numbers that E2M1 holds, with the sign of float32 `sign`, which a zero may have lost."""
    size = tl.abs(x)
    normal = (size.to(tl.int32, bitcast=True) >> 22) - 252
    return tl.where(size < 1.0, (size * 2.0).to(tl.int32), normal) | ((sign.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e4m3_bits(x, sign):
    """Codes, int32, of float32 numbers that E4M3 holds, with the sign of float32 `sign`, which a zero may have lost."""
    size = tl.abs(x)
    normal = (size.to(tl.int32, bitcast=True) >> 20) - 960
    code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
    return code | ((sign.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Sums and differences of channels SIZE apart, in place."""
    pairs = tl.permute(tl.reshape(x, (ROWS, WIDTH // (2 * SIZE), 2, SIZE)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, WIDTH))


@triton.jit
def hadamard(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Orthonormal Walsh-Hadamard transform of x [ROWS, WIDTH], WIDTH = 2^STEPS, added in the reference's order."""
    for step in tl.static_range(STEPS):
        x = _butterfly(x, ROWS, WIDTH, 1 << step)
    return x * (1.0 / tl.sqrt_rn(tl.full((), WIDTH, tl.float32)))


@triton.jit
def _round_rows(x, out, stride, width, padded, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    if GROUP:
        value = tl.reshape(fp8_round(tl.reshape(value, (1, BLOCK)), GROUP), (BLOCK,))
    tl.store(out + row * padded + column, value.to(out.dtype.element_ty), mask=column < padded)


ROUND_ROWS = {
    group: Variant(
        name=f"round_rows {group}",
        kernel=_round_rows,
        types={"x": "*bf16", "out": "*bf16", "stride": "i32", "width": "i32", "padded": "i32"},
        constants={"GROUP": group, "BLOCK": ROUND_COLUMNS},
        unaligned=("width",),
    )
    for group in GROUPS
}
"""By the width of a group; 0 copies and pads."""
VARIANTS = tuple(ROUND_ROWS.values())


def round_rows(x: Tensor, group: int, padded: int) -> Tensor:
    """Return x [T, K] (bfloat16, rows any distance apart) rounded in groups, as bfloat16 [T, padded], zero past K."""
    out = torch.empty((x.shape[0], padded), dtype=torch.bfloat16, device=x.device)
    grid = (x.shape[0], -(-padded // ROUND_COLUMNS))
    ROUND_ROWS[group].launch(grid, x, out, x.stride(0), x.shape[1], padded)
    return out
