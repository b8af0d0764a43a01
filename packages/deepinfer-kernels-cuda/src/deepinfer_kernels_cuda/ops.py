"""The ops of NVIDIA devices: the reference for now, run by torch on the device.

An op that gets a kernel is overridden here; what it must compute is defined, and checked, by `deepinfer.accelerator`.
"""

from deepinfer.accelerator.ops import Ops


class NvidiaOps(Ops):
    """Every op is the reference; `deepinfer doctor` says so for each."""
