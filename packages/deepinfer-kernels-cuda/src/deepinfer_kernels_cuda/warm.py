"""Compiles all kernels ahead of their first use, on all cores: Triton's cache holds them for every later process.

Which kernels there are is `kernels/`'s; a shape that is not among its variants is compiled when it first comes.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from deepinfer_kernels_cuda.kernels import ALL_VARIANTS


def compile_all(capability: tuple[int, int], workers: int | None = None) -> int:
    """Compile every variant for compute capability (major, minor); return how many. Needs no device."""
    number = capability[0] * 10 + capability[1]
    names = [variant.name for variant in ALL_VARIANTS if number <= variant.newest]
    # Compiling holds the interpreter's lock; a forked process would inherit a device that it cannot use.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count(), context) as pool:
        list(pool.map(_compile, names, [number] * len(names)))
    return len(names)


def _compile(name: str, capability: int) -> None:
    next(variant for variant in ALL_VARIANTS if variant.name == name).compile(capability)
