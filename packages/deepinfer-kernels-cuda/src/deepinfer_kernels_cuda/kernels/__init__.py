"""The Triton kernels of the wheel, one module for each family; which op launches which is up to the `*_ops` modules.

Every kernel is listed as a `Variant` (`variants.py`): what is compiled ahead of time is what is launched.
"""

from deepinfer_kernels_cuda.kernels import (
    attention,
    compressor,
    engram,
    experts,
    gate,
    index,
    mixing,
    products,
    records,
    rounding,
    rows,
    sampling,
    selection,
    steps,
    sums,
)

ALL_VARIANTS = (
    *rounding.VARIANTS,
    *products.VARIANTS,
    *experts.VARIANTS,
    *gate.VARIANTS,
    *mixing.VARIANTS,
    *rows.VARIANTS,
    *attention.VARIANTS,
    *sampling.VARIANTS,
    *index.VARIANTS,
    *selection.VARIANTS,
    *records.VARIANTS,
    *compressor.VARIANTS,
    *steps.VARIANTS,
    *engram.VARIANTS,
    *sums.VARIANTS,
)
"""All that this wheel compiles."""
