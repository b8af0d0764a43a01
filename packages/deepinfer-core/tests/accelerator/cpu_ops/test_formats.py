"""The CPU's own rounding and decoding: bit for bit what the reference defines, ties and spare records included."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.accelerator.batch import RecordFormat, RecordView
from deepinfer.accelerator.cpu_ops.formats import decode_few, round_inputs
from deepinfer.accelerator.ops.number_formats import fp8_round
from deepinfer.accelerator.ops.paged_cache import decode_records, record_bytes


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_golden_rounding(golden_formats: Path) -> None:
    golden = load_file(golden_formats)
    rounded = torch.cat([round_inputs(rows, 32) for rows in golden["input"].split(8)])
    assert same_bits(rounded, golden["fp8_group32"])


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.integers(-40, 40),
    group=st.sampled_from([32, 128]),
    kind=st.sampled_from(["normal", "bfloat16", "ties", "zeros"]),
)
def test_rounding(seed: int, spread: int, group: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 256, generator=generator) * 2.0**spread
    x *= torch.exp2(torch.randint(-12, 3, x.shape, generator=generator).float())
    if kind == "bfloat16":
        x = x.bfloat16().float()
    elif kind == "ties":
        x = torch.randint(-9000, 9000, x.shape, generator=generator).float() * 2.0**spread
    elif kind == "zeros":
        x[::2] = 0
    assert same_bits(round_inputs(x, group), fp8_round(x, group))


@pytest.mark.parametrize("width", [64, 128, 512])
@pytest.mark.parametrize("kind", ["fp8_group32", "fp4_group16", "fp4_group32"])
def test_decoding_any_bytes(kind: RecordFormat, width: int) -> None:
    """Also bytes that no encoder writes: NaN codes and scales decode to what the reference makes of them."""
    data = torch.randint(0, 256, (64, record_bytes(kind, width, 32)), dtype=torch.uint8)
    data[0] = 0
    view = RecordView(data, kind, width, 32)
    decoded = decode_few(data.numpy(), view)
    assert decoded is not None
    assert torch.equal(
        torch.from_numpy(decoded).nan_to_num(1e9), decode_records(data, view, torch.float32).nan_to_num(1e9)
    )
