"""Runs the model on a `Batch`: owns the model and its cache memory.

Which rows run is the `BatchBuilder`'s; what the logits become is the `Sampler`'s.
"""

from typing import Protocol

import torch

from deepinfer.accelerator.batch import Batch
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache


class Model(Protocol):
    """What runs a step; `model.deepseek.DeepSeek` does."""

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        """Write the cache of every row and return logits of `batch.logit_rows`."""
        ...


class ModelRunner:
    """One model and one cache."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def run(self, batch: Batch) -> ModelOutput:
        """Run one step."""
        return self._model.forward(batch, self._cache)
