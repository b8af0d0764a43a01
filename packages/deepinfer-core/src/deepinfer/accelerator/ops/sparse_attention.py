"""Attention over window KV and selected compressed entries, and the index that selects them.

Owns scores, top-k and candidate blocks; what lies in memory is `paged_cache`'s.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, Rope, Selection
from deepinfer.accelerator.ops.number_formats import fp4_round, hadamard
from deepinfer.accelerator.ops.paged_cache import PLAIN_FORMATS, PagedCacheOps, prepared_of, rotate_

ROW_BUDGET = 1 << 24
"""Elements of gathered keys that the reference holds at once: rows are taken in pieces of at most this size."""


@dataclass(frozen=True)
class IndexRequest:
    """What an index source asks: the best `top_k` visible entries of each row.

    query [T, Hi, Di]   bare projection (not rotated, not rounded)
    weights [T, Hi]     wide, with the constant factor
    candidates          blocks [T, Kb] outside which nothing is scored, -1 = none; None = no restriction
    keep_blocks         how many candidate blocks to return; 0 = none are asked for
    transform           V4's Hadamard on the queries
    """

    query: Tensor
    weights: Tensor
    keys: RecordView
    rope: Rope
    ratio: int
    top_k: int
    block_size: int
    candidates: Tensor | None = None
    keep_blocks: int = 0
    transform: bool = False


@dataclass(frozen=True)
class KeySources:
    """Where a layer's keys lie: its window KV, and compressed entries with what was selected of them, or None.

    `decoder` restricts window keys to positions from the sequence's decoder start.
    """

    window: RecordView
    entries: RecordView | None
    selection: Selection | None
    decoder: bool


class SparseAttentionOps(PagedCacheOps):
    """Reference attention: gathers every key of every row and multiplies."""

    def rotate_queries(self, q: Tensor, batch: Batch, rope: Rope, norm_eps: float | None) -> Tensor:
        """Rotate queries [T, H, D] at their positions; first RMS-normalise each head when `norm_eps` is given (V4)."""
        if norm_eps is not None:
            q = self.rms_norm(q, None, norm_eps)
        turns = prepared_of(batch).rotations[rope.name].unsqueeze(1)
        return self.narrow(rotate_(q.to(self.wide, copy=True), turns))

    def attention(self, q: Tensor, keys: KeySources, sink: Tensor, batch: Batch, rope: Rope) -> Tensor:
        """Attend from q [T, H, D] (rotated) to window keys and selected entries; K and V are the stored vector.

        o = sum_n e^(q k_n / sqrt(D)) k_n / (sum_n e^(q k_n / sqrt(D)) + e^sink), its rotary tail then rotated by minus
        the row's position.  Returns [T, H, D] in the activation dtype.
        """
        prepared = prepared_of(batch)
        slots, bias = prepared.window_reads, prepared.decoder_bias if keys.decoder else prepared.encoder_bias
        width = slots.shape[1] + (keys.selection.slots.shape[1] if keys.selection else 0)
        piece = max(1, ROW_BUDGET // (width * q.shape[2]))
        outputs = []
        for start in range(0, q.shape[0], piece):
            rows = slice(start, start + piece)
            vectors, visible = self.read_records(keys.window, slots[rows]), bias[rows]
            if keys.entries is not None and keys.selection is not None:
                chosen = self.read_records(keys.entries, keys.selection.slots[rows])
                vectors = torch.cat((vectors, chosen), 1)
                visible = torch.cat((visible, keys.selection.bias[rows]), 1)
            outputs.append(self._attend(q[rows], vectors, visible, sink))
        wide = torch.cat(outputs) if len(outputs) != 1 else outputs[0]
        turns = prepared.rotations[rope.name].conj().unsqueeze(1)
        return self.narrow(rotate_(wide, turns))

    def _attend(self, q: Tensor, keys: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
        """Q [t, H, D], keys [t, N, D] wide, bias [t, N] -> [t, H, D] wide."""
        queries = self.widen(q)
        scores = torch.baddbmm(bias.unsqueeze(1), queries, keys.transpose(1, 2), alpha=q.shape[2] ** -0.5)
        scores = torch.cat((scores, sink.view(1, -1, 1).expand(q.shape[0], -1, 1)), 2)
        return torch.bmm(torch.softmax(scores, 2)[..., :-1], keys)

    def everything(self, batch: Batch, ratio: int) -> Selection:
        """The selection of all visible entries, for ratios that were `dense` in `prepare`."""
        return prepared_of(batch).everything[ratio]

    def select_entries(self, request: IndexRequest, batch: Batch) -> tuple[Selection, Tensor | None]:
        """Choose the `top_k` best visible entries of each row; also its best candidate blocks when they are asked for.

        score(i, e) = sum_h w_ih relu(q_ih k_e), queries rotated and rounded as keys are stored.  Ties go to the
        smaller entry.  Returns the selection (K = min(top_k, max_context // ratio)) and blocks [T, Kb] or None.
        """
        count = batch.max_context // request.ratio
        query = self._index_queries(request, batch)
        piece = max(1, ROW_BUDGET // max(1, count * request.keys.width))
        chosen, blocks = [], []
        for start in range(0, query.shape[0], piece):
            rows = slice(start, start + piece)
            scores = self._index_scores(request, query, batch, rows, count)
            if request.keep_blocks:
                blocks.append(self._candidate_blocks(request, scores, batch, rows))
            chosen.append(_best(scores, request.top_k))
        shape = (0, min(request.top_k, count))
        entries = torch.cat(chosen) if chosen else batch.positions.new_zeros(shape)
        kept = torch.cat(blocks) if blocks else None
        return self.selection(batch, entries, request.ratio), kept

    def _index_queries(self, request: IndexRequest, batch: Batch) -> Tensor:
        turns = prepared_of(batch).rotations[request.rope.name].unsqueeze(1)
        query = rotate_(request.query.to(self.wide, copy=True), turns)
        if request.keys.format in PLAIN_FORMATS:
            return query
        return fp4_round(hadamard(query) if request.transform else query, 32)

    def _index_scores(self, request: IndexRequest, query: Tensor, batch: Batch, rows: slice, count: int) -> Tensor:
        """Scores [t, count] of a piece of rows; -inf for entries that are not visible or outside the candidates."""
        sequences = batch.sequences[rows]
        numbers = torch.arange(count, device=query.device).expand(sequences.shape[0], -1)
        piece = self.selection(_rows_of(batch, rows), numbers, request.ratio)
        keys = self.read_records(request.keys, piece.slots)
        return self._score(request, query[rows], keys, batch.positions[rows], rows)

    def _score(self, request: IndexRequest, query: Tensor, keys: Tensor, positions: Tensor, rows: slice) -> Tensor:
        """Weighted sum over heads: query [t, Hi, Di], keys [t, N, Di] or, of one sequence, [N, Di] -> [t, N]."""
        products = torch.relu_(query @ keys.transpose(-1, -2))
        weights = request.weights[rows].to(products.dtype)
        scores = torch.bmm(weights.unsqueeze(1), products).squeeze(1)
        candidates = None if request.candidates is None else request.candidates[rows]
        return self._hide(scores, request, positions, candidates)

    def _hide(self, scores: Tensor, request: IndexRequest, positions: Tensor, candidates: Tensor | None) -> Tensor:
        """Set scores [t, N] of entries that are not visible or outside the candidates to -inf, in place."""
        count = scores.shape[1]
        numbers = torch.arange(count, device=scores.device)
        hidden = numbers >= ((positions + 1) // request.ratio).unsqueeze(1)
        if candidates is not None:
            hidden |= ~_inside(candidates, count, request.block_size)
        return scores.masked_fill_(hidden, -torch.inf)

    def _candidate_blocks(self, request: IndexRequest, scores: Tensor, batch: Batch, rows: slice) -> Tensor:
        """The best blocks of entries by their largest score; the block of the newest visible entry always counts."""
        size = request.block_size
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        best = padded.unflatten(1, (-1, size)).amax(2)
        newest = (batch.positions[rows] + 1) // request.ratio - 1
        current = torch.arange(best.shape[1], device=scores.device) == (newest // size).unsqueeze(1)
        best = best.masked_fill(current & (newest >= 0).unsqueeze(1), torch.inf)
        return _best(best, request.keep_blocks)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices [t, min(count, N)] of the largest scores, in no order; ties go to the smaller index; -1 where -inf."""
    count = min(count, scores.shape[1])
    if count == 0:
        return scores.new_zeros((scores.shape[0], 0), dtype=torch.int64)
    last = torch.topk(scores, count, dim=1).values[:, -1:]
    above, ties = scores > last, scores == last
    chosen = above | (ties & (ties.cumsum(1) <= count - above.sum(1, keepdim=True)))
    indices = torch.topk(chosen.to(torch.int8), count, dim=1).indices
    return indices.masked_fill(scores.gather(1, indices) == -torch.inf, -1)


def _inside(blocks: Tensor, count: int, size: int) -> Tensor:
    """Bool [t, count]: whether an entry lies in one of its row's blocks [t, Kb] (-1 = none)."""
    total = -(-count // size)
    kept = torch.zeros((blocks.shape[0], total + 1), dtype=torch.bool, device=blocks.device)
    kept.scatter_(1, blocks.masked_fill(blocks < 0, total), True)
    return kept[:, :total].repeat_interleave(size, 1)[:, :count]


def _rows_of(batch: Batch, rows: slice) -> Batch:
    """The part of a batch that `selection` reads, for a piece of its rows."""
    return replace(batch, sequences=batch.sequences[rows])
