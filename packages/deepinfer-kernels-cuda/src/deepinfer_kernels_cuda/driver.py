"""What the NVIDIA driver says about this machine, asked through its C library and without torch.

Using a device is `accelerator.py`'s.  Source: the CUDA driver API (cuInit, cuDriverGetVersion, cuDeviceGetAttribute).
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

LIBRARY = "libcuda.so.1"
TORCH_CUDA = 13
"""The CUDA major version of torch 2.11 and newer from the public index; a driver serves its own version and older."""
SMALLEST_CAPABILITY = (8, 0)
"""Ampere: the oldest device with bfloat16."""

_NO_DEVICE = 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


class DriverError(Exception):
    """Why no NVIDIA device can be used here, in one line."""


@dataclass(frozen=True)
class Device:
    """The first visible device: its compute capability and the newest CUDA that its driver serves, (major, minor)."""

    capability: tuple[int, int]
    cuda: tuple[int, int]


def probe() -> str | None:
    """Return in one line why the first visible NVIDIA device cannot be used, or None when it can."""
    try:
        check_torch(_installed_torch())
        check_device(first_device())
    except DriverError as error:
        return str(error)
    return None


def first_device(load: Callable[[str], Any] = ctypes.CDLL) -> Device:
    """Ask the driver for the first visible device; raises `DriverError` where there is no driver or no device."""
    try:
        driver = load(LIBRARY)
    except OSError:
        raise DriverError(
            f"no NVIDIA driver on this machine: {LIBRARY} was not found; install a driver for CUDA {TORCH_CUDA}"
        ) from None
    code = driver.cuInit(0)
    if code == _NO_DEVICE:
        raise DriverError("the NVIDIA driver sees no device: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    _succeed(code, "cuInit")
    number, count, handle = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    _succeed(driver.cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
    _succeed(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if count.value == 0:
        raise DriverError("the NVIDIA driver shows this process no device: check CUDA_VISIBLE_DEVICES")
    _succeed(driver.cuDeviceGet(ctypes.byref(handle), 0), "cuDeviceGet")
    capability = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int(0)
        _succeed(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle), "cuDeviceGetAttribute")
        capability.append(value.value)
    return Device((capability[0], capability[1]), (number.value // 1000, number.value % 1000 // 10))


def check_device(device: Device) -> None:
    """Raise `DriverError` when the driver or the device is too old."""
    if device.cuda[0] < TORCH_CUDA:
        raise DriverError(
            f"the NVIDIA driver serves CUDA {device.cuda[0]}.{device.cuda[1]}, CUDA {TORCH_CUDA} is needed: update it"
        )
    if device.capability < SMALLEST_CAPABILITY:
        has, needs = (f"{major}.{minor}" for major, minor in (device.capability, SMALLEST_CAPABILITY))
        raise DriverError(f"the first device has compute capability {has}, at least {needs} is needed (bfloat16)")


def check_torch(torch: str | None) -> None:
    """Raise `DriverError` when the installed torch, by its version, is a build without CUDA 13."""
    if torch is None:
        raise DriverError("torch is not installed: install torch from the public index")
    local = torch.partition("+")[2]
    match = re.fullmatch(r"cu(\d\d)\d", local)
    if local and (match is None or int(match[1]) < TORCH_CUDA):
        raise DriverError(f"torch {torch} is not built for CUDA {TORCH_CUDA}: install torch from the public index")


def _installed_torch() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _succeed(code: int, call: str) -> None:
    if code:
        raise DriverError(f"the NVIDIA driver does not work: {call} returned {code}; check nvidia-smi")
