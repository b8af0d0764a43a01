"""What the driver can answer, and the line that a user reads for each answer."""

from dataclasses import dataclass
from typing import Any

import pytest

from deepinfer_kernels_cuda.driver import Device, DriverError, check_device, check_torch, first_device


@dataclass
class Library:
    """The calls of the driver's C library with the answers of one machine; results go through pointers as in C."""

    init: int = 0
    version: int = 13000
    devices: int = 1
    capability: tuple[int, int] = (9, 0)
    broken: str = ""

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 999 if self.broken == "cuDriverGetVersion" else 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:  # noqa: N802
        handle._obj.value = 7
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:  # noqa: N802
        assert handle.value == 7
        value._obj.value = self.capability[{75: 0, 76: 1}[attribute]]
        return 0


def reason(library: Library) -> str | None:
    try:
        check_device(first_device(lambda name: library))
    except DriverError as error:
        return str(error)
    return None


def test_no_driver() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(DriverError, match=r"no NVIDIA driver on this machine: libcuda\.so\.1 was not found"):
        first_device(missing)


def test_a_new_driver_and_device_are_taken() -> None:
    assert reason(Library()) is None
    assert first_device(lambda name: Library(version=13020, capability=(10, 3))) == Device((10, 3), (13, 2))


@pytest.mark.parametrize(
    ("library", "told"),
    [
        (Library(init=100), "sees no device: check nvidia-smi"),
        (Library(init=803), "does not work: cuInit returned 803"),
        (Library(broken="cuDriverGetVersion"), "does not work: cuDriverGetVersion returned 999"),
        (Library(devices=0), "shows this process no device: check CUDA_VISIBLE_DEVICES"),
        (Library(version=12090), "serves CUDA 12.9, CUDA 13 is needed: update it"),
        (Library(capability=(7, 5)), "has compute capability 7.5, at least 8.0 is needed"),
    ],
)
def test_each_shortcoming_has_its_line(library: Library, told: str) -> None:
    assert told in (reason(library) or "")


@pytest.mark.parametrize("version", ["2.14.0", "2.11.0+cu130", "2.15.0+cu131"])
def test_torch_for_cuda_13_is_taken(version: str) -> None:
    check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0+cpu", "2.11.0+cu128", "2.11.0+rocm6.4"])
def test_torch_for_something_else_is_refused(version: str) -> None:
    with pytest.raises(DriverError, match="is not built for CUDA 13: install torch from the public index"):
        check_torch(version)
    with pytest.raises(DriverError, match="torch is not installed"):
        check_torch(None)
