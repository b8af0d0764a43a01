"""What must be installed before an Ascend device can be used: its driver, CANN and torch_npu, looked at without torch.

Using a device is `accelerator.py`'s.  Written from Huawei's documentation; no machine with a device has run it.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "libascendcl.so"
SMALLEST_CANN = (9, 2)
"""The CANN that torch_npu for torch 2.14 is built with."""


def probe() -> str | None:
    """Return in one line why no Ascend device can be used here, or None when everything needed is in place."""
    return missing(Path("/"), ctypes.CDLL, torch_npu=find_spec("torch_npu") is not None)


def missing(root: Path, load: Callable[[str], object], *, torch_npu: bool) -> str | None:
    """Return the first thing that is missing: the device, CANN, its version, torch_npu; None when all is there.

    `root` is where `dev` and `proc` lie, `load` opens a shared library.
    """
    if not any((root / "dev").glob("davinci[0-9]*")):
        return "no Ascend device on this machine: no /dev/davinci0 or the like; install the driver, check npu-smi info"
    try:
        load(LIBRARY)
    except OSError:
        return f"CANN was not found: {LIBRARY} does not load; install CANN 9.2 and source its set_env.sh"
    if (has := cann_version(root)) is not None and has < SMALLEST_CANN:
        return (
            f"CANN {has[0]}.{has[1]} is installed, at least {SMALLEST_CANN[0]}.{SMALLEST_CANN[1]} is needed: update it"
        )
    if not torch_npu:
        return "torch_npu is not installed: install deepinfer-kernels-ascend[npu]"
    return None


def cann_version(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the version of the CANN whose library this process has loaded, or None when its files do not say."""
    for info in _install_infos(root):
        if match := re.search(r"^version=(\d+)\.(\d+)", info.read_text(errors="replace"), re.MULTILINE):
            return int(match[1]), int(match[2])
    return None


def _install_infos(root: Path) -> Iterator[Path]:
    """Yield the `ascend_..._install.info` files in the folders above the loaded library."""
    try:
        maps = (root / "proc/self/maps").read_text()
    except OSError:
        return
    if match := re.search(rf"(/\S*/){re.escape(LIBRARY)}", maps):
        folder = root / match[1].lstrip("/")
        for parent in [folder, *folder.parents][:5]:
            yield from sorted(parent.glob("ascend_*_install.info"))
