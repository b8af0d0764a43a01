"""What every op knows: the device it runs on and how numbers are held."""

from collections.abc import Mapping

import torch

from deepinfer.accelerator.parameters import Precision


class OpsSettings:
    """Base of all op classes; made once by `Accelerator.ops`."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision

    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        """Say which of the device's own ops hand a model of `shapes` to the reference, and why: op name -> reason.

        `shapes` holds whole numbers under the names of `ModelConfig`, such as "heads" and "head_dim"; it may be empty.
        """
        return {}
