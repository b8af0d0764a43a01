"""The accelerator contract: what a device offers to the model, and how devices are found.

Importing this package imports no torch: `registry` lists accelerators without it.
"""
