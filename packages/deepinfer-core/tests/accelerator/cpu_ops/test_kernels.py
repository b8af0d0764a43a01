"""The CPU's bodies in C: they compile and load here; a machine on which they do not runs the reference and says so."""

import logging
from pathlib import Path
from typing import override

import pytest
import torch

from deepinfer.accelerator.conformance import TINY, Case, cases
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.cpu_ops import CpuOps, kernels
from deepinfer.accelerator.cpu_ops.kernels import Kernels, load_kernels
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision


class WithoutCompiler(CpuAccelerator):
    """The CPU of a machine that has no C compiler."""

    @override
    def ops(self, precision: Precision) -> Ops:
        ops = CpuOps(self.device, precision)
        ops.kernels = None
        return ops


@pytest.mark.parametrize("case", cases([TINY]), ids=str)
def test_the_reference_takes_over(case: Case) -> None:
    case.check(WithoutCompiler())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_compiled_once(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CACHE_FOLDER", tmp_path / "new" / "folder")
    assert isinstance(load_kernels.__wrapped__(dtype), Kernels)
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1
    monkeypatch.setattr(kernels, "COMPILER", "no-such-compiler")
    assert isinstance(load_kernels.__wrapped__(dtype), Kernels)


def test_a_broken_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CACHE_FOLDER", tmp_path / "good")
    assert isinstance(load_kernels.__wrapped__(torch.float32), Kernels)
    [library] = (tmp_path / "good").iterdir()
    monkeypatch.setattr(kernels, "CACHE_FOLDER", tmp_path / "bad")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / library.name).write_bytes(b"half a file")
    assert isinstance(load_kernels.__wrapped__(torch.float32), Kernels)


def test_a_missing_compiler_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "CACHE_FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "COMPILER", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert load_kernels.__wrapped__(torch.float32) is None
    assert "no C compiler named 'no-such-compiler' on the PATH: install one" in caplog.text


def test_a_compiler_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "CACHE_FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "FLAGS", ("--no-such-flag",))
    with caplog.at_level(logging.WARNING):
        assert load_kernels.__wrapped__(torch.float32) is None
    assert "--no-such-flag" in caplog.text
    assert list(tmp_path.iterdir()) == []
