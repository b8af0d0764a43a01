"""Kernels are compiled ahead in processes of their own, and Triton's cache has them afterwards."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
from deepinfer_kernels_cuda import warm
from deepinfer_kernels_cuda.kernels import sampling

if __name__ == "__main__":
    warm.ALL_VARIANTS = sampling.VARIANTS
    print(warm.compile_all((9, 0), workers=1))
"""


def test_kernels_are_compiled_and_kept(tmp_path: Path) -> None:
    script = tmp_path / "warm_some.py"
    script.write_text(CODE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True)
    kept = list((tmp_path / "cache").rglob("*.cubin"))
    assert int(result.stdout) == len(kept) > 3
