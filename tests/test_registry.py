"""All wheels together: core finds each accelerator and drafter, accepts its contract version, and loads none."""

import subprocess
import sys

import pytest

from deepinfer.accelerator.registry import list_accelerators, list_drafters

CODE = """
import sys
from deepinfer.accelerator.registry import list_accelerators, list_drafters
list_accelerators(), list_drafters()
print(*sorted({"torch", "triton", "torch_npu", "deepinfer.engine", "deepinfer.model"} & set(sys.modules)))
"""


def test_accelerators_of_all_wheels_are_found_and_none_is_broken() -> None:
    found = {candidate.name: candidate for candidate in list_accelerators()}
    assert set(found) == {"ascend", "cpu", "nvidia"}
    assert [name for name, candidate in found.items() if candidate.broken] == []
    assert found["cpu"].reason is None
    assert found["nvidia"].wheel.startswith("deepinfer-kernels-cuda ")
    assert found["ascend"].wheel.startswith("deepinfer-kernels-ascend ")


def test_the_drafter_is_found_and_usable() -> None:
    assert [(candidate.name, candidate.reason) for candidate in list_drafters()] == [("deepspark", None)]


def test_listing_loads_neither_torch_nor_a_device_library() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


@pytest.mark.parametrize("name", ["ascend", "nvidia"])
def test_a_device_stands_before_the_reference(name: str) -> None:
    priorities = {candidate.name: candidate.priority for candidate in list_accelerators()}
    assert priorities[name] > priorities["cpu"]
