"""The pytest options of the root conftest: tests that need one are deselected without it, and get its value with it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
def test_plain():
    pass

def test_data(extra_data):
    assert (extra_data / "answer.txt").read_text() == "42"

def test_soak(soak_s):
    assert soak_s == 1.5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "answer.txt").write_text("42")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "summary"),
    [
        ([], "1 passed, 2 deselected"),
        (["--extra-data", "."], "2 passed, 1 deselected"),
        (["--extra-data", ".", "--soak", "1.5"], "3 passed"),
    ],
)
def test_options_select_tests(folder: Path, arguments: list[str], summary: str) -> None:
    result = _pytest(folder, *arguments)
    assert result.returncode == 0
    assert summary in result.stdout


def test_a_folder_that_does_not_exist_is_refused(folder: Path) -> None:
    result = _pytest(folder, "--extra-data", "nowhere")
    assert result.returncode != 0
    assert "--extra-data expects an existing folder, got 'nowhere'" in result.stderr


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
