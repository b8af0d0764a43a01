"""The ops of the CPU accelerator: the reference, with bodies in C for steps of few rows.

A host has no launch to hide behind: a chain of small torch calls costs its call overhead, several microseconds each.
Each module holds one room of `accelerator/ops` and calls its bodies in `c/`; what it does not override, and most steps
of many rows, is the reference.
"""

from deepinfer.accelerator.cpu_ops.attention import CpuAttention
from deepinfer.accelerator.cpu_ops.experts import CpuExperts
from deepinfer.accelerator.cpu_ops.mixing import CpuMixing
from deepinfer.accelerator.cpu_ops.projection import CpuProjection
from deepinfer.accelerator.ops import Ops


class CpuOps(CpuAttention, CpuMixing, CpuExperts, CpuProjection, Ops):
    """Reference ops for a host; same numbers up to the order of sums."""
