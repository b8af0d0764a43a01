"""One Ascend device through torch_npu: its memory, streams and graphs. Never run on hardware.

What it computes is `ops.py`'s; whether everything needed is installed is answered by `installation.py`, without torch.
"""

import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, override

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator, Event
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.tiled_ops import TiledOps
from deepinfer.errors import AcceleratorError
from deepinfer_kernels_ascend.installation import cann_version
from deepinfer_kernels_ascend.ops import AscendOps

_log = logging.getLogger(__name__)


class TiledAscendOps(TiledOps):
    """The reference on tiles that keep a device busier than the default; its products see one shape each."""

    tile_rows = 64
    tile_keys = 128


class AscendAccelerator(Accelerator):
    """The first visible device; ASCEND_RT_VISIBLE_DEVICES decides which one that is.

    Nobody has run this class on hardware: it is written after torch_npu's documentation, and says so when it is opened.
    """

    name = "ascend"
    deterministic = True

    def __init__(self) -> None:
        self._npu = _torch_npu()
        if not self._npu.is_available():
            raise AcceleratorError(
                f"torch_npu finds no usable Ascend device: compare with `npu-smi info`; CANN is {_cann()}"
            )
        _log.warning(
            "accelerator 'ascend' was never run on hardware: check its results with `deepinfer doctor --check`"
        )
        self.device = torch.device("npu", 0)
        self._side = self._npu.Stream(self.device)

    @override
    def description(self) -> str:
        name = self._npu.get_device_name(0)
        return f"{name}, CANN {_cann()}, torch {torch.__version__} (this accelerator was never run on hardware)"

    @override
    def ops(self, precision: Precision) -> Ops:
        if precision.dtype == torch.float64:
            raise AcceleratorError(
                "accelerator 'ascend' has no float64: "
                'choose dtype "auto" or "float32", or accelerator="cpu" for float64'
            )
        return AscendOps(self.device, precision)

    @override
    def deterministic_ops(self, precision: Precision) -> Ops:
        """Return the reference by tiles, without a kernel of this wheel; `deepinfer verify-determinism` proves it."""
        return TiledAscendOps(self.device, precision)

    @override
    def memory(self) -> tuple[int, int]:
        free, total = self._npu.mem_get_info(self.device)
        return int(free), int(total)

    @override
    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    @override
    def host_table(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy in host memory: rows of it are copied to the device without a staging copy."""
        return tensor.pin_memory()

    @override
    def stream(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._npu.stream(self._side)
        return context

    @override
    def event(self) -> Event:
        event: Event = self._npu.Event()
        return event

    @override
    def capture(self, run: Callable[[], None]) -> None:
        """Return None: graphs of torch_npu are not used before somebody has run this class on hardware."""


def _torch_npu() -> Any:
    """Import torch_npu, which adds the device `npu` to torch, and return its device module."""
    try:
        return importlib.import_module("torch_npu").npu
    except (ImportError, OSError, AttributeError) as error:
        raise AcceleratorError(
            f"torch_npu does not import: {type(error).__name__}: {error}; install deepinfer-kernels-ascend[npu] for "
            f"torch {torch.__version__}, and source CANN's set_env.sh (CANN is {_cann()})"
        ) from error


def _cann() -> str:
    version = cann_version()
    return f"{version[0]}.{version[1]}" if version else "of unknown version"
