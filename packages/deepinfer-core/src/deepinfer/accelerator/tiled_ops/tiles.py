"""How a step is cut into tiles of rows, and what each tile needs of its batch.

What runs on a tile is the modules' beside this one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, Groups
from deepinfer.accelerator.ops.paged_cache import PreparedBatch

Rows = Tensor | None


@dataclass(frozen=True)
class Tile:
    """Rows `start` .. `start + count - 1` of a step, filled up with the last of them to the size of every tile.

    batch      these rows as a step of their own, prepared by the device
    rotations  for each rope table, complex [P, dim / 2]
    """

    start: int
    count: int
    batch: Batch
    rotations: dict[str, Tensor]


@dataclass(frozen=True)
class TiledBatch:
    """What the tiled ops derive from a batch once a step: `whole` holds numbers of rows and slots, which are exact."""

    size: int
    whole: PreparedBatch
    tiles: tuple[Tile, ...]


def tiles_of(batch: Batch) -> TiledBatch:
    """The tiles of a prepared batch."""
    assert isinstance(batch.prepared, TiledBatch), "Ops.prepare has not run on this batch"
    return batch.prepared


def piece(x: Tensor, start: int, size: int) -> Tensor:
    """Rows start .. start + size - 1 of x, contiguous as every tile is; behind the end the last row again."""
    rows = x[start : start + size]
    short = size - rows.shape[0]
    if not short:
        return rows.contiguous()
    return torch.cat((rows, rows[-1:].expand(short, *rows.shape[1:])))


def by_tiles(size: int, run: Callable[..., tuple[Tensor, ...]], *given: Rows) -> tuple[Tensor, ...]:
    """Run on tiles of `size` rows of what is given (None stays None), and join the rows of each result again."""
    count = next(x.shape[0] for x in given if x is not None)
    if count == 0:
        return run(*given)
    starts = range(0, count, size)
    results = [run(*(None if x is None else piece(x, start, size) for x in given)) for start in starts]
    if len(results) == 1:
        return tuple(part[:count] for part in results[0])
    return tuple(torch.cat(parts)[:count] for parts in zip(*results, strict=True))


def cut(batch: Batch, start: int, count: int, size: int) -> Batch:
    """Rows `start` .. `start + count - 1` as a step of their own, which the steps before it have prepared.

    Every row counts as the end of a group, so that shapes are fixed; who needs groups picks those that are.  A context
    bound of 0 keeps a device from choosing a body by the length of other sequences.
    """
    first = batch.query_starts - start
    behind = (first + batch.query_lens - count).clamp_min(0)
    numbers = torch.arange(size, device=batch.positions.device).clamp_max(count - 1)
    return replace(
        batch,
        token_ids=piece(batch.token_ids[: start + count], start, size),
        positions=piece(batch.positions[: start + count], start, size),
        sequences=piece(batch.sequences[: start + count], start, size),
        history=piece(batch.history[: start + count], start, size),
        query_starts=first.clamp(0, size - 1),
        context_lens=batch.context_lens - behind,
        groups={ratio: Groups(numbers, numbers) for ratio in batch.groups},
        logit_rows=numbers,
        max_context=0,
        decoder_rows=None,
        image_rows=None,
        image_features=None,
        history_images=None,
        prepared=None,
    )
