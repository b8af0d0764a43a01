"""Attention and the index by tiles of rows and of keys: sums over keys run in the order of the keys, tile after tile.

A tile in which a row sees nothing adds exact zeros to it, so it does not matter how far other sequences reach.
"""

from dataclasses import replace
from typing import override

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.accelerator.batch import Batch, RecordView, Rope, Selection
from deepinfer.accelerator.ops.number_formats import fp4_round, hadamard
from deepinfer.accelerator.ops.paged_cache import PLAIN_FORMATS
from deepinfer.accelerator.ops.sparse_attention import IndexRequest, KeySources, SparseAttentionOps
from deepinfer.accelerator.tiled_ops.cache import TiledCache
from deepinfer.accelerator.tiled_ops.tiles import Tile, piece, tiles_of


class TiledAttention(TiledCache):
    """The core over window and entries, and the choice of entries in ascending order."""

    @override
    def attention(self, q: Tensor, keys: KeySources, sink: Tensor, batch: Batch, rope: Rope) -> Tensor:
        outputs = [self._attend_tile(q, keys, sink, batch, tile, rope) for tile in tiles_of(batch).tiles]
        return torch.cat(outputs) if outputs else q

    def _attend_tile(self, q: Tensor, keys: KeySources, sink: Tensor, batch: Batch, tile: Tile, rope: Rope) -> Tensor:
        """One tile's rows of the result, in the activation dtype."""
        tiled = tiles_of(batch)
        whole, size = tiled.whole, tiled.size
        bias = whole.decoder_bias if keys.decoder else whole.encoder_bias
        seen = [(keys.window, self._own(whole.window_reads, tile, size), self._own(bias, tile, size))]
        if keys.entries is not None and keys.selection is not None:
            slots, hidden = (self._own(part, tile, size) for part in (keys.selection.slots, keys.selection.bias))
            seen += [(keys.entries, *part) for part in _key_tiles(slots, hidden, self.tile_keys)]
        queries = self.widen(self._own(q, tile, size)) * q.shape[2] ** -0.5
        out = self._attend_parts(queries, seen, sink)
        return self.narrow(_turn_back(out, tile.rotations[rope.name]))[: tile.count]

    def _attend_parts(self, q: Tensor, seen: list[tuple[RecordView, Tensor, Tensor]], sink: Tensor) -> Tensor:
        """Attend from scaled q [P, H, D] to parts of keys (records, slots [P, W], bias [P, W]), in their order."""
        parts = []
        largest = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
        for view, slots, bias in seen:
            vectors = self.read_records(view, slots)
            scores = torch.bmm(q, vectors.transpose(1, 2)) + bias.unsqueeze(1)
            largest = torch.maximum(largest, scores.amax(2, keepdim=True))
            parts.append((scores, vectors))
        total = torch.exp(sink.view(1, -1, 1) - largest)
        out = torch.zeros_like(q)
        for scores, vectors in parts:
            weights = torch.exp(scores - largest)
            total = total + weights.sum(2, keepdim=True)
            out += torch.bmm(weights, vectors)
        return out / total

    @override
    def select_entries(self, request: IndexRequest, batch: Batch) -> tuple[Selection, Tensor | None]:
        """In ascending order, as `everything` has them: sums over entries then do not depend on how they were found."""
        chosen, blocks = SparseAttentionOps.select_entries(self, request, batch)
        last = torch.iinfo(torch.int64).max
        order = chosen.entries.masked_fill(chosen.entries < 0, last).argsort(dim=1, stable=True)
        parts = (chosen.entries, chosen.slots, chosen.bias)
        return Selection(*(part.gather(1, order) for part in parts)), blocks

    @override
    def _index_queries(self, request: IndexRequest, batch: Batch) -> Tensor:
        tiled, turned = tiles_of(batch), []
        for tile in tiled.tiles:
            own = self._own(request.query, tile, tiled.size).to(self.wide, copy=True)
            turned.append(_turn(own, tile.rotations[request.rope.name])[: tile.count])
        query = torch.cat(turned) if turned else self.widen(request.query)
        if request.keys.format in PLAIN_FORMATS:
            return query
        return fp4_round(hadamard(query) if request.transform else query, 32)

    @override
    def _index_scores(self, request: IndexRequest, query: Tensor, batch: Batch, rows: slice, count: int) -> Tensor:
        total, size = min(rows.stop, query.shape[0]), self.tile_rows
        scores = []
        for start in range(rows.start, total, size):
            given = (request.weights, query, batch.positions, batch.sequences)
            weights, own, positions, sequences = (piece(part[:total], start, size) for part in given)
            step = replace(batch, positions=positions, sequences=sequences, prepared=None)
            candidates = None if request.candidates is None else piece(request.candidates[:total], start, size)
            found = self._score_tile(replace(request, weights=weights), own, step, count)
            scores.append(self._hide(found, request, positions, candidates)[: total - start])
        return torch.cat(scores)

    def _score_tile(self, request: IndexRequest, query: Tensor, batch: Batch, count: int) -> Tensor:
        """Scores [P, count] of one tile of rows, whether an entry is visible or not."""
        scores = []
        for start in range(0, count, self.tile_keys):
            numbers = torch.arange(start, start + self.tile_keys, device=query.device).expand(query.shape[0], -1)
            keys = self.read_records(request.keys, self.selection(batch, numbers, request.ratio).slots)
            products = torch.relu_(torch.bmm(query, keys.transpose(1, 2)))
            scores.append(torch.bmm(request.weights.to(products.dtype).unsqueeze(1), products).squeeze(1))
        return torch.cat(scores, 1)[:, :count] if scores else query.new_zeros((query.shape[0], 0))


def _key_tiles(slots: Tensor, bias: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Slots and bias [P, K] in columns of `size`; behind the end nothing is seen."""
    if slots.shape[1] == 0:
        return []
    short = -slots.shape[1] % size
    slots, bias = functional.pad(slots, (0, short), value=-1), functional.pad(bias, (0, short), value=-torch.inf)
    return list(zip(slots.split(size, 1), bias.split(size, 1), strict=True))


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the last channels of x [P, H, C] in place, as `rotate_`, by real products, which round wherever they lie.

    A vectorised complex product fuses some of its roundings, and its last elements do not.
    """
    cos, sin = turns.real.unsqueeze(1), turns.imag.unsqueeze(1)
    pairs = x[..., -2 * turns.shape[-1] :].unflatten(-1, (-1, 2))
    first, second = pairs[..., 0].clone(), pairs[..., 1].clone()
    pairs[..., 0] = first * cos - second * sin
    pairs[..., 1] = first * sin + second * cos
    return x


def _turn_back(x: Tensor, turns: Tensor) -> Tensor:
    """The inverse of `_turn`."""
    return _turn(x, turns.conj().resolve_conj())
