"""Sampling on the device: masks, the best token and the draw. Filters, penalties and log-probabilities are torch's."""

from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sampling import GREEDY_TEMPERATURE, SamplingRows
from deepinfer_kernels_cuda.kernel_ops import KernelOps
from deepinfer_kernels_cuda.kernels.sampling import CHUNK, MOST_CHUNKS, best_tokens, mask_tokens


class SamplingKernels(KernelOps, Ops):
    """`mask_tokens`, `greedy` and `sample`; a row that a filter may cut is first shaped by the reference."""

    def _takes(self, logits: Tensor) -> bool:
        whole = logits.ndim == 2 and logits.stride(1) == 1 and logits.dtype == torch.float32
        return self.no_kernels is None and whole and 0 < logits.shape[1] <= CHUNK * MOST_CHUNKS

    @override
    def mask_tokens(self, logits: Tensor, bitmask: Tensor) -> Tensor:
        if not self._takes(logits) or bitmask.stride(1) != 1:
            return super().mask_tokens(logits, bitmask)
        return mask_tokens(logits, bitmask)

    @override
    def greedy(self, logits: Tensor) -> Tensor:
        return best_tokens(logits, None) if self._takes(logits) else super().greedy(logits)

    @override
    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if not self._takes(logits):
            return super().sample(logits, rows)
        temperature = rows.temperature
        if rows.filtered:
            logits = self.shape_logits(logits, rows)
            temperature = temperature.masked_fill(temperature >= GREEDY_TEMPERATURE, 1.0)
        return best_tokens(logits, (temperature, rows.seeds, rows.positions))
