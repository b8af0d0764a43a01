"""Pieces of cache memory as bytes: out of one engine, into slower memory, a file or another engine, and back.

What the bytes mean is the ops'; which pieces are worth moving is the engine's.
"""

from typing import Literal

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, RecordView
from deepinfer.accelerator.ops import Ops
from deepinfer.model.kv_cache import KVCache

Part = Literal["entries", "encoder windows", "decoder windows", "tails"]
"""A block of entries and index keys; a window block's share of the layers that every row runs, and of the decoder half
and the draft stages; the compressors' memory in a snapshot."""


class CachePieces:
    """The pieces of one cache, by kind and number."""

    def __init__(self, cache: KVCache, ops: Ops) -> None:
        self._ops = ops
        self._first_tail, self._tails = cache.states, cache.kept_tails
        layers = [(layer, cache.layer(layer.index)) for layer in cache.config.layers]
        entries = [
            (view, BLOCK_TOKENS // layer.ratio)
            for layer, views in layers
            if layer.owns_kv
            for view in (views.entries, views.index_keys)
            if view is not None
        ]
        stages = cache.config.draft.stages if cache.config.draft else 0
        decoder = [views.window for layer, views in layers if layer.decoder]
        decoder += [cache.stage(index).window for index in range(stages)]
        self._records: dict[Part, list[tuple[RecordView, int]]] = {
            "entries": entries,
            "encoder windows": [(views.window, BLOCK_TOKENS) for layer, views in layers if not layer.decoder],
            "decoder windows": [(window, BLOCK_TOKENS) for window in decoder],
        }

    def size(self, part: Part) -> int:
        """Bytes of one piece; 0 where the model has none of that kind."""
        return sum(self._sizes(part))

    def pack(self, part: Part, number: int) -> Tensor:
        """Return the bytes of one piece: uint8 [size] in host memory."""
        ops = self._ops
        if part == "tails":
            pieces = [ops.pack_state(tail, self._first_tail + number) for tail in self._tails]
        else:
            pieces = [ops.pack_records(view, number * count, count) for view, count in self._records[part]]
        return torch.cat(pieces).cpu()

    def unpack(self, part: Part, number: int, data: Tensor) -> None:
        """Write what `pack` returned, here or in an engine of the same `CacheLayout.fingerprint`."""
        pieces = data.to(self._ops.device).split_with_sizes(self._sizes(part))
        if part == "tails":
            for tail, piece in zip(self._tails, pieces, strict=True):
                self._ops.unpack_state(tail, self._first_tail + number, piece)
            return
        for (view, count), piece in zip(self._records[part], pieces, strict=True):
            self._ops.unpack_records(view, number * count, count, piece)

    def _sizes(self, part: Part) -> list[int]:
        if part == "tails":
            return [2 * tail.values[0].nbytes for tail in self._tails]
        return [view.data[:count].nbytes for view, count in self._records[part]]
