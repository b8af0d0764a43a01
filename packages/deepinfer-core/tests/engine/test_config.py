"""Options resolve to sizes that fit, or say with numbers why they cannot."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.options import CacheMemory, EngineOptions, check_options, resolve, resolve_precision
from deepinfer.engine.sequence import blocks_for
from deepinfer.errors import ConfigError
from deepinfer.model.cache_layout import cache_layout

from .checker import PRECISION, small_config

V41 = small_config()
V4 = small_config("deepseek_v4")
LAYOUT = cache_layout(V41, PRECISION)


@given(
    length=st.one_of(st.none(), st.integers(2, V41.max_positions)),
    seqs=st.integers(1, 300),
    budget=st.integers(300, 5000),
    most=st.integers(0, 1 << 36),
    enough=st.one_of(st.none(), st.integers(0, 1 << 34)),
)
def test_what_is_resolved_fits(length: int | None, seqs: int, budget: int, most: int, enough: int | None) -> None:
    options = EngineOptions(max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=budget)
    check_options(options, V41)
    try:
        config = resolve(options, V41, PRECISION, LAYOUT, CacheMemory(most, enough))
    except ConfigError:
        windows = (2 * seqs + blocks_for(budget + V41.window) + 1) * LAYOUT.window_block_bytes
        assert most < windows + seqs * LAYOUT.state_bytes + blocks_for(length or 1) * LAYOUT.block_bytes
        return
    taken = config.blocks * LAYOUT.block_bytes + config.window_blocks * LAYOUT.window_block_bytes
    assert taken + seqs * LAYOUT.state_bytes <= most
    assert config.max_model_len <= min(V41.max_positions, config.blocks * BLOCK_TOKENS)
    assert length is None or config.max_model_len == length
    longest = blocks_for(config.max_model_len) * LAYOUT.block_bytes
    assert enough is None or config.blocks * LAYOUT.block_bytes <= max(enough, longest)
    assert config.window_blocks >= min(2, blocks_for(config.max_model_len))


def test_a_length_that_does_not_fit_is_told_with_the_numbers() -> None:
    options = EngineOptions(max_model_len=4096, max_num_seqs=1)
    with pytest.raises(
        ConfigError, match=r"max_model_len=4096 with max_num_seqs=1 needs .* GB of cache \(32 blocks of"
    ):
        resolve(options, V41, PRECISION, LAYOUT, CacheMemory(10_000_000))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (EngineOptions(max_model_len=1), "max_model_len must be an integer, 2 to 65536, got 1"),
        (EngineOptions(max_model_len=65537), "max_model_len must be an integer, 2 to 65536, got 65537"),
        (EngineOptions(max_num_seqs=0), "max_num_seqs must be an integer, at least 1, got 0"),
        (EngineOptions(max_num_seqs=2.0), "max_num_seqs must be an integer"),  # type: ignore[arg-type]
        (EngineOptions(max_num_batched_tokens=100), "max_num_batched_tokens=100 must be at least max_num_seqs=256"),
        (EngineOptions(memory_fraction=0), "memory_fraction must be above 0 and at most 1, got 0"),
        (EngineOptions(memory_fraction=1.5), "memory_fraction must be above 0 and at most 1, got 1.5"),
        (EngineOptions(seed=-1), "seed must be an integer"),
    ],
)
def test_options_that_no_memory_could_honour(options: EngineOptions, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(options, V41)
    assert text in str(caught.value)


def _replay(choice: object, family: str = "v41") -> int | None:
    model = V41 if family == "v41" else V4
    options = EngineOptions(decoder_replay=choice, max_num_seqs=1)  # type: ignore[arg-type]
    return resolve(options, model, PRECISION, cache_layout(model, PRECISION), CacheMemory(1 << 34)).decoder_replay


def test_decoder_replay() -> None:
    assert _replay("auto") == V41.window + 12
    assert replace(V41, window=128).window + 12 == 140
    assert _replay("off") is None
    assert _replay(V41.window) == V41.window
    assert _replay("auto", "v4") is None
    with pytest.raises(ConfigError, match="decoder_replay=31 must be at least the window of 32 tokens"):
        _replay(31)
    with pytest.raises(ConfigError, match="needs a model with a decoder half; deepseek_v4 has none"):
        _replay(140, "v4")
    with pytest.raises(ConfigError, match='must be "auto", "off" or a number of tokens, got \'on\''):
        _replay("on")


def test_precision() -> None:
    plain = replace(V41, quant=None)
    assert resolve_precision("auto", "auto", V41, torch.bfloat16).round_inputs
    assert resolve_precision("auto", "auto", V41, torch.float32).dtype == torch.bfloat16
    assert resolve_precision("auto", "auto", plain, torch.float32).dtype == torch.float32
    assert not resolve_precision("auto", "auto", plain, torch.float32).round_inputs
    assert not resolve_precision("bfloat16", "auto", V41, torch.bfloat16).round_inputs
    assert resolve_precision("float64", "model", V41, torch.bfloat16).cache == "model"
    assert resolve_precision("float64", "auto", V41, torch.bfloat16).cache == "records"
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float32, float64, got 'int8'"):
        resolve_precision("int8", "auto", V41, torch.bfloat16)
    with pytest.raises(ConfigError, match='kv_cache_dtype must be "auto"'):
        resolve_precision("auto", "fp8", V41, torch.bfloat16)
