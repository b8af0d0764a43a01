"""Fixtures that core's tests share: the golden checkpoints, unpacked once a session, and wheels made for one test.

What stands in a golden folder and where its numbers come from: `data/golden/README.md`.
"""

import lzma
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from .errors_page import ErrorsPage
from .golden import GOLDEN, unpack, unpack_folder


@pytest.fixture(scope="session")
def golden_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that unpacks one golden checkpoint, such as "v41-a", and returns its folder (read only)."""

    @cache
    def unpack_once(name: str) -> Path:
        return unpack_folder(GOLDEN / f"{name}.tar.xz", tmp_path_factory.mktemp("golden"))

    return unpack_once


@pytest.fixture(scope="session")
def golden_formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of formats.safetensors: inputs and results of every number format."""
    path = tmp_path_factory.mktemp("golden") / "formats.safetensors"
    path.write_bytes(unpack(lzma.decompress((GOLDEN / "formats.safetensors.packed.xz").read_bytes())))
    return path


@pytest.fixture(scope="session")
def errors_page() -> ErrorsPage:
    """Return the page of error messages, which tests hold to what they see."""
    return ErrorsPage()


@dataclass(frozen=True)
class Site:
    """A folder on `sys.path` in which a test installs small wheels, as pip would: modules and a dist-info folder."""

    folder: Path

    def install(
        self, wheel: str, *, version: str = "1.0", entry_points: str = "", requires: str = "", **modules: str
    ) -> None:
        """Install `wheel`; `modules` maps module names to their source."""
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(dedent(source))
        info = self.folder / f"{wheel.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {wheel}\nVersion: {version}\n{needs}")
        (info / "entry_points.txt").write_text(dedent(entry_points))
        (info / "RECORD").write_text("".join(f"{name}.py,,\n" for name in modules))

    def accelerator(self, wheel: str, name: str, entry: str, *, version: str = "1.0", target: str = "") -> None:
        """Install a wheel that publishes the accelerator `name`: `entry` is the expression that makes its entry."""
        module = wheel.replace("-", "_")
        source = f"from deepinfer.accelerator.registry import AcceleratorEntry\nentry = {entry}\n"
        modules = {module: source, f"{module}_device": target}
        points = f"[deepinfer.accelerators]\n{name} = {module}:entry\n"
        self.install(wheel, version=version, entry_points=points, **modules)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Return an empty `Site`; what is installed there is gone after the test."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models spend longer waking a second thread than computing."""
    torch.set_num_threads(1)
