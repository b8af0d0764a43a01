"""The accelerator `nvidia` for DeepInfer; this module owns the entry by which the engine finds it.

Importing it loads neither torch nor the engine; the kernels are loaded by the name in `entry.target`.
"""

import ctypes

from deepinfer.accelerator.registry import AcceleratorEntry

__all__ = ["entry"]


def _probe() -> str | None:
    """Ask the CUDA driver, not torch, for a device, so that listing accelerators stays fast."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 was not found"
    if code := driver.cuInit(0):
        return f"the NVIDIA driver did not start: cuInit returned {code}"
    count = ctypes.c_int(0)
    if code := driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the NVIDIA driver lists no devices: cuDeviceGetCount returned {code}"
    return None if count.value else "no NVIDIA device is visible to this process"


entry = AcceleratorEntry(
    contract_version=1,
    priority=100,
    target="deepinfer_kernels_cuda.accelerator:NvidiaAccelerator",
    probe=_probe,
)
