"""The entry that engines find: light to load, complete, plain values."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points


def test_entry_point_names_a_drafter() -> None:
    (point,) = entry_points(group="deepinfer.drafters", name="deepspark")
    entry = point.load()
    assert entry.contract_version >= 1
    assert entry.probe() is None
    module, _, name = entry.target.partition(":")
    assert module.startswith("deepspark.")
    assert name.isidentifier()


def test_loading_the_entry_does_not_load_torch() -> None:
    code = "import sys, deepspark; deepspark.entry.probe(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_entry_loads_what_it_names() -> None:
    (point,) = entry_points(group="deepinfer.drafters", name="deepspark")
    module, _, name = point.load().target.partition(":")
    assert isinstance(getattr(importlib.import_module(module), name), type)
