"""What importing the package costs: no torch, nothing of an engine."""

import subprocess
import sys


def test_import_loads_neither_torch_nor_an_engine() -> None:
    code = "import sys, deepseek_recipe; print(*sorted({'torch', 'deepinfer', 'deepspark'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
