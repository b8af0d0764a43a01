"""Number formats, bit for bit: golden round trips, codes and scales, and properties on any input."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.accelerator.batch import RecordFormat, RecordView
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops import number_formats as formats
from deepinfer.accelerator.ops.expert_routing import swiglu
from deepinfer.accelerator.ops.paged_cache import decode_records, encode_records, record_bytes
from deepinfer.accelerator.ops.stream_mixing import MixSettings
from deepinfer.accelerator.parameters import MixParameters, Precision


@pytest.fixture(scope="module")
def golden(golden_formats: Path) -> dict[str, Tensor]:
    return load_file(golden_formats)


def test_round_trips(golden: dict[str, Tensor]) -> None:
    x = golden["input"]
    assert torch.equal(formats.fp8_round(x, 32), golden["fp8_group32"])
    assert torch.equal(formats.fp4_round(x, 16), golden["fp4_e4m3_group16"])
    assert torch.equal(formats.fp4_round(x, 32), golden["fp4_ue8m0_group32"])
    assert torch.equal(formats.hadamard(x[:, :128]), golden["hadamard"])


@pytest.mark.parametrize("block", [32, 128])
def test_weight_blocks(golden: dict[str, Tensor], block: int) -> None:
    codes = golden[f"fp8_block{block}.codes"].view(torch.float8_e4m3fn)
    values = formats.dequantise_fp8_blocks(codes, golden[f"fp8_block{block}.scale"], block)
    assert torch.equal(values, golden[f"fp8_block{block}.values"])


def test_rows(golden: dict[str, Tensor]) -> None:
    fp4 = formats.dequantise_rows(golden["fp4_rows.codes"], golden["fp4_rows.scale"])
    assert torch.equal(fp4, golden["fp4_rows.values"])
    codes = golden["fp8_rows.codes"].view(torch.float8_e4m3fn)
    assert torch.equal(formats.dequantise_rows(codes, golden["fp8_rows.scale"]), golden["fp8_rows.values"])


def test_formulas(golden: dict[str, Tensor]) -> None:
    """SwiGLU with its limits, RMSNorm at both epsilons and the mixing: computed in float64, rounded once."""
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in golden.items()}
    ops = Ops(torch.device("cpu"), Precision(torch.float64, round_inputs=False, cache="model"))
    gate_up = torch.cat((wide["swiglu.gate"], wide["swiglu.up"]), 1)
    assert torch.equal(swiglu(gate_up, wide["swiglu.weight"], 10.0).float(), golden["swiglu.out"])
    for eps in (1e-20, 1e-6):
        out = ops.rms_norm(wide["rms.input"], wide["rms.weight"], eps)
        assert torch.equal(out.float(), golden[f"rms.out@{'1e-20' if eps < 1e-6 else '1e-6'}"])
    parameters = MixParameters(torch.empty(0), wide["hc.base"], wide["hc.scale"])
    mix = ops.mixing(wide["hc.z"], parameters, MixSettings(iterations=20, eps=1e-6, norm_eps=1e-20))
    for name, value in (("pre", mix.pre), ("post", mix.post), ("comb", mix.comb)):
        assert float((value - wide[f"hc.{name}"]).abs().max()) < 2.0**-23


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0])
    assert formats.e2m1_values(formats.e2m1_codes(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert formats.e2m1_values(formats.e2m1_codes(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_nibbles_come_back(codes: list[int]) -> None:
    packed = formats.pack_nibbles(torch.tensor(codes, dtype=torch.uint8))
    assert packed[0] == codes[0] | codes[1] << 4
    assert formats.unpack_nibbles(packed).tolist() == codes


@given(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32))
def test_powers_of_two_are_the_smallest_not_below(x: float) -> None:
    power = float(formats.power_of_two(formats.power_of_two_bytes(torch.tensor([x]))))
    assert power / 2 < x <= power


@pytest.mark.parametrize(
    ("kind", "width", "rope", "size"),
    [
        ("fp8_group32", 512, 64, 528),
        ("fp4_group16", 512, 64, 288),
        ("fp4_group32", 128, 64, 68),
        ("fp8_rope", 512, 64, 584),
        ("bfloat16", 512, 64, 1024),
    ],
)
def test_records_have_the_released_sizes(kind: RecordFormat, width: int, rope: int, size: int) -> None:
    assert record_bytes(kind, width, rope) == size


@pytest.mark.parametrize("width", [64, 128, 512])
@pytest.mark.parametrize("kind", ["fp8_group32", "fp4_group16", "fp4_group32", "fp8_rope"])
def test_records_hold_what_rounding_gives(kind: RecordFormat, width: int) -> None:
    """A record that is read back is the rounded vector, and rounding it again changes nothing."""
    ops = Ops(torch.device("cpu"), Precision(torch.float32, round_inputs=False, cache="records"))
    view = RecordView(ops.new_records(kind, 9, width, 32), kind, width, 32)
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    view.data[:9] = encode_records(x, view)
    back = decode_records(view.data[:9], view, torch.float32)
    if kind == "fp8_group32":
        assert torch.equal(back, formats.fp8_round(x, 32))
    elif kind == "fp8_rope":
        assert torch.equal(back[:, :-32], formats.fp8_round(x[:, :-32], min(64, width - 32)))
        assert torch.equal(back[:, -32:], x[:, -32:].bfloat16().float())
    else:
        assert torch.equal(back, formats.fp4_round(x, 16 if kind == "fp4_group16" else 32))
    assert torch.equal(decode_records(encode_records(back, view), view, torch.float32), back)
