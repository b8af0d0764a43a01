"""The accelerator `ascend` for DeepInfer, never run on hardware; this module owns the entry by which it is found.

Importing it loads no torch; the accelerator is loaded by the name in `entry.target`.  `installation.py` owns `probe`.
"""

from deepinfer.accelerator.registry import AcceleratorEntry
from deepinfer_kernels_ascend.installation import probe

__all__ = ["entry"]

entry = AcceleratorEntry(
    contract_version=1, priority=100, target="deepinfer_kernels_ascend.accelerator:AscendAccelerator", probe=probe
)
