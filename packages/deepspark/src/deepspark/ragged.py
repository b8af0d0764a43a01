"""Ragged batches: owns how blocks of different verified lengths lie flat in one forward pass.

How many drafts each request verifies is `schedule`'s decision; what the rows are worth is `verify`'s.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import InputError

__all__ = ["RaggedBatch", "pack"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Flat rows [anchor, x_1..x_ell] of R requests, on the host.

    ids, pos, req, step: [T] token, absolute position, request and offset of each row.  judges_draft: [T] bool, whether the
    row judges a draft (its last row does not).  cu: [R+1] prefix sums of ell + 1.
    """

    ids: Ints
    pos: Ints
    req: Ints
    step: Ints
    judges_draft: NDArray[np.bool_]
    cu: Ints

    @property
    def num_rows(self) -> int:
        """Rows in use, padding not counted."""
        return int(self.cu[-1])


def pack(anchors: Ints, drafts: Ints, ells: Ints, positions: Ints, padded_rows: int | None = None) -> RaggedBatch:
    """Lay blocks flat: anchors [R], drafts [R, g], ells [R] in 0..g, positions [R] (of the anchors).

    padded_rows: pad to a captured graph size with rows of request -1, id 0 and position -1: they take the draft pool's
    padding slot and must not write a cache.  Raises InputError where a length does not fit.
    """
    requests, width = drafts.shape
    if requests and not (0 <= int(ells.min()) and int(ells.max()) <= width):
        raise InputError(f"verified lengths must lie in 0..{width} (the drafted block), got {ells.min()}..{ells.max()}")
    cu = np.zeros(requests + 1, np.int64)
    np.cumsum(ells + 1, out=cu[1:])
    used = int(cu[-1])
    total = used if padded_rows is None else padded_rows
    if total < used:
        raise InputError(f"a batch of {used} rows does not fit {total} padded rows; use a larger graph")
    req = np.repeat(np.arange(requests), ells + 1)
    step = np.arange(used) - cu[req]
    blocks = np.concatenate([anchors[:, None], drafts], axis=1)
    ids, pos = np.zeros(total, np.int64), np.full(total, -1, np.int64)
    ids[:used], pos[:used] = blocks[req, step], positions[req] + step
    judges = np.zeros(total, np.bool_)
    judges[:used] = step < ells[req]
    return RaggedBatch(ids, pos, _padded(req, total, -1), _padded(step, total, 0), judges, cu)


def _padded(values: Ints, total: int, fill: int) -> Ints:
    out = np.full(total, fill, np.int64)
    out[: values.size] = values
    return out


