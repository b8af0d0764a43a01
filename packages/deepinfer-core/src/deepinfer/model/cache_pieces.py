"""Pieces of cache memory as bytes: out of one engine, into slower memory, a file or another engine, and back.

What the bytes mean is the ops'; which pieces are worth moving is the engine's.
"""

from typing import Literal

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.model.kv_cache import KVCache

Part = Literal["entries", "encoder windows", "decoder windows", "tails"]
"""A block of entries and index keys; a window block's share of the layers that every row runs, and of the decoder half
and the draft stages; the compressors' memory in a snapshot."""


class CachePieces:
    """The pieces of one cache, by kind and number."""

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._device = device
        self._first_tail = cache.states
        layers = [(layer, cache.layer(layer.index)) for layer in cache.config.layers]
        entries = [
            (view.data, BLOCK_TOKENS // layer.ratio)
            for layer, views in layers
            if layer.owns_kv
            for view in (views.entries, views.index_keys)
            if view is not None
        ]
        stages = cache.config.draft.stages if cache.config.draft else 0
        decoder = [views.window.data for layer, views in layers if layer.decoder]
        decoder += [cache.stage(index).window.data for index in range(stages)]
        self._parts: dict[Part, list[tuple[Tensor, int]]] = {
            "entries": entries,
            "encoder windows": [(views.window.data, BLOCK_TOKENS) for layer, views in layers if not layer.decoder],
            "decoder windows": [(data, BLOCK_TOKENS) for data in decoder],
            "tails": [(tensor, 1) for tensor in cache.kept_tails],
        }

    def size(self, part: Part) -> int:
        """Bytes of one piece; 0 where the model has none of that kind."""
        return sum(tensor[:count].nbytes for tensor, count in self._parts[part])

    def pack(self, part: Part, number: int) -> Tensor:
        """Return the bytes of one piece: uint8 [size] in host memory."""
        pieces = [tensor[place].reshape(-1).view(torch.uint8) for tensor, place in self._places(part, number)]
        return torch.cat(pieces).cpu()

    def unpack(self, part: Part, number: int, data: Tensor) -> None:
        """Write what `pack` returned, here or in an engine of the same `CacheLayout.fingerprint`."""
        places = self._places(part, number)
        moved = data.to(self._device).split_with_sizes([tensor[place].nbytes for tensor, place in places])
        for (tensor, place), piece in zip(places, moved, strict=True):
            tensor[place] = piece.view(tensor.dtype).view(tensor[place].shape)

    def _places(self, part: Part, number: int) -> list[tuple[Tensor, slice]]:
        first = self._first_tail + number if part == "tails" else number
        return [(tensor, slice(first * count, (first + 1) * count)) for tensor, count in self._parts[part]]
