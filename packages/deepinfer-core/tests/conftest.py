"""Fixtures that core's tests share: the golden checkpoints, unpacked once a session.

What stands in a golden folder and where its numbers come from: `data/golden/README.md`.
"""

import lzma
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="session")
def golden_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that unpacks one golden checkpoint, such as "v41-a", and returns its folder; do not write there."""

    @cache
    def unpack(name: str) -> Path:
        root = tmp_path_factory.mktemp("golden")
        with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
            archive.extractall(root, filter="data")
        return root / name

    return unpack


@pytest.fixture(scope="session")
def golden_formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of formats.safetensors: inputs and results of every number format."""
    path = tmp_path_factory.mktemp("golden") / "formats.safetensors"
    path.write_bytes(lzma.decompress((GOLDEN / "formats.safetensors.xz").read_bytes()))
    return path
