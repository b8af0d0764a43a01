"""The command line as a process: what it imports, how it ends on Ctrl-C and on a closed pipe."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "deepinfer"]
LONG = [
    "generate",
    "Once upon a time",
    "--model",
    "tiny",
    "--max-tokens",
    "20000",
    "--ignore-eos",
    "--accelerator",
    "cpu",
]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}


@pytest.mark.parametrize("arguments", [["--help"], ["accelerators"], ["generate", "--help"]])
def test_light_commands_import_no_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "deepinfer", *arguments]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "| deepinfer.cli" in result.stderr
    assert "| torch" not in result.stderr
    assert result.stdout


@pytest.fixture(autouse=True)
def ctrl_c_reaches_children() -> Iterator[None]:
    """A shell starts background jobs with Ctrl-C ignored, and children inherit that: these tests need it heard."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_the_text_and_shows_no_traceback() -> None:
    process = subprocess.Popen(
        [*COMMAND, *LONG], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert len(first + rest) >= 10
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    process = subprocess.Popen([*COMMAND, *LONG], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    assert process.wait(timeout=120) == 141
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_text_streams_before_it_is_finished(tmp_path: Path) -> None:
    process = subprocess.Popen([*COMMAND, *LONG], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.read(10)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
