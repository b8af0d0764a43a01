"""Ops whose every row is bitwise the same whatever else is in the step: any device's ops, run on tiles of one size.

A matrix product, a sum or a vectorised function rounds in an order that libraries choose by shape.  Here every call
sees the same shapes: rows in tiles of `tile_rows`, filled up with the last row, and keys of attention and of the index
in tiles of `tile_keys`, one after the other.  What remains to the device is that a row's result does not depend on its
place in a tile; `deepinfer.accelerator.conformance.invariance_cases` prove it.

    class TiledAbacusOps(TiledOps, AbacusOps):
        tile_rows = 64
"""

from deepinfer.accelerator.tiled_ops.attention import TiledAttention
from deepinfer.accelerator.tiled_ops.cache import TiledCache
from deepinfer.accelerator.tiled_ops.rows import TiledRows


class TiledOps(TiledAttention, TiledCache, TiledRows):
    """Put in front of a device's class of ops; what is exact or elementwise (`embed`, `combine`, ...) is left to it."""
