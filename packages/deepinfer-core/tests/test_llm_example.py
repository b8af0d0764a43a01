"""`examples/offline_inference.py` runs as it is, with the settings that a user makes in the environment."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "offline_inference.py"


def test_the_example_runs() -> None:
    settings = {**os.environ, "DEEPINFER_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    settings.pop("DEEPINFER_HF_MODEL_DIR", None)
    done = subprocess.run([sys.executable, str(EXAMPLE)], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith(("(length)", "(stop)")) for line in lines) == 3
    assert any(line.startswith("streamed: Once upon a time") for line in lines)
