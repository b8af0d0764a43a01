"""The inventory against what exists: the released checkpoint's totals and the headers of the golden checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.model.headers import read_headers
from deepinfer.model.inventory import inventory
from deepinfer.model.read_config import read_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
GOLDEN = ("v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth", "v4-g")


def test_released_v41_to_the_byte() -> None:
    specs = inventory(read_config(CONFIGS / "v41"))
    assert len(specs) == 96_085
    assert sum(spec.bytes for spec in specs.values()) == 510_286_023_000


@pytest.mark.parametrize("name", GOLDEN)
def test_names_and_shapes_of_real_files(name: str, golden_dir: Callable[[str], Path]) -> None:
    folder = golden_dir(name)
    specs = inventory(read_config(folder))
    stored = read_headers(folder)
    assert {name for name, spec in specs.items() if not spec.optional} == set(stored)
    assert {name: tensor.shape for name, tensor in stored.items()} == {name: specs[name].shape for name in stored}
    assert all(tensor.dtype in specs[name].dtypes for name, tensor in stored.items())


@pytest.mark.parametrize("name", ["v41-b-quant", "v41-s-smooth", "v41-a"])
def test_bytes_are_those_of_the_released_dtypes(name: str, golden_dir: Callable[[str], Path]) -> None:
    folder = golden_dir(name)
    specs = inventory(read_config(folder))
    assert {name: tensor.bytes for name, tensor in read_headers(folder).items()} == {
        name: spec.bytes for name, spec in specs.items()
    }


def test_v4_differs_where_it_should() -> None:
    specs = inventory(read_config(CONFIGS / "v4"))
    assert specs["layers.0.ffn.gate.tid2eid"].shape == (129280, 6)
    assert "layers.0.ffn.gate.bias" not in specs
    assert specs["layers.3.ffn.gate.bias"].shape == (256,)
    assert specs["layers.2.attn.compressor.ape"].shape == (4, 1024)
    assert specs["layers.2.attn.indexer.compressor.wkv.weight"].shape == (256, 4096)
    assert specs["layers.3.attn.compressor.wkv.weight"].shape == (512, 4096)
    assert "layers.3.attn.indexer.wq_b.weight" not in specs
    assert specs["layers.0.attn.wq_b.scale"].shape == (256, 8)
    assert specs["layers.0.ffn.experts.0.w1.scale"].shape == (2048, 128)
    assert {name for name, spec in specs.items() if spec.optional} == {
        name for name in specs if name.startswith("mtp.")
    }
