"""How large each kind of cache memory is for one model and precision, and in which formats it is held.

The memory itself is `kv_cache.py`'s; what the bytes mean is the ops'.
"""

import hashlib
from dataclasses import dataclass

import torch

from deepinfer.accelerator.base import CacheLayout
from deepinfer.accelerator.batch import BLOCK_TOKENS, RecordFormat, tail_ring
from deepinfer.accelerator.ops.paged_cache import record_bytes
from deepinfer.accelerator.parameters import Precision
from deepinfer.model.config import LayerConfig, ModelConfig

LAYOUT_VERSION = 2

OVERLAPPING = 4
"""The ratio whose groups overlap: its compressors remember a whole group at a block border, the others nothing."""


@dataclass(frozen=True)
class CacheFormats:
    """The record format of each kind of cache for one model and precision."""

    window: RecordFormat
    entries: RecordFormat
    index_keys: RecordFormat


def cache_formats(config: ModelConfig, precision: Precision) -> CacheFormats:
    """Choose the formats: the model's records, or its activation dtype when the cache is "model"."""
    if precision.cache == "model":
        names: dict[torch.dtype, RecordFormat] = {
            torch.bfloat16: "bfloat16",
            torch.float32: "float32",
            torch.float64: "float64",
        }
        plain = names[precision.dtype]
        return CacheFormats(plain, plain, plain)
    if config.family == "deepseek_v4":
        return CacheFormats("fp8_rope", "fp8_rope", "fp4_group32")
    return CacheFormats("fp8_group32", "fp4_group16" if config.fp4_entries else "fp8_group32", "fp4_group32")


def tail_channels(ratio: int, width: int) -> int:
    """Channels of a compressor's scores and values: ratio 4 makes two halves (previous and current group)."""
    return 2 * width if ratio == 4 else width


def tail_widths(config: ModelConfig, layer: LayerConfig) -> list[int]:
    """Channels of each tail of a layer: the compressor's and, for V4's ratio 4, the index compressor's."""
    if not layer.owns_kv or layer.ratio == 1:
        return []
    widths = [config.head_dim] + ([config.index_dim] if layer.ratio == 4 else [])
    return [tail_channels(layer.ratio, width) for width in widths]


def cache_layout(config: ModelConfig, precision: Precision) -> CacheLayout:
    """Add up the bytes of one block of each pool and of one sequence's state (model card: KV cache)."""
    formats = cache_formats(config, precision)
    window = record_bytes(formats.window, config.head_dim, config.rope.dim) * BLOCK_TOKENS
    block = state = snapshot = 0
    wide = precision.wide.itemsize
    for layer in config.layers:
        if layer.owns_kv:
            count = BLOCK_TOKENS // layer.ratio
            block += count * record_bytes(formats.entries, config.head_dim, config.rope.dim)
            if layer.owns_index_keys:
                block += count * record_bytes(formats.index_keys, config.index_dim, config.rope.dim)
        tails = sum(2 * wide * tail_ring(layer.ratio) * channels for channels in tail_widths(config, layer))
        state += tails
        snapshot += tails if layer.ratio == OVERLAPPING else 0
    windows = len(config.layers) + (config.draft.stages if config.draft else 0)
    text = f"{LAYOUT_VERSION} {formats} {config}"
    return CacheLayout(
        block_bytes=block,
        window_block_bytes=windows * window,
        state_bytes=state,
        snapshot_bytes=snapshot,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    )
