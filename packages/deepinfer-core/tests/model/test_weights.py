"""Reading a checkpoint: strict, lazy, memory-mapped, and no more in memory than the model needs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.errors import CheckpointError
from deepinfer.model.checkpoint import Checkpoint, open_checkpoint
from deepinfer.model.engram_hash import primes
from deepinfer.model.headers import read_header
from deepinfer.model.read_config import parse_config
from deepinfer.model.tiny import tiny_config, write_tiny
from deepinfer.model.weights import Weights

WEIGHTS = "model.safetensors"
TABLE_BYTES = 2 << 30
LOADING_LIMIT = 200_000_000
UNREAD = ("vision.", "aligner.", "image_")


class Recorder:
    """A progress bar that only counts."""

    def __init__(self) -> None:
        self.total, self.done, self.ended = 0, 0, False

    def start(self, total: int) -> None:
        self.total = total

    def advance(self, count: int) -> None:
        self.done += count

    def finish(self) -> None:
        self.ended = True


def weights_of(checkpoint: Checkpoint, progress: Recorder | None = None) -> Weights:
    accelerator = CpuAccelerator()
    return Weights(checkpoint, accelerator.ops(Precision(torch.float32, False, "model")), accelerator, progress)


def take(weights: Weights, checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Ask for tensors as a model would: tables, quantised matrices with their scales, the rest."""
    for name in names:
        base = name.removesuffix(".weight")
        if name.endswith(".engram.embed.weight"):
            weights.table(base)
        elif name != base and f"{base}.scale" in checkpoint.tensors:
            weights.linear(base)
        elif not name.endswith(".scale"):
            weights.vector(name)


def test_each_tensor_is_asked_for_once() -> None:
    checkpoint = open_checkpoint("tiny")
    weights = weights_of(checkpoint)
    weights.vector("norm.weight")
    with pytest.raises(AssertionError, match=r"norm\.weight is not in the checkpoint or was asked for twice"):
        weights.vector("norm.weight")
    with pytest.raises(AssertionError, match=r"ghost"):
        weights.linear("ghost")


def test_what_the_model_forgets_is_an_error() -> None:
    checkpoint = open_checkpoint("tiny")
    weights = weights_of(checkpoint)
    weights.check_only([name for name in checkpoint.tensors if name != "norm.weight"])
    with pytest.raises(CheckpointError, match=r"tensor norm\.weight: was not loaded, nor 0 others"):
        weights.finish()
    weights.check_only(["norm."])
    weights.finish()


@pytest.mark.parametrize("model", ["tiny", "v41-a"])
def test_progress_counts_what_is_read(model: str, golden_dir: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint("tiny" if model == "tiny" else golden_dir(model))
    bar = Recorder()
    weights = weights_of(checkpoint, bar)
    weights.check_only(UNREAD)
    kept = [name for name in checkpoint.tensors if not name.startswith(UNREAD)]
    assert bar.total == sum(checkpoint.tensors[name].bytes for name in kept if ".engram.embed." not in name)
    assert bar.done == 0
    take(weights, checkpoint, kept)
    weights.finish()
    assert bar.done == bar.total
    assert bar.ended


def test_tensors_are_views_of_the_mapped_file(golden_dir: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(golden_dir("v41-b-quant"))
    file = str(checkpoint.tensors["embed.weight"].file.resolve())
    for name in ("embed.weight", "layers.0.engram.embed.weight", "layers.0.ffn.experts.0.w1.scale"):
        address = checkpoint.read(name).data_ptr()
        assert address == checkpoint.read(name).data_ptr()
        assert any(start <= address < end for start, end in mappings(file))


def mappings(file: str) -> list[tuple[int, int]]:
    """Address ranges at which this process has mapped a file."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    return [(int(low, 16), int(high, 16)) for low, high in (line.split()[0].split("-") for line in lines)]


def test_names_may_have_a_prefix(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    before = load_file(tmp_path / "tiny" / WEIGHTS)
    save_file({f"model.{name}": tensor for name, tensor in before.items()}, tmp_path / "tiny" / WEIGHTS)
    checkpoint = Checkpoint(tmp_path / "tiny")
    assert checkpoint.tensors.keys() == before.keys()
    assert torch.equal(checkpoint.read("norm.weight"), before["norm.weight"])


def test_the_draft_block_of_v4_is_checked_where_it_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "v4"
    write_tiny(folder, family="deepseek_v4")
    tensors = load_file(folder / WEIGHTS)
    extra = {"mtp.0.enorm.weight": torch.ones(128).bfloat16(), "mtp.2.markov_head.markov_w1.weight": torch.ones(3, 4)}
    save_file(tensors | extra, folder / WEIGHTS)
    checkpoint = Checkpoint(folder)
    weights = weights_of(checkpoint)
    take(weights, checkpoint, tensors)
    weights.check_only(["mtp."])
    weights.finish()
    save_file(tensors | {"mtp.0.enorm.weight": torch.ones(64).bfloat16()}, folder / WEIGHTS)
    with pytest.raises(
        CheckpointError, match=r"mtp\.0\.enorm\.weight: expected shape \[128\] by config.json, found \[64\]"
    ):
        Checkpoint(folder)


def test_files_larger_than_memory_are_mapped(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("MemTotal", "SwapTotal")))
    file = tmp_path / "tiny" / WEIGHTS
    with file.open("r+b") as opened:
        opened.truncate(2 * memory)  # a sparse file: takes no room on the disk
    checkpoint = open_checkpoint("tiny")
    stored = replace(checkpoint.tensors["norm.weight"], file=file, offset=2 * memory - 256)
    checkpoint.tensors = {"norm.weight": stored}
    assert torch.equal(checkpoint.read("norm.weight"), torch.zeros(128).bfloat16())


def write_sparse(folder: Path) -> None:
    """Write a checkpoint like the tiny one, but with Engram tables of 2 GB each that take no room on the disk."""
    write_tiny(folder)
    values = tiny_config()
    text = values["text_config"]
    text["engram_vocab_size"] = TABLE_BYTES // text["engram_head_dim"] // 6
    engram = parse_config(values).engram
    assert engram is not None
    text["engram_num_embeddings"] = primes(engram).sum((1, 2)).tolist()
    (folder / "config.json").write_text(json.dumps(values))
    rows = dict(zip(engram.layer_ids, text["engram_num_embeddings"], strict=True))
    small = folder / WEIGHTS
    kept = {name: tensor for name, tensor in read_header(small).items() if ".engram.embed." not in name}
    header: dict[str, object] = {}
    data = bytearray()
    for name, tensor in load_file(small).items():
        if name in kept:
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            header[name] = {
                "dtype": kept[name].dtype,
                "shape": list(kept[name].shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
    end = len(data)
    for layer, count in rows.items():
        for part, dtype, width in (("weight", "F8_E4M3", 32), ("scale", "F8_E8M0", 1)):
            header[f"layers.{layer}.engram.embed.{part}"] = {
                "dtype": dtype,
                "shape": [count, width],
                "data_offsets": [end, end + count * width],
            }
            end += count * width
    start = json.dumps(header).encode()
    with small.open("wb") as file:
        file.write(len(start).to_bytes(8, "little") + start + data)
        file.truncate(8 + len(start) + end)


MEASURE = """
import sys
from pathlib import Path
from deepinfer import LLM, SamplingParams

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

settings = {"accelerator": "cpu", "max_model_len": 256, "max_num_seqs": 2}
LLM("tiny", **settings).generate([[5, 6, 7]], SamplingParams(max_tokens=2))  # libraries and kernels are loaded now
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = memory("VmRSS")
llm = LLM(sys.argv[1], **settings)
print(memory("VmHWM") - before)
done = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))
print(len(done[0].token_ids))
"""


def test_tables_of_two_gigabytes_are_not_copied(tmp_path: Path) -> None:
    write_sparse(tmp_path / "sparse")
    stored = Checkpoint(tmp_path / "sparse").tensors
    assert all(stored[f"layers.{layer}.engram.embed.weight"].bytes >= TABLE_BYTES for layer in (1, 2))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "sparse")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    growth, tokens = map(int, result.stdout.split())
    assert growth < LOADING_LIMIT
    assert tokens == 4
