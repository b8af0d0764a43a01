"""Environment variables: which are read, and what a wrong one is told."""

import logging
import subprocess
import sys

import pytest

from deepinfer.environment import VARIABLES, Environment, read_environment
from deepinfer.errors import ConfigError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_environment({}) == Environment("auto", None, "info")
    assert read_environment(dict.fromkeys(VARIABLES, "")) == Environment()


def test_values_are_taken_over() -> None:
    variables = {"DEEPINFER_ACCELERATOR": "cpu", "DEEPINFER_HF_MODEL_DIR": "a/b", "DEEPINFER_LOG_LEVEL": "Debug"}
    assert read_environment(variables) == Environment("cpu", "a/b", "debug")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DEEPINFER_ACCELERATR", "did you mean DEEPINFER_ACCELERATOR?"),
        ("DEEPINFER_QQQQ", "known are DEEPINFER_ACCELERATOR, DEEPINFER_HF_MODEL_DIR, DEEPINFER_LOG_LEVEL"),
    ],
)
def test_an_unknown_variable_is_told(name: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_environment({name: "1", "OTHER": "2"}) == Environment()
    (record,) = caplog.records
    assert record.getMessage() == f"environment variable {name} is not known and has no effect; {told}"


def test_an_impossible_level_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"DEEPINFER_LOG_LEVEL is expected to be one of debug, info.*got 'loud'"):
        read_environment({"DEEPINFER_LOG_LEVEL": "loud"})


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", None, "0"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "1", "1"),
        ("OMP_WAIT_POLICY", None, "PASSIVE"),
        ("OMP_WAIT_POLICY", "ACTIVE", "ACTIVE"),
    ],
)
def test_what_torch_reads_is_set_unless_the_user_has(name: str, given: str | None, kept: str) -> None:
    code = f"import os; from deepinfer.environment import prepare_for_torch as p; p(); print(os.environ[{name!r}])"
    variables = {} if given is None else {name: given}
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == kept
