"""The entry that the engine finds: light to load, complete, and honest about a machine without the device."""

import subprocess
import sys
from importlib.metadata import entry_points


def test_entry_point_names_an_accelerator() -> None:
    (point,) = entry_points(group="deepinfer.accelerators", name="ascend")
    entry = point.load()
    assert entry.contract_version >= 1
    module, _, name = entry.target.partition(":")
    assert module.startswith("deepinfer_kernels_ascend.")
    assert name.isidentifier()


def test_probe_answers_in_one_line_without_torch() -> None:
    code = "import sys; from deepinfer_kernels_ascend import entry; print(entry.probe()); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reason, torch_loaded = result.stdout.splitlines()
    assert reason
    assert torch_loaded == "False"
