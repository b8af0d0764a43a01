"""How CPU ops move between tensors and numpy: the bounds up to which numpy pays, conversions, and products.

A call on a few numbers costs numpy 0.5 to 1 us and torch 2 to 6 us; a decode step makes a thousand of them.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.ops.settings import OpsSettings
from deepinfer.accelerator.parameters import Precision

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Turns = NDArray[np.complexfloating]

FEW_ROWS = 64
"""Up to this many rows the cost of an op is that of its calls, not of its sums."""

FEW_NUMBERS = 1 << 15
"""The same bound for an op on single elements."""

FEW_PRODUCTS = 1 << 18
"""Multiplications of the largest product that numpy's BLAS keeps on the calling thread; how many torch uses is set."""


class HostOps(OpsSettings):
    """Conversions that all CPU ops share."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        super().__init__(device, precision)
        self._held: dict[int, tuple[Tensor, NDArray[Any]]] = {}

    def held(self, x: Tensor) -> NDArray[Any]:
        """View a weight as an array; the view is made once and lives as long as these ops."""
        found = self._held.get(id(x))
        if found is None:
            found = self._held[id(x)] = (x, x.numpy())
        return found[1]

    @property
    def float_type(self) -> type[np.floating]:
        """The wide dtype as numpy's."""
        return np.float32 if self.wide == torch.float32 else np.float64

    def array(self, x: Tensor) -> Floats:
        """View x in the wide dtype as an array; a copy where it is held in another dtype."""
        array: Floats = x.numpy() if x.dtype == self.wide else x.to(self.wide).numpy()
        return array

    def result(self, x: Floats) -> Tensor:
        """Round an array to the activation dtype."""
        return torch.from_numpy(x) if self.dtype == self.wide else torch.from_numpy(x).to(self.dtype)

    def rounded(self, x: Floats) -> Floats:
        """Round to the activation dtype and widen again, where an op of the reference ends inside this one."""
        return x if self.dtype == self.wide else self.array(self.result(x))

    def norm(self, x: Floats, weight: Tensor | None, eps: float) -> Floats:
        """RMSNorm over the last dimension, as `rms_norm` defines it."""
        y = x * self.inverse_root(x, eps)
        if weight is not None:
            y *= self.held(weight)
        return self.rounded(y)

    def inverse_root(self, x: Floats, eps: float) -> Floats:
        """1 / sqrt(mean(x^2) + eps) over the last dimension, which is kept."""
        mean: Floats = np.vecdot(x, x)
        mean *= 1 / x.shape[-1]
        mean += eps
        return np.power(mean, -0.5, mean)[..., None]


def pick[Number: np.generic](table: NDArray[Number], places: Ints) -> NDArray[Number]:
    """Elements table[t, places[t, k]] of a table [T, N]: `take_along_axis` without its checks, a fifth of its time."""
    starts = np.arange(table.shape[0])[:, None] * table.shape[1]
    picked: NDArray[Number] = table.take(places + starts)
    return picked


def product(x: Floats, weight: Tensor) -> Floats:
    """X [T, K] times weight [K, N] (contiguous): small products in numpy, which saves half of the call."""
    if x.shape[0] * weight.numel() <= FEW_PRODUCTS:
        y: Floats = x.dot(weight.numpy())
    else:
        y = torch.mm(torch.from_numpy(x), weight).numpy()
    return y
