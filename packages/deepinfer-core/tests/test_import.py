"""What importing the package costs: torch and the engine come only when something asks for them."""

import subprocess
import sys


def test_import_is_lazy() -> None:
    code = "import sys, deepinfer; print(*sorted({'torch', 'deepinfer.engine', 'deepinfer.model'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
