"""What meets the device: `ModelRunner` owns the model and its cache memory, `Transfer` the memory that copies pass.

Which rows run is the `BatchBuilder`'s; what the logits become is the `Sampler`'s.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.base import Accelerator, Event
from deepinfer.accelerator.batch import Batch
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache

Array = NDArray[Any]


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


@dataclass(frozen=True, slots=True)
class _Staging:
    """Host memory that the device reads; free again when `copied` is reached."""

    memory: Tensor
    view: NDArray[np.int64]
    copied: Event


class Transfer:
    """Copies to and from one device without waiting for it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._device = accelerator.device
        self._on_host = accelerator.device.type == "cpu"
        self._staging: list[_Staging] = []

    def to_device(self, arrays: list[Array]) -> list[Tensor]:
        """Copy arrays of int64 or float64 as one and cut them apart there; on the host they become tensors in place.

        The arrays must be contiguous and nobody else's.
        """
        if self._on_host:
            return [torch.from_numpy(array) for array in arrays]
        sizes = [array.size for array in arrays]
        staging = self._take_staging(sum(sizes))
        whole = staging.memory[: sum(sizes)]
        np.concatenate([array.ravel().view(np.int64) for array in arrays], out=staging.view[: sum(sizes)])
        pieces = whole.to(self._device, non_blocking=True).split_with_sizes(sizes)
        staging.copied.record()
        self._staging.append(staging)
        return [_shaped(piece, array) for piece, array in zip(pieces, arrays, strict=True)]

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to the host; valid once an event that `mark` returns afterwards is reached."""
        if self._on_host:
            return tensor
        memory = self._accelerator.pinned(torch.empty(tensor.shape, dtype=tensor.dtype))
        return memory.copy_(tensor, non_blocking=True)

    def mark(self) -> Event | None:
        """Return an event behind everything that the device was given so far; None where that is done already."""
        if self._accelerator.synchronous:
            return None
        event = self._accelerator.event()
        event.record()
        return event

    def _take_staging(self, size: int) -> _Staging:
        """Staging memory of at least `size` numbers that no copy reads any more."""
        for place, staging in enumerate(self._staging):
            if len(staging.view) >= size and staging.copied.query():
                return self._staging.pop(place)
        memory = self._accelerator.pinned(torch.empty(max(4096, 1 << size.bit_length()), dtype=torch.int64))
        return _Staging(memory, memory.numpy(), self._accelerator.event())


def _shaped(piece: Tensor, array: Array) -> Tensor:
    typed = piece.view(torch.float64) if array.dtype.kind == "f" else piece
    return typed if array.ndim == 1 else typed.view(array.shape)
