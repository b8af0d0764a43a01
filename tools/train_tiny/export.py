"""Writes a trained network as a checkpoint in the released formats, and reads one back as the values it stands for.

Which tensor has which format is the inventory's; the same rounding was in the last part of training, so that what is
written is what was trained.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.accelerator.ops.number_formats import (
    E4M3_MAX,
    FP8_FLOOR,
    dequantise_fp8_blocks,
    dequantise_rows,
    fp4_quantise,
    fp8_quantise,
    pack_nibbles,
    power_of_two,
    power_of_two_bytes,
)
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.inventory import TensorSpec, inventory
from deepinfer.model.read_config import parse_config
from network import Network
from rounding import GROUP


def checkpoint_tensors(network: Network, specs: dict[str, TensorSpec]) -> dict[str, Tensor]:
    """All tensors of a checkpoint with these specs, which decide between formats and plain float32 or bfloat16."""
    made: dict[str, Tensor] = {}
    for name, spec in specs.items():
        if name.endswith(".scale"):
            continue
        weight = _parameter(network, name).detach().cpu().float()
        assert tuple(weight.shape) == spec.shape or spec.dtypes[0] == "I8", name
        match spec.dtypes[0]:
            case "F8_E4M3":
                rows = ".engram.embed." in name
                made[name], made[f"{name.removesuffix('weight')}scale"] = _fp8_rows(weight) if rows else _fp8(weight)
            case "I8":
                codes, scale = fp4_quantise(weight, GROUP)
                made[name] = pack_nibbles(codes).view(torch.int8)
                made[f"{name.removesuffix('weight')}scale"] = scale.view(torch.float8_e8m0fnu)
            case dtype:
                made[name] = weight if dtype == "F32" else weight.bfloat16()
    return {name: made[name].contiguous() for name in specs}


def write_checkpoint(network: Network, values: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json; an old folder goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = checkpoint_tensors(network, inventory(parse_config(values)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {f"{name}_token": tokenizer.id_to_token(token) for token, name in enumerate(("bos", "eos", "pad"))}
    longest = values["text_config"]["max_position_embeddings"]
    card = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")


def read_checkpoint(network: Network, folder: Path) -> None:
    """Give a network the values that a checkpoint of its configuration stands for."""
    checkpoint = Checkpoint(folder)
    for name in checkpoint.specs:
        if not name.endswith(".scale"):
            _parameter(network, name).data.copy_(_values(checkpoint, name))


def _values(checkpoint: Checkpoint, name: str) -> Tensor:
    data, scale = checkpoint.read(name), f"{name.removesuffix('weight')}scale"
    if scale not in checkpoint.tensors:
        return data.float()
    if data.dtype == torch.int8 or ".engram.embed." in name:
        return dequantise_rows(data, checkpoint.read(scale))
    return dequantise_fp8_blocks(data, checkpoint.read(scale), GROUP)


def _parameter(network: Network, name: str) -> Tensor:
    """A tensor of the checkpoint; one of an expert is a slice of the stack of all."""
    head, found, tail = name.partition(".experts.")
    if not found or ".shared_experts." in name:
        return network.weight(name)
    number, matrix = tail.split(".")[:2]
    return network.weight(f"{head}.experts.{matrix}")[int(number)]


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    amax = blocks.abs().amax((1, 3)).clamp_min(FP8_FLOOR)
    byte = power_of_two_bytes(amax * (1.0 / E4M3_MAX))
    scaled = (blocks / power_of_two(byte)[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.reshape(weight.shape).to(torch.float8_e4m3fn), byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def _fp8_rows(table: Tensor) -> tuple[Tensor, Tensor]:
    codes, byte = fp8_quantise(table, GROUP)
    return codes, byte.to(torch.uint8).view(torch.float8_e8m0fnu)
