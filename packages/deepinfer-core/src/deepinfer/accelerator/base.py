"""What every accelerator offers beside its ops: memory, streams, graph capture and the layout of its cache.

Finding one is `registry.py`'s; what ops compute is defined in `ops/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.errors import AcceleratorError


@dataclass(frozen=True)
class CacheLayout:
    """Bytes of cache memory, by kind; the bytes themselves are opaque to everybody but the ops.

    block_bytes             one block of BLOCK_TOKENS tokens in the pool of entries and index keys
    window_block_bytes      one block of BLOCK_TOKENS tokens of window KV of all layers and draft stages
    state_bytes             per-sequence memory: the tails of all compressors
    snapshot_bytes          what a snapshot of a sequence keeps of that beside a window block
    fingerprint             format, version and model: part of the root of every prefix hash and of every cache file
    """

    block_bytes: int
    window_block_bytes: int
    state_bytes: int
    snapshot_bytes: int
    fingerprint: str

    @property
    def bytes_per_token(self) -> float:
        """Bytes of entries and index keys for one token, averaged over a block (the released V4.1: 890)."""
        return self.block_bytes / BLOCK_TOKENS


class Event(Protocol):
    """A point in a stream: results computed before it are valid once it is reached."""

    def record(self) -> None:
        """Mark this point of the current stream."""

    def synchronize(self) -> None:
        """Wait until the point is reached."""

    def query(self) -> bool:
        """Say whether the point is reached."""


class Accelerator(ABC):
    """One device of this process. Kernel wheels subclass it; the CPU reference is `cpu.CpuAccelerator`.

    `deterministic`: `deterministic_ops` has what it promises.  `is_reference`: the definition of an op is this device's
    own body of it, not a way out.  `synchronous`: an op has finished when it returns, so that nothing runs while the
    host prepares the next step.  `graphs`: `capture` records.  Work of one stream is done in the order in which it was
    given.
    """

    name: str
    device: torch.device
    deterministic: bool = False
    is_reference: bool = False
    synchronous: bool = False
    graphs: bool = False

    def description(self) -> str:
        """Say in one line which device this is, with the versions of its driver and libraries."""
        return self.name

    @abstractmethod
    def ops(self, precision: Precision) -> Ops:
        """Return this device's ops for activations of `precision`."""

    def deterministic_ops(self, precision: Precision) -> Ops:
        """Return ops whose every row is bitwise the same whatever else is in the step, however a prompt is cut.

        The bits may differ from those of `ops`, and from those of another device, version or number of threads.  Raises
        AcceleratorError where the device has none.  `tiled_ops.TiledOps` makes them of ops that keep to fixed shapes.
        """
        raise AcceleratorError(
            f"accelerator {self.name!r} has no deterministic ops, which deterministic=True asks for: leave it out, or "
            'choose accelerator="cpu"'
        )

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes for weights and cache."""

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a host copy of `tensor` that the device reaches without a staging copy; here the tensor itself.

        Copies with `non_blocking=True` from and to such memory do not wait for the device: the caller leaves it alone
        until an event behind the copy is reached.
        """
        return tensor

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a weight of a mapped file where the ops' packing reads it fastest; here the mapping itself."""
        return tensor

    def host_table(self, tensor: Tensor) -> Tensor:
        """Return a large table in host memory in the form that ops look rows up in; here the file mapping itself."""
        return tensor

    @abstractmethod
    def stream(self) -> AbstractContextManager[None]:
        """Return a context in which work goes to a side stream."""

    @abstractmethod
    def event(self) -> Event:
        """Return a new event of the current stream."""

    def warm(self) -> int:
        """Compile everything that ops need and keep it for later processes; return how many kernels that is."""
        return 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Record `run` as a graph and return its replay; None where the device has no graphs.

        `run` is called before it is recorded, so that libraries make what they need; what it does must not depend on
        anything that the host would have to ask the device.  Raises what the device raises for a step that cannot be
        recorded; the device goes on working.
        """
        return None
