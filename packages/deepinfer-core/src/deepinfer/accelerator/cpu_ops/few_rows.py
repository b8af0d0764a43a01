"""What the CPU derives from a batch of few rows once a step; a batch prepared so takes numpy bodies throughout.

Which rows attend to which entries is `attention.py`'s; batches of many rows are the reference's.
"""

from dataclasses import dataclass, replace
from typing import override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Rope, Selection, tail_ring, tail_tokens
from deepinfer.accelerator.cpu_ops.arrays import FEW_ROWS, Floats, HostOps, Ints, Turns, pick
from deepinfer.accelerator.ops.paged_cache import PagedCacheOps

FEW_KEYS = 1 << 17
"""Rows times tokens of context up to which one piece holds all keys that an index scores."""


@dataclass(frozen=True)
class Tail:
    """Where one ratio's compressors find the groups that end in a step, and keep the step's tokens.

    stored [N, span]  places of the group's tokens, oldest first, in the flattened tail
    rows [N, span]    rows of the step that hold them instead, where `in_step`
    absent [N, span, 1] tokens before the start of the sequence
    places [T]        where each row's token goes in the flattened tail; rows that are not kept go to the spare state
    """

    stored: Ints
    rows: Ints
    in_step: NDArray[np.bool_]
    absent: NDArray[np.bool_]
    places: Ints


@dataclass(frozen=True)
class FewRows:
    """The arrays of a batch of few rows; compare `PreparedBatch`.

    tables [T, B]     block table of each row's sequence
    forward, backward for each rope table, complex [T, dim / 2]: the rotation of a row's position and its inverse
    """

    positions: Ints
    sequences: Ints
    tables: Ints
    window_slots: Ints
    window_reads: Ints
    encoder_bias: Floats
    decoder_bias: Floats
    forward: dict[str, Turns]
    backward: dict[str, Turns]
    everything: dict[int, Selection]
    tails: dict[int, Tail]


class CpuPreparing(HostOps, PagedCacheOps):
    """Tables of few rows."""

    @override
    def prepare(
        self, batch: Batch, window: int, ropes: tuple[Rope, ...], dense: tuple[int, ...], *, block: int = 0
    ) -> Batch:
        """Few rows: a quarter of the reference's time, and arrays that spare the layers their conversions."""
        count = batch.positions.shape[0]
        if count > FEW_ROWS or count * batch.max_context > FEW_KEYS:
            return super().prepare(batch, window, ropes, dense, block=block)
        positions, sequences = batch.positions.numpy(), batch.sequences.numpy()
        reads = positions[:, None] + np.arange(1 - window, 1)
        if block:
            first = positions[batch.query_starts.numpy()[sequences]]
            reads = first[:, None] + np.arange(-window, block)
        slots = self._window(batch, reads)
        encoder = np.where(slots >= 0, self.float_type(0), -np.inf)
        starts = batch.decoder_starts.numpy()[sequences][:, None]
        forward: dict[str, Turns] = {rope.name: self.turns(rope, positions) for rope in ropes}
        few = FewRows(
            positions=positions,
            sequences=sequences,
            tables=batch.block_tables.numpy()[sequences],
            window_slots=self._window(batch, positions[:, None])[:, 0] if block else slots[:, -1],
            window_reads=slots,
            encoder_bias=encoder,
            decoder_bias=np.where(reads >= starts, encoder, -np.inf),
            forward=forward,
            backward={name: turns.conj() for name, turns in forward.items()},
            everything={},
            tails={ratio: self._tail(batch, ratio) for ratio in batch.groups if ratio > 1},
        )
        for ratio in dense:
            entries = np.arange(batch.max_context // ratio)
            few.everything[ratio] = self.few_selection(
                few, np.where(entries < ((positions + 1) // ratio)[:, None], entries, -1), ratio
            )
        return replace(batch, prepared=few)

    @override
    def selection(self, batch: Batch, entries: Tensor, ratio: int) -> Selection:
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().selection(batch, entries, ratio)
        return self.few_selection(few, entries.numpy(), ratio)

    def few_selection(self, few: FewRows, entries: Ints, ratio: int) -> Selection:
        """Find slots and bias of entry numbers [T, K] (-1 = none); compare `selection`."""
        per_block = BLOCK_TOKENS // ratio
        blocks = pick(few.tables, np.minimum(np.maximum(entries // per_block, 0), few.tables.shape[1] - 1))
        present = entries >= 0
        slots = np.where(present, blocks * per_block + entries % per_block, -1)
        bias = np.where(present, self.float_type(0), -np.inf)
        return Selection(torch.from_numpy(entries), torch.from_numpy(slots), torch.from_numpy(bias))

    def turns(self, rope: Rope, positions: Ints) -> Turns:
        """Complex unit numbers [T, dim / 2]; compare `rotations`."""
        angles = positions.astype(self.float_type)[:, None] * self.array(rope.frequencies)
        turns = np.empty(angles.shape, np.complex64 if self.float_type is np.float32 else np.complex128)
        np.cos(angles, turns.real)
        np.sin(angles, turns.imag)
        return turns

    def _window(self, batch: Batch, positions: Ints) -> Ints:
        """Window slots of absolute positions [T, N] of each row's sequence; -1 where there is nothing to see."""
        sequences = batch.sequences.numpy()
        tables = batch.window_tables.numpy()[sequences]
        # Positions below 0 lie in block -1 or below, in front of every table.
        local = positions // BLOCK_TOKENS - batch.window_bases.numpy()[sequences][:, None]
        width = tables.shape[1]
        blocks = pick(tables, np.minimum(np.maximum(local, 0), width - 1))
        held = (local >= 0) & (local < width) & (blocks >= 0)
        if batch.window_starts is not None:
            held &= positions >= batch.window_starts.numpy()[sequences][:, None]
        return np.where(held, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS, -1)

    def _tail(self, batch: Batch, ratio: int) -> Tail:
        span, ring = tail_tokens(ratio), tail_ring(ratio)
        positions, sequences = batch.positions.numpy(), batch.sequences.numpy()
        states = batch.states.numpy()[sequences]
        kept = positions >= batch.context_lens.numpy()[sequences] - ring
        places = np.where(kept, states, -1) * ring + positions % ring
        ends = batch.groups[ratio].rows.numpy()
        if not ends.shape[0]:
            nothing = np.zeros((0, span), np.bool_)
            return Tail(ends, ends, nothing, nothing, places)
        back = np.arange(span - 1, -1, -1)
        tokens, rows = positions[ends][:, None] - back, ends[:, None] - back
        return Tail(
            stored=states[ends][:, None] * ring + tokens % ring,
            rows=rows,
            in_step=rows >= batch.query_starts.numpy()[sequences[ends]][:, None],
            absent=(tokens < 0)[:, :, None],
            places=places,
        )
