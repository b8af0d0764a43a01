"""The Triton kernels of the wheel, one module for each family; which op launches which is decided by the `*_ops` modules.

Every kernel is listed as a `Variant` (`variants.py`): what is compiled ahead of time is what is launched.
"""
