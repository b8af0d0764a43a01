"""Cached records and compressors by tiles: each tile is a step of its own, in order, as a short chunk would be."""

from dataclasses import replace
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, Groups, RecordView, Rope, Selection, TailView
from deepinfer.accelerator.ops.paged_cache import PagedCacheOps, prepared_of, rotations
from deepinfer.accelerator.tiled_ops.rows import TiledRows
from deepinfer.accelerator.tiled_ops.tiles import Tile, TiledBatch, cut, piece, tiles_of


class TiledCache(TiledRows):
    """Reads and writes of paged memory."""

    @override
    def prepare(
        self, batch: Batch, window: int, ropes: tuple[Rope, ...], dense: tuple[int, ...], *, block: int = 0
    ) -> Batch:
        base, total = super().prepare, batch.positions.shape[0]
        # The rows of a draft block see one another, so a tile holds whole blocks.
        count = self.tile_rows // block * block or block if block else self.tile_rows
        size = -(-count // self.tile_rows) * self.tile_rows
        tiles = []
        for start in range(0, total, count):
            own = min(count, total - start)
            part = base(cut(batch, start, own, size), window, ropes, (), block=block)
            turns: dict[str, Tensor] = {rope.name: rotations(rope, part.positions, self.wide) for rope in ropes}
            tiles.append(Tile(start, own, part, turns))
        whole = PagedCacheOps.prepare(self, batch, window, (), dense, block=block)
        return replace(batch, prepared=TiledBatch(size, prepared_of(whole), tuple(tiles)))

    @override
    def everything(self, batch: Batch, ratio: int) -> Selection:
        return tiles_of(batch).whole.everything[ratio]

    @override
    def write_window(self, kv: Tensor, norm: Tensor, eps: float, batch: Batch, rope: Rope, view: RecordView) -> None:
        tiled = tiles_of(batch)
        for tile in tiled.tiles:
            super().write_window(self._own(kv, tile, tiled.size), norm, eps, tile.batch, rope, view)

    @override
    def write_entries(
        self, latents: Tensor, batch: Batch, ratio: int, rope: Rope, view: RecordView, *, transform: bool = False
    ) -> None:
        groups, size = batch.groups[ratio], self.tile_rows
        for start in range(0, groups.rows.shape[0], size):
            own = Groups(piece(groups.rows, start, size), piece(groups.slots, start, size))
            part = replace(batch, groups={ratio: own}, prepared=None)
            super().write_entries(piece(latents, start, size), part, ratio, rope, view, transform=transform)

    @override
    def compress(
        self, projected: Tensor, bias: Tensor | None, batch: Batch, ratio: int, tail: TailView | None
    ) -> Tensor:
        if ratio == 1:
            return super().compress(projected, bias, batch, ratio, tail)
        tiled = tiles_of(batch)
        latents = []
        for tile in tiled.tiles:
            own = self._own(projected, tile, tiled.size)
            latents.append(super().compress(own, bias, tile.batch, ratio, tail)[: tile.count])
        return torch.cat(latents).index_select(0, batch.groups[ratio].rows)

    @override
    def rotate_queries(self, q: Tensor, batch: Batch, rope: Rope, norm_eps: float | None) -> Tensor:
        tiled, rotated = tiles_of(batch), []
        for tile in tiled.tiles:
            own = self._own(q, tile, tiled.size)
            rotated.append(super().rotate_queries(own, tile.batch, rope, norm_eps)[: tile.count])
        return torch.cat(rotated) if rotated else q

    def _own(self, x: Tensor, tile: Tile, size: int) -> Tensor:
        """A tile's rows of x."""
        return piece(x[: tile.start + tile.count], tile.start, size)
