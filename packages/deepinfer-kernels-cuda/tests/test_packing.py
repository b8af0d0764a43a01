"""Packed weights: the numbers of the checkpoint, whatever the shape, and told when a scale is too large."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.accelerator.conformance.inputs import Draw
from deepinfer.accelerator.ops.number_formats import fp8_round
from deepinfer.accelerator.ops.projection import dequantise
from deepinfer.accelerator.parameters import StoredWeight
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.kernels.packing import fill_weight, new_weight
from deepinfer_kernels_cuda.kernels.products import unpack
from deepinfer_kernels_cuda.kernels.rounding import round_rows

DEVICE = torch.device("cuda" if probe() is None else "cpu")


@settings(max_examples=15)
@given(
    kind=st.sampled_from(["fp8", "fp4"]),
    rows=st.integers(1, 150),
    parts=st.integers(1, 9),
    block=st.sampled_from([32, 128]),
    seed=st.integers(0, 1000),
)
def test_every_number_comes_back(kind: str, rows: int, parts: int, block: int, seed: int) -> None:
    weight = Draw(seed).weight(kind, rows, 32 * parts, block)
    packed = new_weight(1, -(-rows // 128) * 128, 32 * parts, DEVICE, fp4=weight.is_fp4)
    assert fill_weight(packed, 0, 0, [weight])
    values = unpack(packed)[0].cpu().to(torch.float32)
    assert torch.equal(values[:rows, : 32 * parts], dequantise(weight))
    assert not values[rows:].any()
    assert not values[:, 32 * parts :].any()


@pytest.mark.parametrize(("kind", "largest"), [("fp8", 134), ("fp4", 128)])
def test_a_scale_that_kernels_cannot_hold_is_told(kind: str, largest: int) -> None:
    weight = Draw(0).weight(kind, 64, 128, 32)
    assert weight.scale is not None
    for byte in (0, largest, largest + 1):
        scale = torch.full_like(weight.scale.view(torch.uint8), byte).view(torch.float8_e8m0fnu)
        packed = new_weight(1, 128, 128, DEVICE, fp4=weight.is_fp4)
        stored = StoredWeight(weight.data, scale, weight.block)
        assert fill_weight(packed, 0, 0, [stored]) == (byte <= largest)
        if byte == largest:
            assert torch.equal(unpack(packed)[0, :64].cpu().to(torch.float32), dequantise(stored))


@settings(max_examples=15)
@given(group=st.sampled_from([32, 128]), width=st.integers(1, 300), seed=st.integers(0, 1000))
def test_inputs_are_rounded_as_the_reference_rounds_them(group: int, width: int, seed: int) -> None:
    draw = Draw(seed)
    x = (draw.wide(3, width) * torch.exp(4 * draw.wide(3, width))).to(torch.bfloat16)
    padded = -(-width // 128) * 128
    rounded = round_rows(x.to(DEVICE), group, padded).cpu()
    assert torch.equal(rounded[:, :width], fp8_round(x, group))
    assert not rounded[:, width:].any()
