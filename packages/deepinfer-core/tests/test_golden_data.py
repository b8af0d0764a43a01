"""The packed golden files: what goes in comes out, and what comes out is the originals to the byte."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from .golden import GOLDEN, Draw, pack, unpack

NAMES = ("v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth", "v4-g")


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind: drawn ones in the order of their draws, and two that were not drawn."""
    torch.manual_seed(7)
    a, b, c = (torch.randn(64, 96) * spread for spread in (1.0, 0.1, 0.5))
    return {
        "f32.weight": a,
        "bf16.weight": b.bfloat16(),
        "unlike": c.half().float(),
        "ids": torch.arange(5),
        "scale": torch.tensor([1, 2, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }


def test_round_trip() -> None:
    file = save(tensors())
    draws = {"f32.weight": Draw(0, 1.0), "bf16.weight": Draw(64 * 96, 0.1), "unlike": Draw(64 * 96, 2.0)}
    packed = pack(file, 7, draws)
    assert unpack(packed) == file
    assert unpack(pack(file, 0, {})) == file


def test_drawn_tensors_take_a_fraction() -> None:
    file = save({name: tensor for name, tensor in tensors().items() if name.endswith(".weight")})
    draws = {"f32.weight": Draw(0, 1.0), "bf16.weight": Draw(64 * 96, 0.1)}
    assert len(lzma.compress(pack(file, 7, draws))) < 0.2 * len(lzma.compress(file))


@pytest.mark.parametrize("name", NAMES)
def test_originals_to_the_byte(name: str, golden_dir: Callable[[str], Path], extra_data: Path) -> None:
    folder, original = golden_dir(name), extra_data / "golden" / name
    assert {path.name for path in folder.iterdir()} == {path.name for path in original.iterdir()}
    for path in original.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_original_formats_to_the_byte(golden_formats: Path, extra_data: Path) -> None:
    assert golden_formats.read_bytes() == (extra_data / "golden" / "formats.safetensors").read_bytes()


def test_configurations_are_the_originals(extra_data: Path) -> None:
    for family in ("v41", "v4"):
        ours = json.loads((GOLDEN.parent / "configs" / family / "config.json").read_text())
        assert ours == json.loads((extra_data / "configs" / family / "config.json").read_text())
