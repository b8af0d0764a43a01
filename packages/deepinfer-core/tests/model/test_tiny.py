"""The embedded tiny model: every kind of layer, released names and formats, the same from one seed, made at once."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.errors import ConfigError
from deepinfer.model.checkpoint import Checkpoint, open_checkpoint
from deepinfer.model.tiny import Family, write_tiny
from deepinfer.model.tiny_tokenizer import CONTROL_TOKENS, IMAGE_TOKEN, MARKUP_TOKENS, VOCAB_SIZE, make_tokenizer


def test_made_on_the_spot_and_removed() -> None:
    start = time.perf_counter()
    checkpoint = open_checkpoint("tiny")
    assert time.perf_counter() - start < 1
    folder = checkpoint.folder
    assert checkpoint.compressed_ids is not None
    assert folder.is_dir()
    del checkpoint
    assert not folder.exists()


def test_every_layer_kind_of_v41() -> None:
    config = open_checkpoint("tiny").config
    kinds = [
        (layer.ratio, layer.owns_kv, layer.owns_index, layer.candidates, layer.engram is not None)
        for layer in config.layers
    ]
    window, reuse2, reuse1 = (0, False, False, None), (2, False, False, None), (1, False, False, None)
    assert kinds == [
        (*window, False),
        (*window, True),
        (2, True, True, None, True),
        (*reuse2, False),
        (1, True, True, "source", False),
        (*reuse1, False),
        (1, False, True, "reader", False),
        (*reuse1, False),
    ]
    assert config.draft is not None
    assert config.draft.stages == 3


def test_every_layer_kind_of_v4(tmp_path: Path) -> None:
    write_tiny(tmp_path / "v4", family="deepseek_v4")
    config = Checkpoint(tmp_path / "v4").config
    assert {(layer.ratio, layer.hash_routing) for layer in config.layers} >= {
        (0, True),
        (4, True),
        (128, False),
        (4, False),
    }


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_formats(family: Family, tmp_path: Path) -> None:
    write_tiny(tmp_path / "quantised", family=family)
    stored = {tensor.dtype for tensor in Checkpoint(tmp_path / "quantised").tensors.values()}
    assert stored == {"F8_E4M3", "F8_E8M0", "I8", "BF16", "F32"} | ({"I64"} if family == "deepseek_v4" else set())
    write_tiny(tmp_path / "plain", family=family, quantised=False)
    stored = {tensor.dtype for tensor in Checkpoint(tmp_path / "plain").tensors.values()}
    assert stored == {"BF16", "F32"} | ({"I64"} if family == "deepseek_v4" else set())


def test_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny(tmp_path / name, seed=seed)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"]
    assert files["a"] != files["c"]


def test_weights_are_finite_and_of_use(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    for name, tensor in load_file(tmp_path / "tiny" / "model.safetensors").items():
        if tensor.dtype == torch.float8_e8m0fnu:
            assert (tensor.view(torch.uint8) < 255).all(), name
        elif tensor.dtype != torch.int8:
            assert tensor.float().isfinite().all(), name
            assert tensor.float().abs().max() > 0, name


def test_tokenizer_is_byte_level_with_the_special_tokens_of_v41() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS[:3]] == [0, 1, 2]
    for token in (*CONTROL_TOKENS, *MARKUP_TOKENS):
        assert tokenizer.encode(token).tokens == [token]
    for text in ("Once upon a time", "naïve 你好 🙂\x00\n", "<｜User｜>hi<｜Assistant｜></think>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert open_checkpoint("tiny").config.image_token_id == tokenizer.token_to_id(IMAGE_TOKEN)


def test_words_outweigh_the_other_tokens(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    head = load_file(tmp_path / "tiny" / "model.safetensors")["head.weight"].float().norm(dim=1)
    tokenizer = make_tokenizer()
    piece, byte, end = (tokenizer.token_to_id(token) for token in ("Ġthe", "Ċ", CONTROL_TOKENS[1]))
    assert head[piece] > 10 * head[byte]
    assert head[piece] > 10 * head[end]


def test_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tiny"
    write_tiny(folder)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    before = json.loads((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="exists already and is not empty"):
        write_tiny(folder)
    assert json.loads((folder / "config.json").read_text()) == before
