"""The ranks that run one model together: who holds which experts, and the sums and maxima that join them.

Ops are rank-blind: they take local expert numbers and return partial sums.  No process-wide group is touched; a
`Parallel` is an argument.  The engine runs on one rank so far; the ops of a mixture of experts run on any number.
"""

from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceOp, TCPStore  # type: ignore[attr-defined]

from deepinfer.errors import ConfigError


class Collectives(Protocol):
    """What a `Parallel` needs of a device's library; both change their argument on every rank and return it."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks."""

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest of all ranks, element by element."""


class Parallel:
    """Rank `rank` of `size`; without arguments the only one.

    Raises ConfigError when several ranks have nothing to speak through, or a rank is not below the size.
    """

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank must be at least 0 and below the number of ranks, got rank {rank} of {size}")
        if size > 1 and collectives is None:
            raise ConfigError(f"{size} ranks need collectives to join their results, got none: pass Gloo(...)")
        self.rank, self.size = rank, size
        self._collectives = collectives

    def max(self, value: int) -> int:
        """Return the largest `value` of all ranks, such as the padded size of a step."""
        if self._collectives is None:
            return value
        return int(self._collectives.max(torch.tensor([value])).item())

    def sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all ranks, in place."""
        return tensor if self._collectives is None else self._collectives.sum(tensor)

    def experts(self, count: int) -> range:
        """Return the experts of this rank when `count` are split evenly; raises ConfigError when they cannot be."""
        if count % self.size:
            raise ConfigError(f"{count} experts cannot be split evenly over {self.size} ranks: choose a divisor")
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def local(self, picks: Tensor, count: int) -> Tensor:
        """Turn picks among `count` experts into local numbers, -1 = on another rank."""
        held = self.experts(count)
        return torch.where((picks >= held.start) & (picks < held.stop), picks - held.start, -1)


class Gloo:
    """Collectives between processes over the network, for tensors in host memory.

    address    host and port of rank 0, which serves the rendezvous
    timeout_s  how long a rank waits for the others
    """

    def __init__(self, rank: int, size: int, address: tuple[str, int], *, timeout_s: float = 60.0) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(*address, world_size=size, is_master=rank == 0, timeout=timeout)
        self._group = ProcessGroupGloo(store, rank, size, timeout)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks."""
        return self._reduce(tensor, ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest of all ranks, element by element."""
        return self._reduce(tensor, ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        self._group.allreduce([tensor], operation).wait()  # type: ignore[attr-defined]
        return tensor
