"""What the CPU derives from a batch of few rows once a step; a batch prepared so takes the bodies of `kernels.py`.

Which rows attend to which entries is `attention.py`'s; batches of many rows are the reference's.
"""

from dataclasses import dataclass, replace
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Rope, Selection
from deepinfer.accelerator.cpu_ops.arrays import FEW_ROWS, HostOps
from deepinfer.accelerator.ops.paged_cache import PagedCacheOps

FEW_KEYS = 1 << 17
"""Rows times tokens of context up to which one piece holds all keys that an index scores."""


@dataclass(frozen=True)
class FewRows:
    """What layers share in a batch of few rows; compare `PreparedBatch`.

    window_slots [T], window_reads [T, N]  where each row's window KV goes, and what it sees; -1 = nothing
    encoder_bias, decoder_bias [T, N]      the same as masks, 0 or -inf; the decoder's hides more
    forward, backward   for each rope table, complex [T, dim / 2]: the rotation of a row's position and its inverse
    everything          for each ratio at which nothing is left out: all visible entries
    """

    window_slots: Tensor
    window_reads: Tensor
    encoder_bias: Tensor
    decoder_bias: Tensor
    forward: dict[str, Tensor]
    backward: dict[str, Tensor]
    everything: dict[int, Selection]


class CpuPreparing(HostOps, PagedCacheOps):
    """Tables of few rows."""

    @override
    def prepare(
        self, batch: Batch, window: int, ropes: tuple[Rope, ...], dense: tuple[int, ...], *, block: int = 0
    ) -> Batch:
        """Few rows: a tenth of the reference's time."""
        count = batch.positions.shape[0]
        if self.kernels is None or count > FEW_ROWS or count * batch.max_context > FEW_KEYS:
            return super().prepare(batch, window, ropes, dense, block=block)
        few = self._window_tables(batch, window, block)
        for rope in ropes:
            few.forward[rope.name] = self.turns(rope, batch.positions, inverse=False)
            few.backward[rope.name] = self.turns(rope, batch.positions, inverse=True)
        for ratio in dense:
            few.everything[ratio] = self.locate(batch, self.whole(count, batch.max_context // ratio), ratio, fill=True)
        return replace(batch, prepared=few)

    def _window_tables(self, batch: Batch, window: int, block: int) -> FewRows:
        """Places of the window before each row, or before each sequence's first row and of its whole block."""
        count = batch.positions.shape[0]
        reads = window + block
        slots, own = self.whole(count, reads), self.whole(count)
        encoder, decoder = self.empty(count, reads), self.empty(count, reads)
        tables = batch.window_tables.contiguous()
        self.bodies.window_tables(
            *(count, reads, -window if block else 1 - window, batch.positions.data_ptr(), batch.sequences.data_ptr()),
            *(batch.query_starts.data_ptr() if block else 0, tables.data_ptr(), tables.shape[1]),
            *(batch.window_bases.data_ptr(), batch.decoder_starts.data_ptr()),
            *(0 if batch.window_starts is None else batch.window_starts.data_ptr(), BLOCK_TOKENS),
            *(slots.data_ptr(), own.data_ptr(), encoder.data_ptr(), decoder.data_ptr()),
        )
        return FewRows(own, slots, encoder, decoder, {}, {}, {})

    def turns(self, rope: Rope, positions: Tensor, *, inverse: bool) -> Tensor:
        """Unit numbers exp(+- i * position * frequency) as pairs [T, dim]; compare `rotations`."""
        turns, frequencies = self.empty(positions.shape[0], rope.dim), self.widen(rope.frequencies)
        self.bodies.turns(
            *(positions.shape[0], rope.dim // 2, inverse, positions.data_ptr()),
            *(frequencies.data_ptr(), turns.data_ptr()),
        )
        return turns

    @override
    def selection(self, batch: Batch, entries: Tensor, ratio: int) -> Selection:
        if not isinstance(batch.prepared, FewRows):
            return super().selection(batch, entries, ratio)
        return self.locate(batch, entries.contiguous(), ratio, fill=False)

    def locate(self, batch: Batch, entries: Tensor, ratio: int, *, fill: bool) -> Selection:
        """Find slots and bias of entry numbers [T, K] (-1 = none); `fill` writes them first: all that a row sees."""
        slots, bias = torch.empty_like(entries), self.empty(*entries.shape)
        tables = batch.block_tables.contiguous()
        self.bodies.locate(
            *(*entries.shape, ratio, BLOCK_TOKENS // ratio, fill, batch.positions.data_ptr()),
            *(batch.sequences.data_ptr(), tables.data_ptr(), tables.shape[1]),
            *(entries.data_ptr(), slots.data_ptr(), bias.data_ptr()),
        )
        return Selection(entries, slots, bias)
