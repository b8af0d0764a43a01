"""The accelerator `ascend` for DeepInfer; this module owns the entry by which the engine finds it.

Importing it loads neither torch nor the engine; the kernels are loaded by the name in `entry.target`.
"""

import ctypes
from importlib.util import find_spec

from deepinfer.accelerator.registry import AcceleratorEntry

__all__ = ["entry"]


def _probe() -> str | None:
    """Look for torch_npu and CANN without importing torch; whether a device answers shows when it is opened."""
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed: install deepinfer-kernels-ascend[npu]"
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return "CANN was not found: libascendcl.so does not load; source CANN's set_env.sh first"
    return None


entry = AcceleratorEntry(
    contract_version=1,
    priority=100,
    target="deepinfer_kernels_ascend.accelerator:AscendAccelerator",
    probe=_probe,
)
