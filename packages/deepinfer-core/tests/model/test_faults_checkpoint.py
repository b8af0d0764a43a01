"""Damaged checkpoints: each fault ends with a message that names file and tensor, and `docs/errors.md` shows it."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.errors import CheckpointError
from deepinfer.model.checkpoint import open_checkpoint
from deepinfer.model.tiny import write_tiny
from deepinfer.model.weights import Weights

SECTION = "Checkpoints"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True)
class Fault:
    """One way to break a checkpoint of `family`, and words that its message must have."""

    what: str
    breaks: Callable[[Path], None]
    words: tuple[str, ...]
    family: str = "v41"


def edit_config(**values: Any) -> Callable[[Path], None]:
    """Set keys of the text part of config.json; None removes a key."""

    def breaks(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        for key, value in values.items():
            part = config if key in config else config.get("text_config", config)
            part[key] = value
            if value is None:
                del part[key]
        path.write_text(json.dumps(config))

    return breaks


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors of model.safetensors."""

    def breaks(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return breaks


def edit_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of one file."""

    def breaks(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return breaks


def edit_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the header of model.safetensors, and keep its data as it is."""

    def breaks(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return breaks


def overlap(header: dict[str, Any]) -> None:
    """Let one tensor lie where another of its size lies."""
    header["layers.0.attn_norm.weight"]["data_offsets"] = header["norm.weight"]["data_offsets"]


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rename(name: str, new: str) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        (folder / name).rename(folder / new)

    return breaks


def split(then: Callable[[Path], None]) -> Callable[[Path], None]:
    """Write the checkpoint as two shards with an index, then break it."""

    def breaks(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        names = sorted(tensors)
        parts = (names[: len(names) // 2], names[len(names) // 2 :])
        for shard, part in zip(SHARDS, parts, strict=True):
            save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        then(folder)

    return breaks


def edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        values = json.loads((folder / INDEX).read_text())
        change(values["weight_map"])
        (folder / INDEX).write_text(json.dumps(values))

    return breaks


def repeat_tensor(folder: Path) -> None:
    """Put a tensor of the second shard into the first one too."""
    first, second = load_file(folder / SHARDS[0]), load_file(folder / SHARDS[1])
    save_file(first | {"norm.weight": second["norm.weight"]}, folder / SHARDS[0])


def repeat_with_prefix(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["norm.weight"].clone()


def nan_scale(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[1, 1] = 255

    return change


def without_quantisation(folder: Path) -> None:
    edit_config(quantization_config=None, expert_dtype=None)(folder)


def break_header(data: bytes) -> bytes:
    return data[:8] + b"?" + data[9:]


def long_header(data: bytes) -> bytes:
    return (10**12).to_bytes(8, "little") + data[8:]


def vocabulary_of_another(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["extra"] = 512
    path.write_text(json.dumps(values))


def merge_two_tokens(folder: Path) -> None:
    """Let two special tokens differ by case only, so that they share a compressed id."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    for token in values["added_tokens"]:
        token["content"] = token["content"].replace("<｜User｜>", "<｜SYSTEM｜>")
    values["model"]["vocab"]["<｜SYSTEM｜>"] = values["model"]["vocab"].pop("<｜User｜>")
    path.write_text(json.dumps(values))


LIBRARY_TEXT = re.compile(r"\((?=[^()]*(\(char|EOF ))[^()]*(\([^()]*\))?\)")
"""What JSON and tokenizers libraries say in their own words, which differ by version."""

WQ_A = "layers.0.attn.wq_a"

FAULTS = (
    Fault("no such folder", shutil.rmtree, ("no such folder", "expected a checkpoint folder")),
    Fault(
        "a file instead of a folder", lambda f: (shutil.rmtree(f), f.touch())[1], ("is a file", "expected the folder")
    ),
    Fault("no config.json", remove("config.json"), ("no config.json",)),
    Fault("config.json cut off", edit_file("config.json", lambda b: b[:100]), ("cannot be read as JSON", "download")),
    Fault("another architecture", edit_config(model_type="llama"), ("unknown architecture", "'llama'")),
    Fault("config.json without a key", edit_config(hidden_size=None), ("hidden_size", "found nothing")),
    Fault(
        "a layer map that points forward",
        edit_config(kv_source_layer_ids=[3, 4], index_source_layer_ids=[3, 4, 6]),
        ("kv_source_layer_ids", "a source never lies ahead"),
    ),
    Fault(
        "config.json with another width",
        edit_config(moe_intermediate_size=96),
        ("expected shape [96, 64]", "found [64, 64]"),
    ),
    Fault(
        "config.json with more experts",
        edit_config(n_routed_experts=16),
        ("expected shape [16, 128]", "found [8, 128]"),
    ),
    Fault(
        "config.json with more layers",
        edit_config(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0], num_hidden_layers=9),
        ("layers.8.attn_norm.weight", "missing in all"),
    ),
    Fault("no weights", remove(WEIGHTS), ("no weights", INDEX, WEIGHTS)),
    Fault("pickled weights only", rename(WEIGHTS, "pytorch_model.bin"), ("pytorch_model.bin", "never read")),
    Fault(
        "a Git LFS pointer",
        edit_file(WEIGHTS, lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ("git lfs pull",),
    ),
    Fault("an empty file", edit_file(WEIGHTS, lambda _: b""), ("has only 0 bytes",)),
    Fault(
        "a truncated file", edit_file(WEIGHTS, lambda b: b[:-1000]), ("truncated: expected", "download the file again")
    ),
    Fault(
        "a file with something behind its end", edit_file(WEIGHTS, lambda b: b + b"more"), ("longer than its tensors",)
    ),
    Fault("a broken header", edit_file(WEIGHTS, break_header), ("safetensors header", "download the file again")),
    Fault("a header longer than the file", edit_file(WEIGHTS, long_header), ("declared 1000000000000 bytes",)),
    Fault(
        "a header entry without sense",
        edit_file(WEIGHTS, lambda b: b.replace(b'"dtype":"BF16"', b'"dtypo":"BF16"', 1)),
        ("broken entry in the header",),
    ),
    Fault("tensors that overlap", edit_header(overlap), ("begins at byte", "expected")),
    Fault("an index that is no JSON", split(edit_file(INDEX, lambda b: b[:50])), (INDEX, "weight_map")),
    Fault("a missing shard", split(remove(SHARDS[1])), (f"missing {SHARDS[1]}", INDEX)),
    Fault(
        "an index with a tensor too many",
        split(edit_index(lambda m: m.update(ghost=SHARDS[0]))),
        ("tensor ghost", "does not hold it"),
    ),
    Fault(
        "an index with a tensor too few",
        split(edit_index(lambda m: m.pop("embed.weight"))),
        ("tensor embed.weight", "does not name"),
    ),
    Fault(
        "an index that leads outside",
        split(edit_index(lambda m: m.update(ghost="../other.safetensors"))),
        ("'../other.safetensors'", "same folder"),
    ),
    Fault("one tensor in two shards", split(repeat_tensor), ("tensor norm.weight", f"once, in {SHARDS[1]}")),
    Fault("one tensor under two names", edit_tensors(repeat_with_prefix), ("occurs twice", "norm.weight")),
    Fault(
        "an extra tensor",
        edit_tensors(lambda t: t.update(ghost=torch.zeros(1))),
        ("tensor ghost", "not part of the model"),
    ),
    Fault(
        "a missing tensor",
        edit_tensors(lambda t: t.pop("norm.weight")),
        ("tensor norm.weight", "expected BF16 [128]", "found no such tensor"),
    ),
    Fault(
        "a wrong shape",
        edit_tensors(lambda t: t.update({"norm.weight": torch.ones(64).bfloat16()})),
        ("tensor norm.weight", "expected shape [128]", "found [64]"),
    ),
    Fault(
        "a wrong dtype",
        edit_tensors(lambda t: t.update({"norm.weight": torch.ones(128).half()})),
        ("tensor norm.weight", "expected BF16 or F32", "found F16"),
    ),
    Fault(
        "a missing scale",
        edit_tensors(lambda t: t.pop(f"{WQ_A}.scale")),
        (f"tensor {WQ_A}.scale", "means nothing without its scales"),
    ),
    Fault(
        "quantised weights, config.json says nothing of it",
        without_quantisation,
        ("found F8_E4M3", "config.json has no quantization_config"),
    ),
    Fault("a NaN scale", edit_tensors(nan_scale(f"{WQ_A}.scale")), (f"tensor {WQ_A}.scale", "scale [1, 1] is NaN")),
    Fault(
        "a NaN scale of an expert",
        edit_tensors(nan_scale("layers.3.ffn.experts.5.w2.scale")),
        ("layers.3.ffn.experts.5.w2.scale", "is NaN"),
    ),
    Fault(
        "a NaN scale in an Engram table, found on look-up",
        edit_tensors(lambda t: t["layers.1.engram.embed.scale"].view(torch.uint8).fill_(255)),
        ("tensor layers.1.engram.embed.scale", "NaN scales (byte 255) among the rows"),
    ),
    Fault(
        "a hash layer that names an expert too many",
        edit_tensors(lambda t: t["layers.0.ffn.gate.tid2eid"].fill_(8)),
        ("tid2eid", "names experts 8 to 8", "expected 0 to 7"),
        "v4",
    ),
    Fault(
        "config.json with other hash ranges than its Engram tables",
        edit_config(engram_vocab_size=300),
        ("engram_num_embeddings", "hash ranges"),
    ),
    Fault(
        "no tokenizer for Engram layers", remove("tokenizer.json"), ("tokenizer.json: missing", "Engram layers [1, 2]")
    ),
    Fault("a broken tokenizer", edit_file("tokenizer.json", lambda b: b[:1000]), ("tokenizer.json: is no tokenizer",)),
    Fault("a tokenizer with more tokens than the model", vocabulary_of_another, ("token id 512", "vocab_size 512")),
    Fault("a tokenizer of another model", merge_two_tokens, ("432 compressed ids", "engram_compressed_vocab_size 433")),
)


def load(folder: Path) -> None:
    """Do what a model does at start, as far as these faults go: open, tokenizer, read every weight."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.compressed_ids is not None or checkpoint.config.engram is None
    accelerator = CpuAccelerator()
    ops = accelerator.ops(Precision(torch.float32, False, "model"))
    weights = Weights(checkpoint, ops, accelerator)
    for name in sorted(checkpoint.tensors):
        if name.endswith("tid2eid"):
            weights.vector(name, torch.int64)
        elif name.endswith(".scale") and ".engram.embed." not in name:
            weights.linear(name.removesuffix(".scale"))
        elif name.endswith(".engram.embed.scale"):
            ops.engram_lookup(torch.tensor([[7]]), weights.table(name.removesuffix(".scale")))


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    write_tiny(root / "v41")
    write_tiny(root / "v4", family="deepseek_v4")
    return root


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_fault_has_its_message(fault: Fault, sound: Path, tmp_path: Path, errors_page: Any) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound / fault.family, folder)
    fault.breaks(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message
    for word in fault.words:
        assert word in message
    errors_page.check(SECTION, fault.what, LIBRARY_TEXT.sub("(...)", message.replace(str(folder), "MODEL")))


def test_page_has_all_faults(errors_page: Any) -> None:
    errors_page.check_complete(SECTION, [fault.what for fault in FAULTS])


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_sound_checkpoints_load(family: str, sound: Path, tmp_path: Path) -> None:
    load(sound / family)
    folder = tmp_path / "split"
    shutil.copytree(sound / family, folder)
    split(lambda _: None)(folder)
    load(folder)


def test_unreadable_file_is_named(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound / "v41", folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="no weights"):
        load(folder)


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_header_never_does_worse(sound: Path, data: st.DataObject) -> None:
    """Any change to a header is refused with a message, or is one that does not matter."""
    intact = (sound / "v4" / WEIGHTS).read_bytes()
    length = int.from_bytes(intact[:8], "little")
    damaged = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        shutil.copytree(sound / "v4", path, copy_function=os.symlink)
        (path / WEIGHTS).unlink()
        (path / WEIGHTS).write_bytes(damaged)
        with suppress(CheckpointError):
            checkpoint = open_checkpoint(path)
            for name in checkpoint.tensors:
                checkpoint.read(name)
