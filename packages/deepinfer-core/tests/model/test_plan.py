"""Memory plans: the released numbers, the files' own sizes, and the context that fits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.plan import make_plan, render

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

GIB_V41 = {
    "routed experts": 268.945,
    "engram tables": 188.833,
    "draft": 7.388,
    "attention": 4.761,
    "shared experts": 1.320,
    "embedding": 1.233,
    "head": 1.233,
    "vision": 0.904,
    "router, mixing, compressors, norms": 0.331,
    "engram projections": 0.293,
}


def test_released_v41_from_its_configuration() -> None:
    plan = make_plan(CONFIGS / "v41")
    assert plan.source == "inventory"
    assert (plan.tensors, plan.total_bytes) == (96_085, 510_286_023_000)
    assert {name: round(size / 2**30, 3) for name, size in plan.components.items()} == GIB_V41
    assert sum(plan.components.values()) == plan.total_bytes
    assert plan.token_bytes == 890
    assert plan.window_bytes == 2 * 43 * 128 * 528
    assert plan.context_tokens is None
    assert "510,286,023,000 bytes" in render(plan)


def test_v4_takes_the_published_bytes_of_a_token() -> None:
    plan = make_plan(CONFIGS / "v4")
    assert int(plan.token_bytes) == 3514
    assert plan.not_loaded == ("vision", "draft")


@pytest.mark.parametrize("name", ["v41-a", "v41-b-quant", "v4-g"])
def test_headers_are_summed(name: str, golden_dir: Callable[[str], Path]) -> None:
    folder = golden_dir(name)
    plan = make_plan(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert plan.source == "headers"
    assert plan.total_bytes == index["metadata"]["total_size"] == sum(plan.components.values())
    assert plan.tensors == len(index["weight_map"])


@pytest.mark.parametrize("sequences", [1, 7])
def test_context_fills_the_memory(sequences: int, golden_dir: Callable[[str], Path]) -> None:
    folder = golden_dir("v41-b-quant")
    plain = make_plan(folder)
    fixed = plain.device_bytes + sequences * (plain.window_bytes + plain.state_bytes)
    block = sequences * 128 * int(plain.token_bytes)
    for blocks in (0, 1, 30):
        for extra in (0, block - 1):
            plan = make_plan(folder, memory_bytes=fixed + blocks * block + extra, sequences=sequences)
            assert plan.context_tokens == blocks * 128
    longest = make_plan(folder, memory_bytes=10**15, sequences=sequences)
    assert longest.context_tokens == longest.max_positions == 4096


def test_what_does_not_fit_is_said_with_the_number(golden_dir: Callable[[str], Path]) -> None:
    folder = golden_dir("v41-b-quant")
    plain = make_plan(folder)
    need = plain.device_bytes + plain.window_bytes + plain.state_bytes + 128 * int(plain.token_bytes)
    assert "does not fit: 1.000 MiB are missing" in render(make_plan(folder, memory_bytes=need - 2**20))


def test_plan_is_json() -> None:
    plan = make_plan(CONFIGS / "v41", memory_bytes=2**40, sequences=3)
    assert json.loads(json.dumps(plan.as_dict()))["components"]["engram tables"] == 202_758_032_400


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        make_plan(tmp_path)
    with pytest.raises(ConfigError, match="sequences is expected to be at least 1, got 0"):
        make_plan(CONFIGS / "v41", sequences=0)
    with pytest.raises(ConfigError, match="memory_bytes is expected to be at least 1, got -5"):
        make_plan(CONFIGS / "v41", memory_bytes=-5)
