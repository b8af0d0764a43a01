"""Attention on the device: norms and rotations, window KV into records, and the core over records of V4.1.

V4's records, unquantised caches, the index and the compressors are the reference.
"""

from collections.abc import Mapping
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, Rope
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.paged_cache import prepared_of
from deepinfer.accelerator.ops.sparse_attention import KeySources
from deepinfer_kernels_cuda.kernel_ops import KernelOps
from deepinfer_kernels_cuda.kernels.attention import FP4, FP8, Keys, attend
from deepinfer_kernels_cuda.kernels.rows import rms_norm, rotate_queries, write_window

FORMATS = {"fp8_group32": FP8, "fp4_group16": FP4}
WIDEST = 8192
"""Channels of a row that a norm holds in registers."""


class AttentionKernels(KernelOps, Ops):
    """`rms_norm`, `rotate_queries`, `write_window` and `attention`."""

    @override
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        width = x.shape[-1]
        if self.no_kernels or width > WIDEST or x.dtype != self.dtype or x.stride(-1) != 1:
            return super().rms_norm(x, weight, eps)
        rows = x if x.ndim == 2 else x.reshape(-1, width)
        return rms_norm(rows, weight, eps).view(x.shape)

    @override
    def rotate_queries(self, q: Tensor, batch: Batch, rope: Rope, norm_eps: float | None) -> Tensor:
        if not self._turns(q.shape[2], rope) or q.dtype != self.dtype:
            return super().rotate_queries(q, batch, rope, norm_eps)
        return rotate_queries(q.contiguous(), _turns(batch, rope), norm_eps)

    @override
    def write_window(self, kv: Tensor, norm: Tensor, eps: float, batch: Batch, rope: Rope, view: RecordView) -> None:
        takes = self._turns(view.width, rope) and view.format == "fp8_group32" and kv.dtype == self.dtype
        if not takes or kv.stride(1) != 1:
            super().write_window(kv, norm, eps, batch, rope, view)
            return
        write_window(kv, norm, eps, _turns(batch, rope), prepared_of(batch).window_slots, view.data)

    @override
    def attention(self, q: Tensor, keys: KeySources, sink: Tensor, batch: Batch, rope: Rope) -> Tensor:
        takes = self._turns(q.shape[2], rope) and q.dtype == self.dtype and keys.window.format == "fp8_group32"
        chosen = keys.entries is not None and keys.selection is not None
        if not takes or (keys.entries is not None and chosen and keys.entries.format not in FORMATS):
            return super().attention(q, keys, sink, batch, rope)
        prepared = prepared_of(batch)
        bias = prepared.decoder_bias if keys.decoder else prepared.encoder_bias
        window = Keys(keys.window.data, prepared.window_reads.contiguous(), bias.contiguous(), FP8)
        entries = None
        if keys.entries is not None and keys.selection is not None and keys.selection.slots.shape[1]:
            selection = keys.selection
            lists = (selection.slots.contiguous(), selection.bias.contiguous())
            entries = Keys(keys.entries.data, *lists, FORMATS[keys.entries.format])
        return attend(q.contiguous(), window, entries, sink, _turns(batch, rope))

    def _turns(self, width: int, rope: Rope) -> bool:
        """Whether kernels run, on vectors of a width that they hold."""
        return self.no_kernels is None and 32 <= width <= 512 and width & (width - 1) == 0 and rope.dim <= width

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        limits = super().limits(shapes)
        width = shapes.get("head_dim", 512)
        if not 32 <= width <= 512 or width & (width - 1):
            reason = f"kernels hold heads of 32 to 512 channels, a power of two; these have {width}"
            limits = {**dict.fromkeys(("rotate_queries", "write_window", "attention"), reason), **limits}
        if self.precision.cache != "records":
            reason = "kernels read and write quantised records, this cache is unquantised"
            limits = {**dict.fromkeys(("write_window", "attention"), reason), **limits}
        return limits


def _turns(batch: Batch, rope: Rope) -> Tensor:
    """Return float32 [T, dim / 2, 2]: cos and sin of each row's rotation."""
    return torch.view_as_real(prepared_of(batch).rotations[rope.name])
