"""The Triton kernels of the wheel, one module for each family; which op launches which is up to the `*_ops` modules.

Every kernel is listed as a `Variant` (`variants.py`): what is compiled ahead of time is what is launched.
"""

from deepinfer_kernels_cuda.kernels import attention, experts, gate, mixing, products, rounding, rows, sampling

ALL_VARIANTS = (
    *rounding.VARIANTS,
    *products.VARIANTS,
    *experts.VARIANTS,
    *gate.VARIANTS,
    *mixing.VARIANTS,
    *rows.VARIANTS,
    *attention.VARIANTS,
    *sampling.VARIANTS,
)
"""All that this wheel compiles."""
