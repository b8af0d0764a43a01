"""Cache memory of one engine: its tensors, sized once, and the views that layers hand to ops.

Which block belongs to whom is the engine's `BlockPool`; what the bytes mean is the ops'.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.base import CacheLayout
from deepinfer.accelerator.batch import BLOCK_TOKENS, RecordFormat, RecordView, TailView, tail_ring
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.paged_cache import record_bytes
from deepinfer.accelerator.parameters import Precision
from deepinfer.model.config import LayerConfig, ModelConfig

LAYOUT_VERSION = 1


@dataclass(frozen=True)
class LayerCache:
    """What one layer may read and write: its own window KV, and what its sources own (None where it has none)."""

    window: RecordView
    entries: RecordView | None = None
    index_keys: RecordView | None = None
    tail: TailView | None = None
    index_tail: TailView | None = None


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


def _tails(config: ModelConfig, layer: LayerConfig) -> list[int]:
    """Channels of each tail of a layer: the compressor's and, for V4's ratio 4, the index compressor's."""
    if not layer.owns_kv or layer.ratio == 1:
        return []
    widths = [config.head_dim] + ([config.index_dim] if layer.ratio == 4 else [])
    return [tail_channels(layer.ratio, width) for width in widths]


def cache_layout(config: ModelConfig, precision: Precision) -> CacheLayout:
    """Add up the bytes of one block of each pool and of one sequence's state (model card: KV cache)."""
    formats = cache_formats(config, precision)
    window = record_bytes(formats.window, config.head_dim, config.rope.dim) * BLOCK_TOKENS
    block = 0
    state = 0
    wide = precision.wide.itemsize
    for layer in config.layers:
        if layer.owns_kv:
            count = BLOCK_TOKENS // layer.ratio
            block += count * record_bytes(formats.entries, config.head_dim, config.rope.dim)
            if layer.owns_index_keys:
                block += count * record_bytes(formats.index_keys, config.index_dim, config.rope.dim)
        state += sum(2 * wide * tail_ring(layer.ratio) * channels for channels in _tails(config, layer))
    windows = len(config.layers) + (config.draft.stages if config.draft else 0)
    text = f"{LAYOUT_VERSION} {formats} {config}"
    return CacheLayout(
        block_bytes=block,
        window_block_bytes=windows * window,
        state_bytes=state,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    )


class KVCache:
    """Tensors for `blocks` blocks of entries and index keys, `window_blocks` of window KV, and `states` sequences.

    Memory is reserved here once and never grows.  Every tensor starts as zeros, so that a slot which was never
    written reads as a number and not as NaN.
    """

    def __init__(
        self, config: ModelConfig, ops: Ops, precision: Precision, *, blocks: int, window_blocks: int, states: int
    ) -> None:
        self.config = config
        self.layout = cache_layout(config, precision)
        self.blocks, self.window_blocks, self.states = blocks, window_blocks, states
        self._ops = ops
        self._precision = precision
        formats = cache_formats(config, precision)
        window_slots = window_blocks * BLOCK_TOKENS
        self._layers: list[LayerCache] = []
        for layer in config.layers:
            window = self._records(formats.window, window_slots, config.head_dim)
            if layer.owns_kv:
                slots = blocks * (BLOCK_TOKENS // layer.ratio)
                entries = self._records(formats.entries, slots, config.head_dim)
                keys = self._records(formats.index_keys, slots, config.index_dim) if layer.owns_index_keys else None
                tails = [self._tail(layer.ratio, channels) for channels in _tails(config, layer)]
                cache = LayerCache(window, entries, keys, *tails)
            elif layer.kv_source is not None:
                source = self._layers[layer.kv_source]
                cache = LayerCache(window, source.entries, source.index_keys)
            else:
                cache = LayerCache(window)
            self._layers.append(cache)
        stages = config.draft.stages if config.draft else 0
        self._stages = [LayerCache(self._records(formats.window, window_slots, config.head_dim)) for _ in range(stages)]

    def layer(self, index: int) -> LayerCache:
        """The views of layer `index`."""
        return self._layers[index]

    def stage(self, index: int) -> LayerCache:
        """The views of draft stage `index`."""
        return self._stages[index]

    def _records(self, format: RecordFormat, slots: int, width: int) -> RecordView:
        rope = self.config.rope.dim
        return RecordView(self._ops.new_records(format, slots, width, rope), format, width, rope)

    def _tail(self, ratio: int, channels: int) -> TailView:
        def zeros() -> Tensor:
            shape = (self.states + 1, tail_ring(ratio), channels)
            return torch.zeros(shape, dtype=self._precision.wide, device=self._ops.device)

        return TailView(zeros(), zeros())
