"""What importing the package costs and gives: torch and the engine come only when something asks for them."""

import subprocess
import sys

import pytest

import deepinfer
from deepinfer.engine.request import SamplingParams
from deepinfer.llm import LLM


def test_import_is_lazy() -> None:
    code = "import sys, deepinfer; print(*sorted({'torch', 'deepinfer.engine', 'deepinfer.model'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_the_public_names_are_those_of_their_modules() -> None:
    assert deepinfer.LLM is LLM
    assert deepinfer.SamplingParams is SamplingParams
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name).__name__ == name
    assert set(deepinfer.__all__) <= set(dir(deepinfer))


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'deepinfer' has no attribute 'LLMs'"):
        deepinfer.LLMs  # noqa: B018 - the access is the test
