"""Models of random weights, drawn on the device in the checkpoint's formats: what `h200.py` measures needs no files.

`x12` is V4.1-Flash with twelve of its forty layers, one of each kind, at full size: as much as one H200 holds.
"""

import copy
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.model.config import EngramHashConfig, ModelConfig
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.draft import DraftStages
from deepinfer.model.engram_hash import primes
from deepinfer.model.inventory import TensorSpec, inventory
from deepinfer.model.read_config import parse_config
from deepinfer.model.tiny import FP4_SPREAD, FP8_SPREAD, LOGIT_SPREAD, SCALE_BIAS, tiny_config
from deepinfer.model.weights import Weights

RELEASED = Path(__file__).parents[1] / "packages/deepinfer-core/tests/data/configs/v41/config.json"
LAYERS = {
    "x12": (0, 1, 2, 3, 4, 5, 8, 20, 21, 22, 23, 24),
    "x4": (0, 2, 20, 24),
}
"""Layers of V4.1-Flash: two of window alone; sources of ratio 2 (2, 8) with readers; the decoder's source (20) with
readers, and one that chooses anew (24).  `x4` has one of each that owns anything."""
TABLE_ROWS = 16_000_000
"""Rows of an Engram table, cut from 384 million: random rows of either lie nowhere near one another."""
NOT_DRAWN = ("vision.", "aligner.", "image_")


def make_config(name: str) -> ModelConfig:
    """Return the configuration `tiny`, `x4` or `x12`."""
    if name == "tiny":
        return parse_config(tiny_config())
    values = json.loads(RELEASED.read_text(encoding="utf-8"))
    values.pop("vision_config")
    text, chosen = values["text_config"], LAYERS[name]
    place = {layer: index for index, layer in enumerate(chosen)}

    def renumbered(layers: Sequence[int]) -> list[int]:
        return [place[layer] for layer in layers if layer in place]

    text["num_hidden_layers"] = len(chosen)
    text["compress_ratios"] = [text["compress_ratios"][layer] for layer in chosen] + [0, 0, 0]
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        text[key] = renumbered(text[key])
    text["candidate_source_layer_id"] = place[text["candidate_source_layer_id"]]
    text["dspark_target_layer_ids"] = [len(chosen) - 3 + stage for stage in range(3)]
    if text["engram_layer_ids"]:
        heads, orders = text["engram_n_heads"], text["engram_max_ngram_size"] - 1
        text["engram_vocab_size"] = TABLE_ROWS // (heads * orders)
        text["engram_num_embeddings"] = primes(_hashing(text)).sum((1, 2)).tolist()
    else:
        for key in [key for key in text if key.startswith("engram_")]:
            del text[key]
    return parse_config(values)


def make_model(
    config: ModelConfig, ops: Ops, accelerator: Accelerator, *, drafts: bool
) -> tuple[DeepSeek, DraftStages | None]:
    """Draw a model, and its draft stages; the same weights every time, whatever the ops."""
    weights = Weights(DrawnCheckpoint(config, accelerator.device), ops, accelerator)  # type: ignore[arg-type]
    model = DeepSeek(config, weights, ops)
    stages = DraftStages(model, weights) if drafts else None
    weights.check_only(NOT_DRAWN if drafts else (*NOT_DRAWN, "mtp."))
    weights.finish()
    return model, stages


def shortened(model: DeepSeek, count: int) -> DeepSeek:
    """Return the model with its first layers alone, over the same weights."""
    short = copy.copy(model)
    short.blocks = model.blocks[:count]
    short.taps = ()
    return short


class DrawnCheckpoint:
    """What `Weights` reads of a checkpoint, with tensors that are drawn when they are asked for."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self.specs = inventory(config)
        self.tensors = {name: spec for name, spec in self.specs.items() if not spec.optional}
        self._generator = torch.Generator(device)
        self._device = device

    def read(self, name: str) -> Tensor:
        """Draw one tensor; its name is its seed."""
        self._generator.manual_seed(zlib.crc32(name.encode()))
        return _draw(name, self.specs, self._generator)

    def announce(self, names: Iterable[str]) -> None:
        """Nothing is fetched from anywhere."""

    def where(self, name: str) -> str:
        """Name a tensor in an error."""
        return f"random weights: tensor {name}"

    @cached_property
    def compressed_ids(self) -> Tensor | None:
        """Ids of the n-gram memory."""
        engram = self.config.engram
        return None if engram is None else torch.arange(self.config.vocab_size) % engram.compressed_vocab_size


def _hashing(text: dict[str, Any]) -> EngramHashConfig:
    return EngramHashConfig(
        layer_ids=tuple(text["engram_layer_ids"]),
        max_ngram=text["engram_max_ngram_size"],
        heads=text["engram_n_heads"],
        head_dim=text["engram_head_dim"],
        vocab_size=text["engram_vocab_size"],
        compressed_vocab_size=text["engram_compressed_vocab_size"],
        pad_token_id=text["engram_pad_token_id"],
    )


def _draw(name: str, specs: dict[str, TensorSpec], generator: torch.Generator) -> Tensor:
    """Draw one tensor so that activations keep a size near 1 through the stack; n-gram tables lie on the host."""
    spec, last = specs[name], name.rsplit(".", 1)[-1]
    shape, dtype = spec.shape, spec.dtypes[0]
    device = torch.device("cpu") if ".engram.embed." in name else generator.device

    def normal(spread: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device) * spread

    if dtype == "F8_E4M3" and device != generator.device:
        return torch.randint(0, 120, shape, generator=generator, device=generator.device, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        ).to(device)  # fmt: skip
    if dtype == "F8_E4M3":
        return normal(FP8_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)
    if dtype == "I8":
        return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8).view(torch.int8)
    if dtype == "F8_E8M0":
        return _scales(name, specs, generator).to(device)
    if dtype == "F32":
        if last.endswith("_scale"):
            return 0.7 + normal(0.1)
        spreads = {"attn_sink": 1.5, "ape": 0.5, "bias": 0.05, "bias_vl": 0.05}
        return normal(spreads.get(last, 0.7 if last.endswith("_base") else shape[-1] ** -0.5))
    if "norm" in name or last in ("q_weight", "k_weight"):
        return (1 + normal(0.1)).bfloat16()
    spread = LOGIT_SPREAD * shape[-1] ** -0.5 if name == "head.weight" else shape[-1] ** -0.5
    return normal(1.0 if "embed" in name else spread).bfloat16()


def _scales(name: str, specs: dict[str, TensorSpec], generator: torch.Generator) -> Tensor:
    """Scales that bring codes to 1 / sqrt(columns) (rows of n-gram tables: to 1), each off by up to a factor of 2."""
    weight = specs[f"{name.removesuffix('.scale')}.weight"]
    fp4 = weight.dtypes[0] == "I8"
    wanted = 1.0 if ".embed." in name else (weight.shape[1] * (2 if fp4 else 1)) ** -0.5
    exponent = round(math.log2(wanted / (FP4_SPREAD if fp4 else FP8_SPREAD))) + SCALE_BIAS
    shape = specs[name].shape
    drawn = torch.randint(exponent - 1, exponent + 1, shape, generator=generator, device=generator.device)
    return drawn.to(torch.uint8).view(torch.float8_e8m0fnu)
