"""What every op knows: the device it runs on and how numbers are held."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deepinfer.accelerator.parameters import Precision


class OpsSettings:
    """Base of all op classes; made once by `Accelerator.ops`."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision
        self.dtype = precision.dtype
        self.wide = precision.wide

    def widen(self, x: Tensor) -> Tensor:
        """Return x in the wide dtype; asking first costs a tenth of a conversion that changes nothing."""
        return x if x.dtype == self.wide else x.to(self.wide)

    def narrow(self, x: Tensor) -> Tensor:
        """Return x in the activation dtype: the one rounding at the end of an op."""
        return x if x.dtype == self.dtype else x.to(self.dtype)

    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        """Say which of the device's own ops hand a model of `shapes` to the reference, and why: op name -> reason.

        `shapes` holds whole numbers under the names of `ModelConfig`, such as "heads" and "head_dim"; it may be empty.
        """
        return {}
