"""What every op knows: the device it runs on and how numbers are held."""

import torch

from deepinfer.accelerator.parameters import Precision


class OpsSettings:
    """Base of all op classes; made once by `Accelerator.ops`."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.precision = precision
