"""Without a device, kernels run in Triton's interpreter; this must be said before the first kernel is imported."""

import os

from deepinfer_kernels_cuda.driver import probe

if probe() is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
