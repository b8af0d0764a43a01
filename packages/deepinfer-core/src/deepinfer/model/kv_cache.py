"""Cache memory of one engine: its tensors, sized once, and the views that layers hand to ops.

Which block belongs to whom is the engine's `BlockPool`; what the bytes mean is the ops'.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, RecordFormat, RecordView, TailView, tail_ring
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.model.cache_layout import OVERLAPPING, cache_formats, cache_layout, tail_widths
from deepinfer.model.config import ModelConfig


@dataclass(frozen=True)
class LayerCache:
    """What one layer may read and write: its own window KV, and what its sources own (None where it has none)."""

    window: RecordView
    entries: RecordView | None = None
    index_keys: RecordView | None = None
    tail: TailView | None = None
    index_tail: TailView | None = None


class KVCache:
    """Tensors for `blocks` blocks of entries and index keys, `window_blocks` of window KV, and `states` sequences.

    `snapshots` copies of what compressors with overlapping groups remember may be kept beside the sequences' own;
    `self.snapshots` is 0 where the model has none.
    Memory is reserved here once and never grows.  Every tensor starts as zeros, so that a slot which was never
    written reads as a number and not as NaN.
    """

    def __init__(  # noqa: PLR0913 - sizes are keywords
        self,
        config: ModelConfig,
        ops: Ops,
        precision: Precision,
        *,
        blocks: int,
        window_blocks: int,
        states: int,
        snapshots: int = 0,
    ) -> None:
        self.config = config
        self.layout = cache_layout(config, precision)
        self.blocks, self.window_blocks, self.states = blocks, window_blocks, states
        self.snapshots = snapshots if any(layer.ratio == OVERLAPPING for layer in config.layers) else 0
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
                tails = [self._tail(layer.ratio, channels) for channels in tail_widths(config, layer)]
                cache = LayerCache(window, entries, keys, *tails)
            elif layer.kv_source is not None:
                source = self._layers[layer.kv_source]
                cache = LayerCache(window, source.entries, source.index_keys)
            else:
                cache = LayerCache(window)
            self._layers.append(cache)
        stages = config.draft.stages if config.draft else 0
        self._stages = [LayerCache(self._records(formats.window, window_slots, config.head_dim)) for _ in range(stages)]
        kept = [cache for layer, cache in zip(config.layers, self._layers, strict=True) if layer.ratio == OVERLAPPING]
        self.kept_tails = [view for cache in kept for view in (cache.tail, cache.index_tail) if view is not None]

    def layer(self, index: int) -> LayerCache:
        """The views of layer `index`."""
        return self._layers[index]

    def stage(self, index: int) -> LayerCache:
        """The views of draft stage `index`."""
        return self._stages[index]

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of entries and index keys."""
        for layer, cache in zip(self.config.layers, self._layers, strict=True):
            if layer.owns_kv:
                each = BLOCK_TOKENS // layer.ratio
                for view in (cache.entries, cache.index_keys):
                    if view is not None:
                        self._ops.copy_records(view, source * each, target * each, each)

    def save_tail(self, state: int, snapshot: int) -> None:
        """Keep what the compressors with overlapping groups remember of a sequence."""
        for tail in self.kept_tails:
            self._ops.copy_state(tail, state, self.states + snapshot)

    def load_tail(self, snapshot: int, state: int) -> None:
        """Give a sequence what `save_tail` kept."""
        for tail in self.kept_tails:
            self._ops.copy_state(tail, self.states + snapshot, state)

    def _records(self, format: RecordFormat, slots: int, width: int) -> RecordView:
        rope = self.config.rope.dim
        return RecordView(self._ops.new_records(format, slots, width, rope), format, width, rope)

    def _tail(self, ratio: int, channels: int) -> TailView:
        def zeros() -> Tensor:
            kept = self.snapshots if ratio == OVERLAPPING else 0
            shape = (self.states + kept + 1, tail_ring(ratio), channels)
            return torch.zeros(shape, dtype=self._precision.wide, device=self._ops.device)

        return TailView(zeros(), zeros())
