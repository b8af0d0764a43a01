"""What several test files of deepspark share: the vectors' folder and single-threaded torch."""

import tarfile
from pathlib import Path

import pytest
import torch

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors are slower on several threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of golden vectors."""
    folder = tmp_path_factory.mktemp("vectors")
    with tarfile.open(DATA / "vectors.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
