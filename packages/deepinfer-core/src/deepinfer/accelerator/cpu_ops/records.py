"""Cached records and compressors on the CPU, for batches of few rows.

The formats themselves are defined in `ops/paged_cache.py`.
"""

from typing import override

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, Rope, TailView
from deepinfer.accelerator.cpu_ops.arrays import Floats, Ints, Turns
from deepinfer.accelerator.cpu_ops.few_rows import CpuPreparing, FewRows
from deepinfer.accelerator.cpu_ops.formats import decode_few
from deepinfer.accelerator.ops.number_formats import hadamard
from deepinfer.accelerator.ops.paged_cache import PLAIN_FORMATS, encode_records


def rotate_array(x: Floats, turns: Turns) -> None:
    """Rotate the last channels of x [..., C] in place; compare `rotate_`."""
    pairs = x[..., -2 * turns.shape[-1] :].view(turns.dtype)
    pairs *= turns


class CpuRecords(CpuPreparing):
    """Reads and writes of few records."""

    def read(self, view: RecordView, slots: Ints) -> Floats:
        """Vectors [*slots.shape, width] in the wide dtype: numpy gathers rows in a fifth of torch's time."""
        if view.data.dtype == self.wide:
            plain: Floats = view.data.numpy().take(slots, 0)
            return plain
        if view.data.dtype == torch.uint8:
            decoded = decode_few(view.data.numpy().take(slots, 0), view)
            if decoded is not None:
                return decoded.astype(self.float_type, copy=False)
        vectors: Floats = self.read_records(view, torch.from_numpy(slots)).numpy()
        return vectors

    def write(self, view: RecordView, slots: Ints, vectors: Floats) -> None:
        """Store vectors [N, width] as records."""
        if view.data.dtype == self.wide:
            view.data.numpy()[slots] = vectors
        else:
            view.data[torch.from_numpy(slots)] = encode_records(torch.from_numpy(vectors), view)

    @override
    def write_window(self, kv: Tensor, norm: Tensor, eps: float, batch: Batch, rope: Rope, view: RecordView) -> None:
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().write_window(kv, norm, eps, batch, rope, view)
        vectors = self.norm(self.array(kv), norm, eps)
        rotate_array(vectors, few.forward[rope.name])
        return self.write(view, few.window_slots, vectors)

    @override
    def write_entries(
        self, latents: Tensor, batch: Batch, ratio: int, rope: Rope, view: RecordView, *, transform: bool = False
    ) -> None:
        few = batch.prepared
        if not isinstance(few, FewRows):
            return super().write_entries(latents, batch, ratio, rope, view, transform=transform)
        rows = batch.groups[ratio].rows.numpy()
        if not rows.shape[0]:
            return None
        vectors = self.array(latents).copy()
        rotate_array(vectors, self.turns(rope, few.positions[rows] - (ratio - 1)))
        if transform and view.format not in PLAIN_FORMATS:
            vectors = hadamard(torch.from_numpy(vectors)).numpy()
        return self.write(view, batch.groups[ratio].slots.numpy(), vectors)

    @override
    def compress(
        self, values: Tensor, scores: Tensor | None, batch: Batch, ratio: int, tail: TailView | None
    ) -> Tensor:
        """Few rows: only the groups' own tokens are touched; the reference joins the step with the whole memory."""
        few = batch.prepared
        if ratio == 1 or not isinstance(few, FewRows):
            return super().compress(values, scores, batch, ratio, tail)
        assert scores is not None
        assert tail is not None
        table = few.tails[ratio]
        value, score = values.numpy(), scores.numpy()
        kept_values, kept_scores = (part.numpy().reshape(-1, value.shape[1]) for part in (tail.values, tail.scores))
        count, span = table.in_step.shape
        width = value.shape[1] // (span // ratio)
        pooled = np.zeros((count, width), value.dtype)
        if count:
            rows = table.rows[table.in_step]
            group_values, group_scores = kept_values.take(table.stored, 0), kept_scores.take(table.stored, 0)
            group_values[table.in_step], group_scores[table.in_step] = value[rows], score[rows]
            if span == 2 * ratio:
                group_values, group_scores = _halves(group_values, ratio), _halves(group_scores, ratio)
                np.copyto(group_scores, -np.inf, where=table.absent)
            weights = np.exp(group_scores - group_scores.max(1, keepdims=True))
            pooled = np.add.reduce(weights * group_values, 1) / np.add.reduce(weights, 1)
        kept_values[table.places], kept_scores[table.places] = value, score
        return self.result(pooled)


def _halves(x: Floats, ratio: int) -> Floats:
    """Of tokens [N, 2 ratio, 2 C] the first half of the previous group's channels and the second of the current's."""
    half = x.shape[2] // 2
    return np.concatenate((x[:, :ratio, :half], x[:, ratio:, half:]), 1)
