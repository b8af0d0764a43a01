"""Attention and the index on the CPU, for batches of few rows; many rows of one sequence share its keys."""

from dataclasses import replace
from typing import override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, Rope, Selection
from deepinfer.accelerator.cpu_ops.arrays import Floats, Ints
from deepinfer.accelerator.cpu_ops.few_rows import FewRows
from deepinfer.accelerator.cpu_ops.records import CpuRecords
from deepinfer.accelerator.ops.number_formats import fp4_round, hadamard
from deepinfer.accelerator.ops.paged_cache import PLAIN_FORMATS
from deepinfer.accelerator.ops.sparse_attention import IndexRequest, KeySources, SparseAttentionOps


class CpuAttention(CpuRecords, SparseAttentionOps):
    """Attention of few rows without torch's calls."""

    @override
    def rotate_queries(self, q: Tensor, batch: Batch, rope: Rope, norm_eps: float | None) -> Tensor:
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().rotate_queries(q, batch, rope, norm_eps)
        return self.narrow(self.norm_rotate(self.wide_rows(q), None, norm_eps, few.forward[rope.name]))

    @override
    def attention(self, q: Tensor, keys: KeySources, sink: Tensor, batch: Batch, rope: Rope) -> Tensor:
        """Few rows: keys that no query may see are never touched; window and entries are never joined."""
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().attention(q, keys, sink, batch, rope)
        window = self._keys(keys.window, few.window_reads, few.decoder_bias if keys.decoder else few.encoder_bias)
        entries = None
        if keys.entries is not None and keys.selection is not None and keys.selection.slots.shape[1]:
            entries = self._keys(keys.entries, keys.selection.slots, keys.selection.bias)
        q, turns = self.wide_rows(q), few.backward[rope.name]
        count = window.count + (entries.count if entries else 0)
        out, found = self.empty(*q.shape), self.scratch(5 * count + 4 * 16)
        self.bodies.attention(
            *(*q.shape, turns.shape[1] // 2, q.data_ptr(), sink.data_ptr(), turns.data_ptr()),
            *window.arguments,
            *(entries.arguments if entries else (0, 0, 0, 0)),
            *(found, found + 8 * count, out.data_ptr()),
        )
        return self.narrow(out)

    def _keys(self, view: RecordView, slots: Tensor, bias: Tensor) -> "_Keys":
        """Address plain records where they lie; others are decoded first."""
        if view.data.dtype == self.wide:
            return _Keys(view.data, slots, bias)
        return _Keys(self.wide_rows(self.read(view, slots)), None, bias)

    @override
    def everything(self, batch: Batch, ratio: int) -> Selection:
        few = batch.prepared
        return few.everything[ratio] if isinstance(few, FewRows) else super().everything(batch, ratio)

    @override
    def select_entries(self, request: IndexRequest, batch: Batch) -> tuple[Selection, Tensor | None]:
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().select_entries(request, batch)
        count = batch.max_context // request.ratio
        scores, blocks = self._few_scores(request, batch, few, count), None
        if request.keep_blocks:
            newest = (batch.positions.numpy() + 1) // request.ratio - 1
            blocks = self._few_blocks(scores.numpy(), newest, request)
        return self.locate(batch, self._best(scores, request.top_k), request.ratio, fill=False), blocks

    def _few_scores(self, request: IndexRequest, batch: Batch, few: FewRows, count: int) -> Tensor:
        """Scores [T, count]; -inf for entries that are not visible or outside the candidates."""
        query = self.norm_rotate(self.wide_rows(request.query), None, None, few.forward[request.rope.name])
        if request.keys.format not in PLAIN_FORMATS:
            query = fp4_round(hadamard(query) if request.transform else query, 32).contiguous()
        rows, heads, width = query.shape
        scores, entries = self.empty(rows, count), self.whole(rows, count)
        weights = self.wide_rows(request.weights)
        keys = self._keys(request.keys, *self._all_entries(batch, entries, request.ratio))
        self.bodies.index_scores(
            *(rows, heads, width, count, request.ratio, query.data_ptr(), weights.data_ptr()),
            *(*keys.arguments[:2], batch.positions.data_ptr(), scores.data_ptr()),
        )
        if request.candidates is not None:
            inside = _inside(request.candidates.numpy(), count, request.block_size)
            np.copyto(scores.numpy(), -np.inf, where=~inside)
        return scores

    def _all_entries(self, batch: Batch, entries: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        selection = self.locate(batch, entries, ratio, fill=True)
        return selection.slots, selection.bias

    def _best(self, scores: Tensor, count: int) -> Tensor:
        """Indices [T, min(count, N)] of the largest scores; ties go to the smaller index; -1 where -inf."""
        best = self.whole(scores.shape[0], min(count, scores.shape[1]))
        self.bodies.best(*scores.shape, best.shape[1], scores.data_ptr(), best.data_ptr())
        return best

    def _few_blocks(self, scores: Floats, newest: Ints, request: IndexRequest) -> Tensor:
        """The best blocks by their largest score; the block of the newest visible entry [T] always counts."""
        size = request.block_size
        total = -(-scores.shape[1] // size)
        padded = np.full((scores.shape[0], total * size), -np.inf, scores.dtype)
        padded[:, : scores.shape[1]] = scores
        largest = padded.reshape(-1, total, size).max(2)
        current = (np.arange(total) == (newest // size)[:, None]) & (newest >= 0)[:, None]
        np.copyto(largest, np.inf, where=current)
        return self._best(torch.from_numpy(largest), request.keep_blocks)

    @override
    def _index_scores(self, request: IndexRequest, query: Tensor, batch: Batch, rows: slice, count: int) -> Tensor:
        """Rows of one sequence share one copy of its keys; the reference gathers them again for every row."""
        sequences = batch.sequences[rows]
        first, last = int(sequences[0]), int(sequences[-1])
        if first != last:
            return super()._index_scores(request, query, batch, rows, count)
        entries = torch.arange(count).unsqueeze(0)
        one = replace(batch, sequences=sequences[:1])
        keys = self.read_records(request.keys, self.selection(one, entries, request.ratio).slots[0])
        return self._score(request, query[rows], keys, batch.positions[rows], rows)


class _Keys:
    """Keys as the bodies take them: vectors at slots [T, N], or all of them [T, N, C]; bias [T, N] hides some."""

    def __init__(self, vectors: Tensor, slots: Tensor | None, bias: Tensor) -> None:
        self.count = bias.shape[1]
        self.held = (vectors, slots, bias)
        addresses = vectors.data_ptr(), 0 if slots is None else slots.data_ptr(), bias.data_ptr()
        self.arguments = (*addresses, self.count)


def _inside(blocks: Ints, count: int, size: int) -> NDArray[np.bool_]:
    """Whether an entry lies in one of its row's blocks [T, Kb] (-1 = none): [T, count]."""
    kept = np.zeros((blocks.shape[0], -(-count // size) + 1), np.bool_)
    np.put_along_axis(kept, blocks, True, 1)
    return kept[:, :-1].repeat(size, 1)[:, :count]
