"""The ops of NVIDIA devices: the wheel's kernels where there are some, else the reference, run by torch on the device.

What an op must compute is defined, and checked, by `deepinfer.accelerator`; kernels lie in `kernels/`.
"""

from collections.abc import Mapping
from typing import override

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.report import OPS
from deepinfer_kernels_cuda.attention_ops import AttentionKernels
from deepinfer_kernels_cuda.expert_ops import ExpertKernels
from deepinfer_kernels_cuda.linear_ops import LinearKernels
from deepinfer_kernels_cuda.mixing_ops import MixingKernels
from deepinfer_kernels_cuda.sampling_ops import SamplingKernels


class NvidiaOps(AttentionKernels, LinearKernels, ExpertKernels, MixingKernels, SamplingKernels, Ops):
    """All ops; `deepinfer doctor` says for each which implementation runs, and why when it is the reference."""

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        reason = self.no_kernels
        return super().limits(shapes) if reason is None else dict.fromkeys(own_ops(type(self)), reason)


def own_ops(cls: type[Ops]) -> list[str]:
    """Names of the ops that `cls` overrides."""
    return [op.__name__ for op in OPS if getattr(cls, op.__name__) is not op]
