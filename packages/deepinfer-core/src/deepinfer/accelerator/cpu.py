"""The accelerator `cpu`: the reference ops on the host, through the same contract as every device.

What the ops compute is defined in `ops/`; this module owns how much memory the process may use.
"""

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import override

import torch

from deepinfer.accelerator.base import Accelerator, Event
from deepinfer.accelerator.cpu_ops import CpuOps
from deepinfer.accelerator.cpu_ops.kernels import load_kernels
from deepinfer.accelerator.cpu_ops.tiled import TiledCpuOps
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.errors import AcceleratorError


class CpuAccelerator(Accelerator):
    """The host. Work is done when an op returns, so streams and events have nothing to wait for."""

    name = "cpu"
    deterministic = True
    is_reference = True
    synchronous = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @override
    def description(self) -> str:
        bodies = "" if load_kernels(torch.float32) else ", no C compiler: half as fast"
        return f"{platform.machine()} with {torch.get_num_threads()} threads, torch {torch.__version__}{bodies}"

    @override
    def ops(self, precision: Precision) -> Ops:
        return CpuOps(self.device, precision)

    @override
    def deterministic_ops(self, precision: Precision) -> Ops:
        return TiledCpuOps(self.device, precision)

    @override
    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the host, or of the control group that this process is confined to."""
        return host_memory()

    @override
    def warm(self) -> int:
        """Compile the bodies in C, where there is a compiler."""
        return sum(load_kernels(dtype) is not None for dtype in (torch.float32, torch.float64))

    @override
    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def event(self) -> Event:
        return _Reached()


class _Reached:
    """An event of a device that finishes each op before it returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (free, total) bytes of host memory, at most what the control group (v2) allows.

    `root` is where `proc` and `sys` lie.  Raises `AcceleratorError` where the kernel does not tell.
    """
    path = root / "proc/meminfo"
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
        free, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, ValueError, KeyError) as error:
        raise AcceleratorError(
            f"expected MemAvailable and MemTotal in {path}, got {type(error).__name__}: {error}; "
            "DeepInfer runs on Linux with a readable /proc"
        ) from error
    for group in _groups(root):
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such controller, or "max": no limit
            continue
        # Cached file pages count as used but are given up on demand, as MemAvailable counts them for the host.
        free, total = min(free, limit - used + int(stat.get("inactive_file", 0))), min(total, limit)
    return max(free, 0), total


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's control group (v2) and of all groups around it."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    folder = top / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]
