"""What may be missing on a machine for Ascend, and the line that a user reads; the machine is a folder made here."""

from pathlib import Path

import pytest

from deepinfer_kernels_ascend.installation import cann_version, missing


def found(name: str) -> object:
    return name


def absent(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root folder with a device, and a CANN 9.2 whose library is loaded."""
    toolkit = tmp_path / "usr/local/Ascend/cann/aarch64-linux"
    (toolkit / "lib64").mkdir(parents=True)
    (toolkit / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=9.2.RC1\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci0").touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "7f00-7f01 r-xp 0000 08:01 42    /usr/local/Ascend/cann/aarch64-linux/lib64/libascendcl.so\n"
    (tmp_path / "proc/self/maps").write_text(line)
    return tmp_path


def test_a_complete_machine_is_taken(machine: Path) -> None:
    assert missing(machine, found, torch_npu=True) is None
    assert cann_version(machine) == (9, 2)


def test_each_missing_thing_has_its_line(machine: Path) -> None:
    assert "torch_npu is not installed" in (missing(machine, found, torch_npu=False) or "")
    assert "CANN was not found: libascendcl.so does not load" in (missing(machine, absent, torch_npu=True) or "")
    (machine / "dev/davinci0").unlink()
    assert "no Ascend device on this machine" in (missing(machine, found, torch_npu=True) or "")


def test_an_old_cann_is_refused_and_an_unknown_one_is_not(machine: Path) -> None:
    (info,) = machine.rglob("*.info")
    info.write_text("version=8.5.0\n")
    assert missing(machine, found, torch_npu=True) == "CANN 8.5 is installed, at least 9.2 is needed: update it"
    info.unlink()
    assert cann_version(machine) is None
    assert missing(machine, found, torch_npu=True) is None
