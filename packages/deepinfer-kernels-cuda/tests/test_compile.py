"""Every kernel compiles ahead of time for Hopper and Blackwell, without a device, and spills next to nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_REGISTERS = 255
MOST_SPILLED = 32
MOST_SPILLED_OF = {"attend": 900, "select": 256, "turns": 48}
"""Bytes of a thread's registers that may lie in memory.

Attention holds 64 heads of 512 channels and unpacks keys; the choice of the best runs faster twice at once than without
spills once; rotations keep the digits of pi that large angles need.
"""
COMPILER = Path(__file__).parent / "compile_kernels.py"


@pytest.mark.parametrize("capability", [90, 100])
def test_every_variant_compiles(capability: int) -> None:
    """In a process of its own: this one may have loaded the kernels for the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILER), str(capability)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    usage = json.loads(result.stdout)
    assert len(usage) > 30
    for name, found in usage.items():
        most = MOST_SPILLED_OF.get(name.split()[0], MOST_SPILLED)
        assert found["spilled"] <= most, (name, found)
        assert not found["local"], (name, found)
    assert max(found["registers"] for found in usage.values()) <= MOST_REGISTERS
    assert max(found["shared"] for found in usage.values()) <= 227 * 1024
