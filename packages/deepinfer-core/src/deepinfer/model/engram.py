"""Engram of one layer: an n-gram memory that is added to the residual streams before attention."""

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.ngram_memory import EngramHash
from deepinfer.model.config import EngramConfig, ModelConfig
from deepinfer.model.engram_hash import multipliers, primes
from deepinfer.model.weights import Weights


def make_hash(config: ModelConfig, order: int, ids: Tensor, device: torch.device) -> EngramHash:
    """The hash of the `order`-th Engram layer; `ids` [V] are the compressed ids of all token ids."""
    assert config.engram is not None
    moduli = primes(config.engram)[order].reshape(-1)
    offsets = np.concatenate(([0], np.cumsum(moduli)[:-1]))
    return EngramHash(
        ids=ids.to(device),
        pad=int(ids[config.engram.pad_token_id]),
        multipliers=torch.from_numpy(multipliers(config.engram)[order]).to(device),
        primes=torch.from_numpy(moduli).to(device),
        offsets=torch.from_numpy(offsets).to(device),
    )


class Engram:
    """`prefix`.{embed, wkv, q_weight, k_weight}."""

    def __init__(self, config: ModelConfig, engram: EngramConfig, weights: Weights, ops: Ops, prefix: str) -> None:
        wide = ops.precision.wide
        ids = weights.compressed_ids()
        self.ops = ops
        self.eps = config.eps
        self.hash = make_hash(config, engram.order, ids, ops.device)
        self.table = weights.table(f"{prefix}.embed")
        self.memory = weights.linear(f"{prefix}.wkv")
        self.weights = (
            weights.vector(f"{prefix}.q_weight", wide),
            weights.vector(f"{prefix}.k_weight", wide),
        )

    def forward(self, streams: Tensor, batch: Batch) -> Tensor:
        """Streams [T, S, D] with each row's memory added: token ids decide what, the streams how much."""
        rows = self.ops.ngram_rows(batch, self.hash)
        memory = self.ops.linear(self.ops.engram_lookup(rows, self.table), self.memory)
        return self.ops.engram_gate(streams, memory, self.weights, self.eps, batch.image_rows)
