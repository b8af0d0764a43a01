"""The CPU accelerator beside its ops: memory inside and outside a control group, and work that is done at once."""

from pathlib import Path

import pytest
import torch

from deepinfer.accelerator.cpu import CpuAccelerator, host_memory
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.errors import AcceleratorError

GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A root folder of a machine with 16 GiB, 10 of them available, and a process in the group a/b."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/a/b\n")
    return tmp_path


def limit(root: Path, group: str, most: str, current: int, inactive: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_a_machine_without_groups_is_the_machine(host: Path) -> None:
    assert host_memory(host) == (10 * GIB, 16 * GIB)
    limit(host, "a/b", "max", 5)
    assert host_memory(host) == (10 * GIB, 16 * GIB)
    (host / "proc/self/cgroup").unlink()
    assert host_memory(host) == (10 * GIB, 16 * GIB)


def test_the_tightest_group_counts(host: Path) -> None:
    limit(host, "a/b", str(8 * GIB), 3 * GIB, inactive=GIB)
    assert host_memory(host) == (6 * GIB, 8 * GIB)
    limit(host, "a", str(4 * GIB), 3 * GIB)
    assert host_memory(host) == (GIB, 4 * GIB)
    limit(host, "a", str(2 * GIB), 3 * GIB)
    assert host_memory(host) == (0, 2 * GIB)


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemTotal: many\nMemAvailable: few\n"])
def test_a_kernel_that_does_not_tell_is_an_error(host: Path, text: str) -> None:
    (host / "proc/meminfo").write_text(text)
    with pytest.raises(AcceleratorError, match=r"expected MemAvailable and MemTotal in .*meminfo"):
        host_memory(host)


def test_this_machine_has_memory() -> None:
    free, total = CpuAccelerator().memory()
    assert 0 < free <= total


def test_tables_stay_where_they_are_and_work_is_done_at_once() -> None:
    device = CpuAccelerator()
    table = torch.ones(3)
    assert device.host_table(table) is table
    assert device.pinned(table) is table
    with device.stream():
        event = device.event()
        event.record()
    event.synchronize()
    assert event.query()
    assert device.capture(lambda: None) is None
    assert device.name == "cpu"
    assert isinstance(device.ops(Precision(torch.float32, round_inputs=False, cache="model")), Ops)
