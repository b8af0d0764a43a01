"""A `Plan` becomes a `Batch`: host columns are laid into one array, copied to the device once, and cut into tensors.

Which sequences run, and their blocks, are the `Scheduler`'s.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Groups
from deepinfer.engine.config import window_blocks
from deepinfer.engine.model_runner import Transfer
from deepinfer.engine.plan import Plan
from deepinfer.engine.sequence import Integers, SequenceTable, blocks_for
from deepinfer.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step in flight, behind which the next one is built: `token_ids` [L] are what it draws, known to the device."""

    plan: Plan
    batch: Batch
    token_ids: Tensor


class BatchBuilder:
    """Builds batches for one model from one table of sequences.

    While the same sequences decode, what does not change from step to step stays on the device.
    """

    def __init__(self, model: ModelConfig, table: SequenceTable, transfer: Transfer) -> None:
        self._ratios = model.ratios
        self._window = model.window
        self._decoding_windows = window_blocks(1, model.window)
        self._table = table
        self._transfer = transfer
        self._rows: Integers | None = None
        self._fixed: list[Tensor] = []
        self._version = -1
        self._tables: list[Tensor] = []

    def build(self, plan: Plan, ahead: Ahead | None = None) -> Batch:
        """Lay out the rows of `plan`, in its order; the newest tokens of those in `ahead` are read on the device."""
        if ahead is None:
            return self._decoding(plan, None) if plan.decoding else self._mixed(plan)
        if plan.decoding and ahead.plan.decoding and plan.rows is ahead.plan.rows:
            return self._decoding(plan, ahead)
        batch = self._decoding(plan, None) if plan.decoding else self._mixed(plan)
        return self._filled(batch, plan, ahead)

    def _filled(self, batch: Batch, plan: Plan, ahead: Ahead) -> Batch:
        """Put the tokens that `ahead` draws, and those before them, where the host has left stale ones."""
        places = np.full(len(self._table.sequences), -1)
        places[ahead.plan.rows[ahead.plan.samples]] = np.arange(int(ahead.plan.samples.sum()))
        drawn = places[plan.rows]
        known = drawn < 0
        drawn = drawn[~known]
        rows = (np.cumsum(plan.counts) - 1)[~known]
        before = (np.cumsum(ahead.plan.counts) - 1)[ahead.plan.samples][drawn]
        to, drawn_, before_ = self._transfer.to_device([rows, drawn, before])
        history = _shifted(ahead.batch.token_ids.index_select(0, before_), ahead.batch.history.index_select(0, before_))
        return replace(
            batch,
            token_ids=batch.token_ids.index_copy(0, to, ahead.token_ids.index_select(0, drawn_)),
            history=batch.history.index_copy(0, to, history),
        )

    def _mixed(self, plan: Plan) -> Batch:
        table, rows = self._table, plan.rows
        ends = plan.starts + plan.counts
        row_ends = np.cumsum(plan.counts)
        row_starts = row_ends - plan.counts
        sequences = np.repeat(np.arange(len(rows)), plan.counts)
        positions = np.arange(len(sequences)) + (plan.starts - row_starts)[sequences]
        recent = self._recent(plan, ends, row_starts, len(sequences))
        starts = table.decoder_starts[rows]
        decoder_rows = None
        if (plan.starts < starts).any():
            decoder_rows = np.flatnonzero(positions >= starts[sequences])
        max_context = int(ends.max(initial=0))
        blocks = table.blocks[rows, : max(1, blocks_for(max_context))]
        windows = table.windows[rows, : max(1, int(table.window_counts[rows].max(initial=0)))]
        of_rows = [recent[:, 0], positions, sequences, recent[:, 1:]]
        of_sequences = [row_starts, plan.counts, ends, blocks, windows, table.window_bases[rows], rows, starts]
        written = table.written[rows]
        own = None if (plan.starts >= written).all() else positions >= written[sequences]
        groups = self._groups(positions, blocks[sequences, positions // BLOCK_TOKENS], own)
        arrays = [*of_rows, *of_sequences, _logit_rows(plan, row_ends, decoder_rows), *groups]
        if decoder_rows is not None:
            arrays.append(decoder_rows)
        first_seen = table.window_starts[rows]
        masked = bool((plan.starts - first_seen < self._window - 1)[first_seen > 0].any())
        if masked:
            arrays.append(first_seen)
        tensors = self._transfer.to_device(arrays)
        return self._batch(tensors, max_context, narrowed=decoder_rows is not None, masked=masked)

    def _batch(self, of: list[Tensor], max_context: int, *, narrowed: bool, masked: bool) -> Batch:
        """Name the tensors in the order in which `build` lays them."""
        first_seen = of.pop() if masked else None
        return Batch(
            token_ids=of[0],
            positions=of[1],
            sequences=of[2],
            history=of[3],
            query_starts=of[4],
            query_lens=of[5],
            context_lens=of[6],
            block_tables=of[7],
            window_tables=of[8],
            window_bases=of[9],
            states=of[10],
            decoder_starts=of[11],
            logit_rows=of[12],
            groups=self._named(of[13:]),
            max_context=max_context,
            decoder_rows=of[-1] if narrowed else None,
            window_starts=first_seen,
        )

    def _decoding(self, plan: Plan, ahead: Ahead | None) -> Batch:
        """One row a sequence, the newest: the same as `_mixed`, copying only what has changed.

        `ahead` is None or a step of the same rows.
        """
        table, rows, positions = self._table, plan.rows, plan.starts
        ends = positions + 1
        max_context = int(ends.max(initial=0))
        arrays = [positions, ends, *self._groups(positions, table.blocks[rows, positions // BLOCK_TOKENS])]
        groups = len(arrays)
        if ahead is None:
            recent = table.recent.take(rows, axis=0)
            arrays += recent[:, 0], recent[:, 1:]
        tensors = self._with_kept(arrays, plan)
        block_tables, window_tables, window_bases = self._tables
        numbers, counts, states, starts = self._fixed
        if ahead is None:
            token_ids, history = tensors[groups:]
        else:
            token_ids, history = ahead.token_ids, _shifted(ahead.batch.token_ids, ahead.batch.history)
        return Batch(
            token_ids=token_ids,
            positions=tensors[0],
            sequences=numbers,
            history=history,
            query_starts=numbers,
            query_lens=counts,
            context_lens=tensors[1],
            block_tables=block_tables,
            window_tables=window_tables,
            window_bases=window_bases,
            states=states,
            decoder_starts=starts,
            logit_rows=numbers,
            groups=self._named(tensors[2:groups]),
            max_context=max_context,
        )

    def _with_kept(self, arrays: list[Integers], plan: Plan) -> list[Tensor]:
        """Copy `arrays` and, in the same copy, what is kept on the device and has changed since the last step."""
        table, rows, count = self._table, plan.rows, len(arrays)
        other_rows = rows is not self._rows
        other_tables = other_rows or table.version != self._version
        if other_tables:
            blocks = table.blocks[rows, : max(1, int(table.block_counts[rows].max(initial=0)))]
            windows = table.windows.take(rows, axis=0)[:, : self._decoding_windows]
            arrays += blocks, windows, table.window_bases[rows]
        if other_rows:
            arrays += np.arange(len(rows)), plan.counts, rows, table.decoder_starts[rows]
        tensors = self._transfer.to_device(arrays)
        if other_tables:
            self._tables, self._version = tensors[count : count + 3], table.version
        if other_rows:
            self._fixed, self._rows = tensors[count + 3 :], rows
        return tensors[:count]

    def _named(self, tensors: list[Tensor]) -> dict[int, Groups]:
        return {ratio: Groups(*tensors[2 * i : 2 * i + 2]) for i, ratio in enumerate(self._ratios)}

    def _recent(self, plan: Plan, ends: Integers, row_starts: Integers, total: int) -> Integers:
        """Each row's own token and those before it, newest first: from the column for the newest, else from the ids."""
        table = self._table
        known = plan.counts if plan.drafts is None else plan.counts - plan.drafts
        newest = (known == 1) & plan.samples
        if plan.drafts is None and newest.all():
            return table.recent[plan.rows]
        depth = table.recent.shape[1]
        recent = np.full((total, depth), -1, dtype=np.int64)
        recent[row_starts[newest]] = table.recent[plan.rows[newest]]
        if plan.drafts is not None:
            self._lay_drafts(recent, plan, row_starts)
        for i in np.flatnonzero(~newest).tolist():
            tokens = table[plan.rows[i]].tokens
            start, end, row = int(plan.starts[i]), int(ends[i]), int(row_starts[i])
            for back in range(depth):
                oldest = max(start - back, 0)
                recent[row + oldest + back - start : row + end - start, back] = tokens[oldest : max(end - back, oldest)]
        return recent

    def _lay_drafts(self, recent: Integers, plan: Plan, row_starts: Integers) -> None:
        """Fill the rows of draft tokens: behind its last token, each sees those before it."""
        table, depth = self._table, recent.shape[1]
        assert plan.drafts is not None
        drafting = np.flatnonzero(plan.drafts)
        rows, counts = plan.rows[drafting], plan.drafts[drafting]
        text = np.concatenate((table.recent[rows, ::-1], table.draft_tokens[rows]), 1)
        width = table.draft_tokens.shape[1]
        places = depth + np.arange(width)[:, None] - np.arange(depth)
        inside = np.arange(width) < counts[:, None]
        targets = row_starts[drafting][:, None] + np.arange(1, width + 1)
        recent[targets[inside]] = text[:, places][inside]

    def _groups(self, positions: Integers, blocks: Integers, own: NDArray[np.bool_] | None = None) -> list[Integers]:
        """For each ratio the rows that complete a group, and where their entries go.

        `blocks` [T] holds each row's block; `own` [T] is False where its entry is there already (None = nowhere).
        Blocks and ratios are powers of two, so that remainders are bits.
        """
        tokens = blocks * BLOCK_TOKENS + (positions & (BLOCK_TOKENS - 1))
        arrays: list[Integers] = []
        for ratio in self._ratios:
            if ratio == 1 and own is None:
                arrays += np.arange(len(positions)), tokens
            else:
                ends = (positions & (ratio - 1)) == ratio - 1
                rows = (ends if own is None else ends & own).nonzero()[0]
                arrays += rows, tokens[rows] // ratio
        return arrays


def _logit_rows(plan: Plan, row_ends: Integers, decoder_rows: Integers | None) -> Integers:
    """The last rows of each sequence, counted over the decoder rows where the step has them."""
    if (plan.logit_counts == 1).all():
        rows = row_ends - 1
    else:
        ends = np.cumsum(plan.logit_counts)
        rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(row_ends - ends, plan.logit_counts)
    return rows if decoder_rows is None else np.searchsorted(decoder_rows, rows)


def _shifted(token_ids: Tensor, history: Tensor) -> Tensor:
    """The history [T, n] of the rows that follow rows of `token_ids` [T] with `history` [T, n]."""
    return history if history.shape[1] == 0 else torch.cat((token_ids.unsqueeze(1), history[:, :-1]), 1)
