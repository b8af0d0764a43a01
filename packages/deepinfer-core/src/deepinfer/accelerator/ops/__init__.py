"""The ops of the contract: class `Ops`, whose methods are the definition of each op in plain PyTorch.

A device subclasses `Ops`, overrides what it does faster and calls `super()` for a shape that it cannot take.
"""

from deepinfer.accelerator.ops.expert_routing import ExpertRoutingOps
from deepinfer.accelerator.ops.ngram_memory import NgramMemoryOps
from deepinfer.accelerator.ops.sampling import SamplingOps
from deepinfer.accelerator.ops.sparse_attention import SparseAttentionOps
from deepinfer.accelerator.ops.stream_mixing import StreamMixingOps


class Ops(SparseAttentionOps, StreamMixingOps, ExpertRoutingOps, NgramMemoryOps, SamplingOps):
    """All ops of one device. See each base for its part; `device` and `precision` are fixed when it is made."""
