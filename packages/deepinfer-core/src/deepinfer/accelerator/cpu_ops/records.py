"""Cached records and compressors on the CPU, for batches of few rows.

The formats themselves are defined in `ops/paged_cache.py`.
"""

from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, Rope, TailView, tail_ring, tail_tokens
from deepinfer.accelerator.cpu_ops.few_rows import CpuPreparing, FewRows
from deepinfer.accelerator.cpu_ops.formats import decode_few
from deepinfer.accelerator.ops.number_formats import hadamard
from deepinfer.accelerator.ops.paged_cache import PLAIN_FORMATS, encode_records


class CpuRecords(CpuPreparing):
    """Reads and writes of few records."""

    def read(self, view: RecordView, slots: Tensor) -> Tensor:
        """Decoded vectors [*slots.shape, width] in the wide dtype: numpy gathers rows in a fifth of torch's time."""
        if view.data.dtype == torch.uint8:
            decoded = decode_few(view.data.numpy().take(slots.numpy(), 0), view)
            if decoded is not None:
                return torch.from_numpy(decoded)
        return self.read_records(view, slots)

    def write(self, view: RecordView, slots: Tensor, vectors: Tensor) -> None:
        """Store vectors [N, width] as records."""
        if view.data.dtype == self.wide:
            view.data.numpy()[slots.numpy()] = vectors.numpy()
        else:
            view.data[slots] = encode_records(vectors, view)

    @override
    def write_window(self, kv: Tensor, norm: Tensor, eps: float, batch: Batch, rope: Rope, view: RecordView) -> None:
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().write_window(kv, norm, eps, batch, rope, view)
        vectors = self.norm_rotate(self.widen(kv), norm, eps, few.forward[rope.name])
        return self.write(view, few.window_slots, vectors)

    @override
    def write_entries(
        self, latents: Tensor, batch: Batch, ratio: int, rope: Rope, view: RecordView, *, transform: bool = False
    ) -> None:
        groups = batch.groups[ratio]
        if not isinstance(batch.prepared, FewRows):
            return super().write_entries(latents, batch, ratio, rope, view, transform=transform)
        if not groups.rows.shape[0]:
            return None
        first = batch.positions.index_select(0, groups.rows) - (ratio - 1)
        turns = self.turns(rope, first, inverse=False)
        vectors = self.norm_rotate(self.wide_rows(latents), None, None, turns)
        if transform and view.format not in PLAIN_FORMATS:
            vectors = hadamard(vectors)
        return self.write(view, groups.slots, vectors)

    @override
    def compress(
        self, projected: Tensor, bias: Tensor | None, batch: Batch, ratio: int, tail: TailView | None
    ) -> Tensor:
        """Few rows: only the groups' own tokens are touched; the reference joins the step with the whole memory."""
        if ratio == 1 or not isinstance(batch.prepared, FewRows):
            return super().compress(projected, bias, batch, ratio, tail)
        assert tail is not None
        values, scores = projected.chunk(2, 1)
        span, ends = tail_tokens(ratio), batch.groups[ratio].rows
        width = values.shape[1] // (span // ratio)
        pooled, scratch = self.empty(ends.shape[0], width), self.scratch((span + 2) * width)
        self.bodies.compress(
            *(values.shape[0], ends.shape[0], span, tail_ring(ratio), ratio, width),
            *(values.data_ptr(), scores.data_ptr(), values.stride(0), 0 if bias is None else bias.data_ptr()),
            *(ends.data_ptr(), batch.positions.data_ptr(), batch.sequences.data_ptr(), batch.states.data_ptr()),
            *(batch.query_starts.data_ptr(), batch.context_lens.data_ptr()),
            *(tail.values.data_ptr(), tail.scores.data_ptr(), scratch, pooled.data_ptr()),
        )
        return self.narrow(pooled)
