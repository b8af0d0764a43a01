"""Engram on the device: rows of n-grams, lookups in device or pinned host memory, the gate; no op waits for the host.

A NaN scale in a table gives NaN logits, which end the request that read it: nothing here could raise for it.
"""

from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.ngram_memory import EngramHash
from deepinfer.accelerator.parameters import StoredTable
from deepinfer_kernels_cuda.kernel_ops import KernelOps
from deepinfer_kernels_cuda.kernels.engram import (
    MOST_CHANNELS,
    MOST_COLUMNS,
    Grams,
    Hash,
    engram_gate,
    lookup,
    ngram_rows,
)


class MemoryKernels(KernelOps, Ops):
    """`ngram_rows`, `engram_lookup` and `engram_gate`."""

    @override
    def ngram_rows(self, batch: Batch, hashing: EngramHash) -> Tensor:
        grams = hashing.multipliers.shape[0]
        if self.no_kernels or hashing.primes.shape[0] > MOST_COLUMNS or batch.history.shape[1] < grams - 1 or grams < 2:
            return super().ngram_rows(batch, hashing)
        parts = (hashing.ids, hashing.multipliers, hashing.primes, hashing.offsets)
        images = None if batch.history_images is None else batch.history_images.contiguous()
        given = Grams(batch.token_ids, batch.history.contiguous(), batch.image_rows, images)
        return ngram_rows(given, Hash(*parts, hashing.pad))

    @override
    def engram_lookup(self, rows: Tensor, table: StoredTable) -> Tensor:
        if self.no_kernels or not self._reaches(table.data) or table.data.shape[1] > MOST_CHANNELS:
            return super().engram_lookup(rows, table)
        if table.scale is None:
            return lookup(rows, table.data, None)
        return lookup(rows, table.data.view(torch.uint8), table.scale.view(torch.uint8))

    def _reaches(self, data: Tensor) -> bool:
        """Whether kernels can read a table of this kind where it lies."""
        known = data.dtype in (torch.float8_e4m3fn, torch.bfloat16)
        return known and (data.device.type == self.device.type or data.is_pinned())

    @override
    def engram_gate(
        self,
        streams: Tensor,
        memory: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        image_rows: Tensor | None,
    ) -> Tensor:
        takes = streams.is_contiguous() and streams.dtype == memory.dtype == self.dtype
        if self.no_kernels or not takes or streams.shape[2] > MOST_CHANNELS:
            return super().engram_gate(streams, memory, weights, eps, image_rows)
        return engram_gate(streams, memory.contiguous(), weights, eps, image_rows)
