"""A kernel with everything that its compilation depends on: launched on a device, or compiled for one that is not here.

Which variants there are is decided by the module of each kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 when this module is imported)."""

IN_PYTHON = tl.constexpr(INTERPRETED)
OPERAND = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)
"""What matrix units multiply. All operands are exact in bfloat16; the interpreter's bfloat16 products are wrong."""

ALIGNMENT = 16
HOPPER = 90
"""Triton 3.6 to 3.8 turn products of 128 tokens into a bare trap for SM100: newer devices take 64 at most."""


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    types      Triton types of the arguments at run time, in order: "*bf16", "i32", "fp32", ...
    constants  the `tl.constexpr` arguments
    unaligned  integer arguments that need not be multiples of 16 (pointers and all others are)
    newest     the newest compute capability that Triton compiles it for
    registers  the most that a thread may have, so that more programs run at once; 0 = the compiler decides
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    unaligned: tuple[str, ...] = field(default=())
    newest: int = 999
    registers: int = 0

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run the kernel on `grid` programs; nothing happens when the grid is empty."""
        if all(grid):
            self.kernel[grid](*arguments, **self.constants, **self._options())

    def compile(self, capability: int) -> Any:
        """Compile for compute capability `capability` (90, 100) without a device; returns Triton's compiled kernel."""
        types = {name: self.types.get(name, "constexpr") for name in self.kernel.arg_names}
        places = {name: place for place, name in enumerate(self.kernel.arg_names)}
        aligned = [name for name, kind in self.types.items() if kind != "fp32" and name not in self.unaligned]
        attributes = {(places[name],): [["tt.divisibility", ALIGNMENT]] for name in aligned}
        source = ASTSource(self.kernel, types, dict(self.constants), attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self._options())

    def _options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return {**options, "maxnreg": self.registers} if self.registers else options


def largest_tile(device: torch.device) -> int:
    """Tokens of the largest tile that Triton can compile for `device`."""
    newer = device.type == "cuda" and torch.cuda.get_device_capability(device) > (HOPPER // 10, HOPPER % 10)
    return 64 if newer else 128
