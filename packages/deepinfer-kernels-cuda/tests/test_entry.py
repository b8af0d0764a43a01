"""The entry that the engine finds: light to load, complete, and listed with its reason."""

import subprocess
import sys
from importlib.metadata import entry_points

from deepinfer.accelerator.registry import CONTRACT_VERSION, list_accelerators
from deepinfer_kernels_cuda import entry
from deepinfer_kernels_cuda.driver import probe


def test_the_entry_point_fits_the_contract() -> None:
    (point,) = entry_points(group="deepinfer.accelerators", name="nvidia")
    assert point.load() is entry
    assert entry.contract_version == CONTRACT_VERSION
    (candidate,) = [found for found in list_accelerators() if found.name == "nvidia"]
    assert not candidate.broken
    assert candidate.wheel.startswith("deepinfer-kernels-cuda ")
    assert candidate.reason == probe()


def test_loading_and_probing_loads_no_torch() -> None:
    code = "import sys; from deepinfer_kernels_cuda import entry; entry.probe(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
