"""The index on the device: scores of entries, the best of them, and candidate blocks; all lengths are read there.

Owns the cutting of rows into pieces, so that scores of long prompts fit; keys that are not quantised are the reference.
"""

from collections.abc import Mapping
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, Selection
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sparse_attention import IndexRequest
from deepinfer_kernels_cuda.cache_ops import row_turns
from deepinfer_kernels_cuda.kernel_ops import KernelOps
from deepinfer_kernels_cuda.kernels.index import Scored, index_queries, index_scores
from deepinfer_kernels_cuda.kernels.selection import Rows, select

SCORE_BYTES = 512 << 20
"""Memory that scores of one piece of rows take."""
PIECE_ROWS = 16
"""Pieces are a multiple of so many rows."""
MOST_CHOSEN = 4096


class IndexKernels(KernelOps, Ops):
    """`select_entries`; entries and blocks ascend, with -1 behind them."""

    @override
    def select_entries(self, request: IndexRequest, batch: Batch) -> tuple[Selection, Tensor | None]:
        if not self._selects(request):
            self.only_reference("select_entries", f"{request.keys.format} keys of {request.query.shape[2]} channels")
            return super().select_entries(request, batch)
        query = index_queries(request.query.contiguous(), row_turns(batch, request.rope), transform=request.transform)
        count = batch.max_context // request.ratio
        places = count if request.candidates is None else request.candidates.shape[1] * request.block_size
        piece = max(1, SCORE_BYTES // (8 * max(places, 1)) // PIECE_ROWS) * PIECE_ROWS
        starts = range(0, query.shape[0], piece) or (0,)
        chosen = [self._choose(request, query, batch, slice(start, start + piece)) for start in starts]
        pieces = zip(*chosen, strict=True)
        entries, slots, bias, blocks = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in pieces)
        return Selection(entries, slots, bias), blocks if request.keep_blocks else None

    def _selects(self, request: IndexRequest) -> bool:
        """Whether the kernels take this request."""
        width = request.query.shape[2]
        return (
            self.no_kernels is None
            and request.keys.format == "fp4_group32"
            and request.query.dtype == self.dtype
            and 32 <= width <= 512
            and width & (width - 1) == 0
            and 128 % request.ratio == 0
            and max(request.top_k, request.keep_blocks) <= MOST_CHOSEN
            and not (request.keep_blocks and request.candidates is not None)
        )

    def _choose(
        self, request: IndexRequest, query: Tensor, batch: Batch, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Entries, slots, bias and candidate blocks of a piece of rows (blocks only where they are asked for)."""
        count = batch.max_context // request.ratio
        positions, sequences, tables = batch.positions[rows], batch.sequences[rows], batch.block_tables.contiguous()
        candidates = None if request.candidates is None else request.candidates[rows].contiguous()
        weights, records = request.weights[rows].contiguous(), request.keys.data
        given = Scored(
            weights, records, tables, sequences, positions, request.ratio, count, candidates, request.block_size
        )
        scores, numbers = index_scores(query[rows], given, alone=self.steady)
        places = count if candidates is None else candidates.shape[1] * request.block_size
        where = Rows(positions, sequences, tables, request.ratio)
        entries, slots, bias = select(scores, numbers, where, places, min(request.top_k, count))
        blocks = entries
        if request.keep_blocks:
            groups = -(-count // request.block_size)
            most = min(request.keep_blocks, groups)
            blocks, _, _ = select(scores, None, where, groups, most, group=request.block_size)
        return entries, slots, bias, blocks

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        limits = super().limits(shapes)
        width, most = shapes.get("index_dim", 128), shapes.get("index_top_k", 512)
        if not 32 <= width <= 512 or width & (width - 1):
            reason = f"kernels read index keys of 32 to 512 channels, a power of two; these have {width}"
            limits = {"select_entries": reason, **limits}
        elif max(most, shapes.get("candidate_blocks", 0)) > MOST_CHOSEN:
            limits = {"select_entries": f"kernels choose at most {MOST_CHOSEN} entries or blocks of a row", **limits}
        if self.precision.cache != "records":
            limits = {"select_entries": "kernels read quantised index keys, this cache is unquantised", **limits}
        return limits
