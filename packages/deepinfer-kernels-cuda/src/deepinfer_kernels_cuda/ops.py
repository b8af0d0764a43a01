"""The ops of NVIDIA devices: the wheel's kernels where there are some, else the reference, run by torch on the device.

What an op must compute is defined, and checked, by `deepinfer.accelerator`; kernels lie in `kernels/`.
"""

from collections.abc import Mapping
from typing import override

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.report import OPS
from deepinfer.accelerator.tiled_ops.rows import TiledRows
from deepinfer_kernels_cuda.attention_ops import AttentionKernels
from deepinfer_kernels_cuda.cache_ops import CacheKernels
from deepinfer_kernels_cuda.expert_ops import ExpertKernels
from deepinfer_kernels_cuda.index_ops import IndexKernels
from deepinfer_kernels_cuda.linear_ops import LinearKernels
from deepinfer_kernels_cuda.memory_ops import MemoryKernels
from deepinfer_kernels_cuda.mixing_ops import MixingKernels
from deepinfer_kernels_cuda.sampling_ops import SamplingKernels


class NvidiaOps(
    AttentionKernels,
    IndexKernels,
    CacheKernels,
    LinearKernels,
    ExpertKernels,
    MixingKernels,
    MemoryKernels,
    SamplingKernels,
    Ops,
):
    """All ops; `deepinfer doctor` says for each which implementation runs, and why when it is the reference."""

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        reason = self.no_kernels
        return super().limits(shapes) if reason is None else dict.fromkeys(own_ops(type(self)), reason)


class SteadyNvidiaOps(NvidiaOps, TiledRows):
    """Ops of `deterministic=True`: the same kernels, chosen by the model's shapes alone; the reference by tiles.

    Each kernel gives a row the same bits alone and among others; `invariance_cases` hold it.
    """

    steady = True
    tile_rows = 64


def own_ops(cls: type[Ops]) -> list[str]:
    """Names of the ops that `cls` overrides."""
    return [op.__name__ for op in OPS if getattr(cls, op.__name__) is not op]
