"""Attention and the index on the CPU, for batches of few rows; many rows of one sequence share its keys."""

from dataclasses import replace
from typing import override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Rope, Selection
from deepinfer.accelerator.cpu_ops.arrays import Floats, Ints, pick
from deepinfer.accelerator.cpu_ops.few_rows import FewRows
from deepinfer.accelerator.cpu_ops.records import CpuRecords, rotate_array
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
        queries = self.array(q)
        queries = queries.copy() if norm_eps is None else self.norm(queries, None, norm_eps)
        rotate_array(queries, few.forward[rope.name][:, None])
        return self.result(queries)

    @override
    def attention(self, q: Tensor, keys: KeySources, sink: Tensor, batch: Batch, rope: Rope) -> Tensor:
        """Few rows: a third of the reference's time; window and entries are never joined."""
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().attention(q, keys, sink, batch, rope)
        parts = [(self.read(keys.window, few.window_reads), few.decoder_bias if keys.decoder else few.encoder_bias)]
        if keys.entries is not None and keys.selection is not None and keys.selection.slots.shape[1]:
            entries = self.read(keys.entries, keys.selection.slots.numpy())
            parts.append((entries, keys.selection.bias.numpy()))
        queries = self.array(q) * self.float_type(q.shape[2] ** -0.5)
        scores = np.empty((*queries.shape[:2], sum(bias.shape[1] for _, bias in parts) + 1), queries.dtype)
        scores[:, :, -1] = self.held(sink)
        end = 0
        for vectors, bias in parts:
            start, end = end, end + bias.shape[1]
            np.matmul(queries, vectors.transpose(0, 2, 1), scores[:, :, start:end])
            scores[:, :, start:end] += bias[:, None]
        scores -= scores.max(2, keepdims=True)
        np.exp(scores, scores)
        scores /= np.add.reduce(scores, 2, keepdims=True)
        first = parts[0][1].shape[1]
        out = np.matmul(scores[:, :, :first], parts[0][0])
        if len(parts) == 2:
            out += np.matmul(scores[:, :, first:-1], parts[1][0])
        rotate_array(out, few.backward[rope.name][:, None])
        return self.result(out)

    @override
    def everything(self, batch: Batch, ratio: int) -> Selection:
        few = batch.prepared
        return few.everything[ratio] if isinstance(few, FewRows) else super().everything(batch, ratio)

    @override
    def select_entries(self, request: IndexRequest, batch: Batch) -> tuple[Selection, Tensor | None]:
        """Few rows: a quarter of the reference's time."""
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().select_entries(request, batch)
        count = batch.max_context // request.ratio
        scores = self._few_scores(request, few, count)
        blocks = None
        if request.keep_blocks:
            newest = (few.positions + 1) // request.ratio - 1
            blocks = torch.from_numpy(_candidate_blocks(scores, newest, request))
        return self.few_selection(few, _best(scores, request.top_k), request.ratio), blocks

    def _few_scores(self, request: IndexRequest, few: FewRows, count: int) -> Floats:
        """Scores [T, count]; -inf for entries that are not visible or outside the candidates."""
        query = self.array(request.query).copy()
        rotate_array(query, few.forward[request.rope.name][:, None])
        if request.keys.format not in PLAIN_FORMATS:
            turned = torch.from_numpy(query)
            query = fp4_round(hadamard(turned) if request.transform else turned, 32).numpy()
        numbers = np.arange(count)
        per_block = BLOCK_TOKENS // request.ratio
        blocks = few.tables.take(np.minimum(numbers // per_block, few.tables.shape[1] - 1), 1)
        slots = blocks * per_block + numbers % per_block
        products = np.matmul(query, self.read(request.keys, slots).transpose(0, 2, 1))
        np.maximum(products, 0, out=products)
        scores: Floats = np.matmul(self.array(request.weights)[:, None], products)[:, 0]
        hidden = numbers >= ((few.positions + 1) // request.ratio)[:, None]
        if request.candidates is not None:
            hidden |= ~_inside(request.candidates.numpy(), count, request.block_size)
        np.copyto(scores, -np.inf, where=hidden)
        return scores

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


def _best(scores: Floats, count: int) -> Ints:
    """Indices [T, min(count, N)] of the largest scores; ties go to the smaller index; -1 where -inf."""
    best: Ints = (-scores).argsort(1, kind="stable")[:, :count]
    return np.where(pick(scores, best) > -np.inf, best, -1)


def _candidate_blocks(scores: Floats, newest: Ints, request: IndexRequest) -> Ints:
    """The best blocks by their largest score; the block of the newest visible entry [T] always counts."""
    size = request.block_size
    total = -(-scores.shape[1] // size)
    padded = np.full((scores.shape[0], total * size), -np.inf, scores.dtype)
    padded[:, : scores.shape[1]] = scores
    best = padded.reshape(-1, total, size).max(2)
    current = (np.arange(total) == (newest // size)[:, None]) & (newest >= 0)[:, None]
    np.copyto(best, np.inf, where=current)
    return _best(best, request.keep_blocks)


def _inside(blocks: Ints, count: int, size: int) -> NDArray[np.bool_]:
    """Whether an entry lies in one of its row's blocks [T, Kb] (-1 = none): [T, count]."""
    kept = np.zeros((blocks.shape[0], -(-count // size) + 1), np.bool_)
    np.put_along_axis(kept, blocks, True, 1)
    return kept[:, :-1].repeat(size, 1)[:, :count]
