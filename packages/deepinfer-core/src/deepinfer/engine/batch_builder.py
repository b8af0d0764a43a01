"""A `Plan` becomes a `Batch`: host columns are laid into one array, copied to the device once, and cut into tensors.

Which sequences run, and their blocks, are the `Scheduler`'s.
"""

import numpy as np
import torch

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Groups
from deepinfer.engine.plan import Plan
from deepinfer.engine.sequence import Integers, SequenceTable, blocks_for
from deepinfer.model.config import ModelConfig


class BatchBuilder:
    """Builds batches for one model from one table of sequences."""

    def __init__(self, model: ModelConfig, table: SequenceTable, device: torch.device) -> None:
        self._ratios = model.ratios
        self._table = table
        self._device = device

    def build(self, plan: Plan) -> Batch:
        """Lay out the rows of `plan`, in its order."""
        table, rows, decoder_rows = self._table, plan.rows, None
        ends = plan.starts + plan.counts
        starts = table.decoder_starts[rows]
        if plan.decoding:
            sequences = row_starts = logit_rows = np.arange(len(rows))
            positions, recent = plan.starts, table.recent.take(rows, axis=0)
        else:
            row_ends = np.cumsum(plan.counts)
            row_starts = row_ends - plan.counts
            sequences = np.repeat(np.arange(len(rows)), plan.counts)
            positions = np.arange(len(sequences)) + (plan.starts - row_starts)[sequences]
            recent = self._recent(plan, ends, row_starts, len(sequences))
            if (plan.starts < starts).any():
                decoder_rows = np.flatnonzero(positions >= starts[sequences])
            logit_rows = _logit_rows(plan, row_ends, decoder_rows)
        max_context = int(ends.max()) if len(ends) else 0
        blocks = table.blocks[rows, : max(1, blocks_for(max_context))]
        windows = table.windows.take(rows, axis=0)[:, : max(1, int(table.window_counts[rows].max(initial=0)))]
        of_row = [recent[:, 0], positions, sequences, recent[:, 1:]]
        of_sequence = [row_starts, plan.counts, ends, blocks, windows, table.window_bases[rows], rows, starts]
        groups = self._groups(positions, sequences, blocks)
        return self._batch([*of_row, *of_sequence, logit_rows, *groups], decoder_rows, max_context)

    def _batch(self, arrays: list[Integers], decoder_rows: Integers | None, max_context: int) -> Batch:
        """Copy all arrays as one, and name the pieces in the order in which `build` lays them."""
        if decoder_rows is not None:
            arrays = [*arrays, decoder_rows]
        distinct = {id(array): array for array in arrays}  # in a decoding step several are the same numbers
        whole = torch.from_numpy(np.concatenate([array.ravel() for array in distinct.values()])).to(self._device)
        pieces = whole.split_with_sizes([array.size for array in distinct.values()])
        made = dict(zip(distinct, pieces, strict=True))
        of = [made[id(array)] if array.ndim == 1 else made[id(array)].view(array.shape) for array in arrays]
        groups = {ratio: Groups(of[13 + 2 * i], of[14 + 2 * i]) for i, ratio in enumerate(self._ratios)}
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
            groups=groups,
            decoder_rows=None if decoder_rows is None else of[-1],
            max_context=max_context,
        )

    def _recent(self, plan: Plan, ends: Integers, row_starts: Integers, total: int) -> Integers:
        """Each row's own token and those before it, newest first: from the column for the newest, else from the ids."""
        table = self._table
        newest = (plan.counts == 1) & plan.samples
        if newest.all():
            return table.recent[plan.rows]
        depth = table.recent.shape[1]
        recent = np.full((total, depth), -1, dtype=np.int64)
        recent[row_starts[newest]] = table.recent[plan.rows[newest]]
        for i in np.flatnonzero(~newest).tolist():
            tokens = table[plan.rows[i]].tokens
            start, end, row = int(plan.starts[i]), int(ends[i]), int(row_starts[i])
            for back in range(depth):
                known = max(start - back, 0)
                recent[row + known + back - start : row + end - start, back] = tokens[known : max(end - back, known)]
        return recent

    def _groups(self, positions: Integers, sequences: Integers, blocks: Integers) -> list[Integers]:
        """For each ratio the rows that complete a group, and the slots of their entries."""
        tokens = blocks[sequences, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        arrays: list[Integers] = []
        for ratio in self._ratios:
            if ratio == 1:
                arrays += (sequences if len(sequences) == len(blocks) else np.arange(len(sequences))), tokens
            else:
                rows = np.flatnonzero((positions + 1) % ratio == 0)
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
