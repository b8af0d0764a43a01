"""The accelerator `nvidia` for DeepInfer; this module owns the entry by which the engine finds it.

Importing it loads no torch; the accelerator is loaded by the name in `entry.target`.  `driver.py` owns `probe`.
"""

from deepinfer.accelerator.registry import AcceleratorEntry
from deepinfer_kernels_cuda.driver import probe

__all__ = ["entry"]

entry = AcceleratorEntry(
    contract_version=1, priority=100, target="deepinfer_kernels_cuda.accelerator:NvidiaAccelerator", probe=probe
)
