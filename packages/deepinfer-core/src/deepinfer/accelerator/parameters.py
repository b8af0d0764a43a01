"""Weights as the checkpoint stores them, and as ops take them: the shapes that travel from `model/weights.py` to `Ops`.

Reading and checking files is `model/weights.py`'s; turning a stored weight into what a device multiplies is
`Ops.pack_*`'s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """How numbers are held while computing.

    dtype         of activations: bfloat16, float32 or float64
    round_inputs  round the inputs of FP8 and FP4 weights to FP8, as the model was trained ("auto" only)
    cache         "records": the model's quantised cache formats; "model": unquantised, in `dtype`
    """

    dtype: torch.dtype
    round_inputs: bool
    cache: str

    @property
    def wide(self) -> torch.dtype:
        """Dtype of statistics, softmax, router, mixing and logits: float32, or float64 in float64 mode."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class StoredWeight:
    """A matrix [out, in] as it lies in the checkpoint (memory-mapped, on the CPU).

    data    BF16/F32 [out, in]; or F8_E4M3 [out, in]; or FP4 pairs as int8 [out, in / 2]
    scale   float8_e8m0fnu, FP8: [ceil(out/block), ceil(in/block)], FP4: [out, in/32]; None when data is not quantised
    block   side of an FP8 scale block (32 or 128); for FP4 the activation group width; 0 when not quantised
    """

    data: Tensor
    scale: Tensor | None = None
    block: int = 0

    @property
    def is_fp4(self) -> bool:
        """Whether data holds E2M1 pairs."""
        return self.scale is not None and self.data.dtype == torch.int8

    @property
    def elements(self) -> int:
        """Numbers in the matrix."""
        return self.data.numel() * (2 if self.is_fp4 else 1)


@dataclass(frozen=True)
class StoredExpert:
    """One expert's three matrices: w1 (gate) and w3 (up) [I, D], w2 (down) [D, I]."""

    w1: StoredWeight
    w2: StoredWeight
    w3: StoredWeight


@dataclass(frozen=True)
class StoredTable:
    """An Engram table: rows [N, C] F8_E4M3 with float8_e8m0fnu scales [N, C / 32], or BF16/F32 rows and no scale.

    `name` says in errors where the table comes from: scales are checked when rows are looked up.
    """

    data: Tensor
    scale: Tensor | None = None
    name: str = "an Engram table"


@dataclass(frozen=True)
class MixParameters:
    """Hyper-connection parameters of one sub-layer, wide: fn [24, 4 D], base [24], scale [3].

    For the head of V4: fn [4, 4 D], base [4], scale [1].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
