"""Attention on the device: norms, rotations, and the core over window KV and entries in quantised records.

Unquantised caches are the reference; the choice of entries is `index_ops.py`'s.
"""

from collections.abc import Mapping
from typing import override

from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, Rope
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.paged_cache import prepared_of
from deepinfer.accelerator.ops.sparse_attention import KeySources
from deepinfer_kernels_cuda.cache_ops import row_turns
from deepinfer_kernels_cuda.kernel_ops import KernelOps
from deepinfer_kernels_cuda.kernels.attention import Keys, attend
from deepinfer_kernels_cuda.kernels.records import FORMATS, takes_record
from deepinfer_kernels_cuda.kernels.rows import rms_norm, rotate_queries

WIDEST = 8192
"""Channels of a row that a norm holds in registers."""


class AttentionKernels(KernelOps, Ops):
    """`rms_norm`, `rotate_queries` and `attention`."""

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
        return rotate_queries(q.contiguous(), row_turns(batch, rope), norm_eps)

    @override
    def attention(self, q: Tensor, keys: KeySources, sink: Tensor, batch: Batch, rope: Rope) -> Tensor:
        chosen = keys.entries if keys.selection is not None and keys.selection.slots.shape[1] else None
        takes = self._turns(q.shape[2], rope) and q.dtype == self.dtype and _reads(keys.window)
        if not takes or (chosen is not None and not _reads(chosen)):
            self.only_reference("attention", f"{keys.window.format} records of {q.shape[2]} channels")
            return super().attention(q, keys, sink, batch, rope)
        prepared = prepared_of(batch)
        bias = prepared.decoder_bias if keys.decoder else prepared.encoder_bias
        reads = (prepared.window_reads.contiguous(), bias.contiguous())
        window = Keys(keys.window.data, *reads, FORMATS[keys.window.format])
        entries = None
        if chosen is not None and keys.selection is not None:
            lists = (keys.selection.slots.contiguous(), keys.selection.bias.contiguous())
            entries = Keys(chosen.data, *lists, FORMATS[chosen.format])
        return attend(q.contiguous(), window, entries, sink, row_turns(batch, rope), steady=self.steady)

    def _turns(self, width: int, rope: Rope) -> bool:
        """Whether kernels run, on vectors of a width that they hold."""
        return self.no_kernels is None and 32 <= width <= 512 and width & (width - 1) == 0 and rope.dim <= width

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        limits = super().limits(shapes)
        width = shapes.get("head_dim", 512)
        if not 32 <= width <= 512 or width & (width - 1):
            reason = f"kernels hold heads of 32 to 512 channels, a power of two; these have {width}"
            limits = {**dict.fromkeys(("rotate_queries", "attention"), reason), **limits}
        if self.precision.cache != "records":
            limits = {"attention": "kernels read quantised records, this cache is unquantised", **limits}
        return limits


def _reads(view: RecordView) -> bool:
    """Whether attention reads such records: all quantised ones but index keys."""
    return takes_record(view) and view.format != "fp4_group32"
