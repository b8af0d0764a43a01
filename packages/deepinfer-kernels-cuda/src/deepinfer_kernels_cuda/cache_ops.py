"""Paged memory on the device: a step's shared tables, records written from projections and latents, compressors.

Unquantised caches and shapes that kernels do not hold are the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, Rope, Selection, TailView
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.paged_cache import PreparedBatch, prepared_of
from deepinfer_kernels_cuda.kernel_ops import KernelOps
from deepinfer_kernels_cuda.kernels.compressor import GroupRows, pick, pool
from deepinfer_kernels_cuda.kernels.records import takes_record, write_entries, write_window
from deepinfer_kernels_cuda.kernels.steps import WindowRows, everything, turns, window_tables


@dataclass(frozen=True)
class DevicePreparedBatch(PreparedBatch):
    """Also entry_turns: by ratio and rotation table, float32 [N, dim / 2, 2] of the first tokens of groups that end.

    Has no `tails`: the compressor's kernels find tokens in the batch.
    """

    entry_turns: dict[tuple[int, str], Tensor]


class CacheKernels(KernelOps, Ops):
    """`prepare`, `write_window`, `write_entries` and `compress`."""

    @override
    def prepare(
        self, batch: Batch, window: int, ropes: tuple[Rope, ...], dense: tuple[int, ...], *, block: int = 0
    ) -> Batch:
        if self.no_kernels or not all(_power_of_two(rope.dim) for rope in ropes):
            return super().prepare(batch, window, ropes, dense, block=block)
        tables, starts = batch.window_tables.contiguous(), batch.decoder_starts
        place = (batch.positions, batch.sequences, batch.query_starts, tables, batch.window_bases)
        own, slots, encoder, decoder = window_tables(WindowRows(*place, batch.window_starts, starts), window, block)
        prepared = DevicePreparedBatch(
            window_slots=own,
            window_reads=slots,
            encoder_bias=encoder,
            decoder_bias=decoder,
            rotations={
                rope.name: torch.view_as_complex(turns(batch.positions, None, rope.frequencies)) for rope in ropes
            },
            everything={ratio: self._all(batch, ratio) for ratio in dense},
            tails={},
            entry_turns={
                (ratio, rope.name): turns(batch.positions, groups.rows, rope.frequencies, ratio - 1)
                for ratio, groups in batch.groups.items()
                for rope in ropes
            },
        )
        return replace(batch, prepared=prepared)

    def _all(self, batch: Batch, ratio: int) -> Selection:
        tables = batch.block_tables.contiguous()
        return Selection(*everything(batch.positions, batch.sequences, tables, batch.max_context // ratio, ratio))

    @override
    def write_window(self, kv: Tensor, norm: Tensor, eps: float, batch: Batch, rope: Rope, view: RecordView) -> None:
        if self.no_kernels or not takes_record(view) or kv.dtype != self.dtype or kv.stride(1) != 1:
            super().write_window(kv, norm, eps, batch, rope, view)
            return
        write_window(kv, norm, eps, row_turns(batch, rope), prepared_of(batch).window_slots, view)

    @override
    def write_entries(
        self, latents: Tensor, batch: Batch, ratio: int, rope: Rope, view: RecordView, *, transform: bool = False
    ) -> None:
        prepared = prepared_of(batch)
        takes = takes_record(view) and latents.dtype == self.dtype and isinstance(prepared, DevicePreparedBatch)
        if self.no_kernels or not takes:
            super().write_entries(latents, batch, ratio, rope, view, transform=transform)
            return
        assert isinstance(prepared, DevicePreparedBatch)
        angles = prepared.entry_turns[ratio, rope.name]
        write_entries(latents.contiguous(), angles, batch.groups[ratio].slots, view, transform=transform)

    @override
    def compress(
        self, projected: Tensor, bias: Tensor | None, batch: Batch, ratio: int, tail: TailView | None
    ) -> Tensor:
        if self.no_kernels or projected.stride(1) != 1:
            return super().compress(projected, bias, batch, ratio, tail)
        rows = batch.groups[ratio].rows
        if ratio == 1:
            return pick(projected, rows)
        assert tail is not None
        place = (batch.positions, batch.sequences, batch.query_starts, batch.context_lens, batch.states)
        return pool(projected, bias, (tail.values, tail.scores), GroupRows(rows, *place), ratio)

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        limits = super().limits(shapes)
        width = shapes.get("head_dim", 512)
        if not 32 <= width <= 512 or width & (width - 1):
            reason = f"kernels hold records of 32 to 512 channels, a power of two; these have {width}"
            limits = {**dict.fromkeys(("write_window", "write_entries"), reason), **limits}
        if self.precision.cache != "records":
            reason = "kernels write quantised records, this cache is unquantised"
            limits = {**dict.fromkeys(("write_window", "write_entries"), reason), **limits}
        return limits


def row_turns(batch: Batch, rope: Rope) -> Tensor:
    """Return float32 [T, dim / 2, 2]: cos and sin of each row's rotation."""
    return torch.view_as_real(prepared_of(batch).rotations[rope.name])


def _power_of_two(dim: int) -> bool:
    half = dim // 2
    return half > 0 and half & (half - 1) == 0
