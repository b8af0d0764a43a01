"""What all op classes of this wheel share: whether kernels run at all for these ops, and the reason when they do not.

Each class of ops decides by shape and stored format which calls its kernels take; the rest is the reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.projection import PackedLinear
from deepinfer.accelerator.ops.settings import OpsSettings
from deepinfer.accelerator.parameters import StoredWeight
from deepinfer.errors import AcceleratorError
from deepinfer_kernels_cuda.kernels.packing import PackedWeight
from deepinfer_kernels_cuda.kernels.rounding import GROUPS
from deepinfer_kernels_cuda.kernels.variants import INTERPRETED


@dataclass(frozen=True)
class KernelLinear(PackedLinear):
    """A weight as the device multiplies it: quantised (`packed`), or bfloat16 [out, in] for cuBLAS (`plain`)."""

    packed: PackedWeight | None = None
    plain: torch.Tensor | None = None


class KernelOps(OpsSettings):
    """Base of the op classes.

    steady: whether a row's bits may not depend on what else is in the step; kernels are then chosen, and sums cut, by
    the shapes of the model alone.
    """

    steady = False

    @property
    def no_kernels(self) -> str | None:
        """Why no kernel runs, or None."""
        if self.dtype != torch.bfloat16:
            return f"kernels compute with bfloat16 activations, these are {str(self.dtype).removeprefix('torch.')}"
        if self.device.type != "cuda" and not INTERPRETED:
            return "kernels run on the device, or on the CPU with TRITON_INTERPRET=1"
        return None

    def only_reference(self, op: str, cause: str) -> None:
        """Raise where the reference would have to take an op over whose sums follow the shapes of a step."""
        if self.steady:
            raise AcceleratorError(
                f"deterministic=True on 'nvidia': kernels cannot take this call of {op} ({cause}), and the reference's "
                "sums depend on the batch; run it without deterministic=True"
            )

    def kernels_take(self, weights: Sequence[StoredWeight]) -> bool:
        """Whether `weights` are all FP8 in blocks of 32 or 128, or all FP4, of one width that groups of 32 divide."""
        first = weights[0]
        return (
            self.no_kernels is None
            and first.scale is not None
            and first.block in GROUPS[1:]
            and columns(first) % 32 == 0
            and all(
                weight.scale is not None
                and weight.is_fp4 == first.is_fp4
                and weight.block == first.block
                and columns(weight) == columns(first)
                for weight in weights
            )
        )


def columns(weight: StoredWeight) -> int:
    """Inputs of a stored weight."""
    return weight.data.shape[1] * (2 if weight.is_fp4 else 1)
