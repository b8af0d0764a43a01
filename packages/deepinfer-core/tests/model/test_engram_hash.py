"""Compressed ids, multipliers and primes against the golden checkpoints and the released model."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer.model.config import EngramHashConfig
from deepinfer.model.engram_hash import compress_token_ids, multipliers, primes
from deepinfer.model.read_config import read_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
GOLDEN = ("v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth")


def engram(folder: Path) -> EngramHashConfig:
    config = read_config(folder).engram
    assert config is not None
    return config


def rows(folder: Path, ids: list[int], layer: int) -> np.ndarray:
    """Hash a prompt with one loop for each token and order, straight from the formula."""
    config = engram(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    compressed = compress_token_ids(tokenizer, read_config(folder).vocab_size)
    pad = int(compressed[config.pad_token_id])
    factors = multipliers(config)[layer].tolist()
    sizes = primes(config)[layer]
    offsets = np.concatenate(([0], np.cumsum(sizes)[:-1])).reshape(sizes.shape)
    result = []
    for i in range(len(ids)):
        grams = [int(compressed[ids[i - s]]) if i >= s else pad for s in range(config.max_ngram)]
        code = grams[0] * factors[0]
        row = []
        for s in range(1, config.max_ngram):
            code ^= grams[s] * factors[s]
            row += [code % int(size) + int(offset) for size, offset in zip(sizes[s - 1], offsets[s - 1], strict=True)]
        result.append(row)
    return np.array(result)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name: str, golden_dir: Callable[[str], Path]) -> None:
    folder = golden_dir(name)
    golden = json.loads((folder / "golden.json").read_text())
    config = engram(folder)
    ids = compress_token_ids(Tokenizer.from_file(str(folder / "tokenizer.json")), read_config(folder).vocab_size)
    assert ids.max() + 1 == golden["engram"]["token_map_size"] == config.compressed_vocab_size
    assert multipliers(config).tolist() == golden["engram"]["multipliers"]
    assert primes(config).tolist() == golden["engram"]["primes"]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rows(name: str, golden_dir: Callable[[str], Path]) -> None:
    folder = golden_dir(name)
    prompt = json.loads((folder / "golden.json").read_text())["prompts"][0]
    golden = load_file(folder / "golden.safetensors")["engram_rows"].numpy()
    assert golden.shape[:2] == (len(prompt), len(engram(folder).layer_ids))
    for order in range(golden.shape[1]):
        assert (rows(folder, prompt, order) == golden[:, order]).all()


def test_released_multipliers_and_primes() -> None:
    config = engram(CONFIGS / "v41")
    assert multipliers(config).tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    table = primes(config)
    assert table.sum((1, 2)).tolist() == [384_006_168, 384_016_682]
    assert len(set(table.ravel().tolist())) == table.size
    assert table.min() >= 16_000_000


@given(st.integers(2, 500), st.integers(1, 5), st.integers(2, 4))
def test_primes_are_the_next_unused_ones(vocab: int, heads: int, order: int) -> None:
    config = EngramHashConfig(
        layer_ids=(0, 3),
        max_ngram=order,
        heads=heads,
        head_dim=1,
        vocab_size=vocab,
        compressed_vocab_size=9,
        pad_token_id=0,
    )
    table = primes(config)
    assert table.shape == (2, order - 1, heads)
    expected = [n for n in range(vocab, 6000) if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))]
    assert table.ravel().tolist() == expected[: table.size]


def test_released_tokenizer(extra_data: Path) -> None:
    tokenizer = released_tokenizer(extra_data)
    start = time.perf_counter()
    ids = compress_token_ids(tokenizer, 129_280)
    seconds = time.perf_counter() - start
    assert ids.max() + 1 == 99_092
    assert ids[2] == 2
    assert seconds < 3


def released_tokenizer(extra_data: Path) -> Tokenizer:
    """V4.1's tokenizer: V4's with nine added tokens renamed."""
    values = json.loads((extra_data / "tokenizers" / "deepseek-v4" / "tokenizer.json").read_text())
    names = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>", 129279: "<|place_holder_mm_span_0442|>"}
    names |= {129265 + k: f"<|place_holder_mm_span_{436 + k:04}|>" for k in range(6)}
    for token in values["added_tokens"]:
        token["content"] = names.get(token["id"], token["content"])
        if token["id"] == 128799:
            token |= {"normalized": True, "special": False}
    return Tokenizer.from_str(json.dumps(values))
