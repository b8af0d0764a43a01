"""The accelerator `ascend` for DeepInfer; this module owns the entry by which the engine finds it.

Importing it loads neither torch nor the engine; the kernels are loaded by the name in `entry.target`.
"""

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["AcceleratorEntry", "entry"]


@dataclass(frozen=True)
class AcceleratorEntry:
    """What the entry point group `deepinfer.accelerators` hands to the engine: plain values, no loaded class."""

    contract_version: int
    priority: int
    target: str

    def probe(self) -> str | None:
        """Return why this accelerator cannot run here, in one line, or None when its software is in place.

        Looks for CANN and torch_npu without importing either, so that listing accelerators stays fast. Whether a device
        answers is found out when the accelerator is opened.
        """
        if find_spec("torch_npu") is None:
            return "torch_npu is not installed: install deepinfer-kernels-ascend[npu]"
        try:
            ctypes.CDLL("libascendcl.so")
        except OSError:
            return "CANN was not found: libascendcl.so does not load; source CANN's set_env.sh first"
        return None


entry = AcceleratorEntry(
    contract_version=1, priority=100, target="deepinfer_kernels_ascend.accelerator:AscendAccelerator"
)
