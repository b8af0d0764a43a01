"""The ops of Ascend devices: the reference, run by torch_npu on the device. Never run on hardware.

An op that gets a kernel is overridden here; what it must compute is defined, and checked, by `deepinfer.accelerator`.
"""

from deepinfer.accelerator.ops import Ops


class AscendOps(Ops):
    """Every op is the reference; `deepinfer doctor` says so for each."""
