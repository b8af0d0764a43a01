"""Compile every variant for one compute capability and print, as JSON, what each needs of a multiprocessor.

Run as `python compile_kernels.py 90`; needs no device.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from deepinfer_kernels_cuda.kernels import ALL_VARIANTS, variants

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def needs(variant: variants.Variant, capability: int) -> dict[str, int]:
    compiled = variant.compile(capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    shared = int(compiled.metadata.shared)
    # A kernel that Triton cannot lower may still compile, into nothing but a trap.
    assert not re.search(r"\btrap;", compiled.asm["ptx"]), variant.name
    return {"registers": found["REG"], "spilled": found["STACK"], "local": found["LOCAL"], "shared": shared}


def main() -> None:
    capability = int(sys.argv[1])
    assert not variants.INTERPRETED
    sys.stdout.write(
        json.dumps(
            {variant.name: needs(variant, capability) for variant in ALL_VARIANTS if capability <= variant.newest}
        )
    )


main()
