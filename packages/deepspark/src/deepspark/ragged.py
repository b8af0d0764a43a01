"""Ragged batches: owns how blocks of different verified lengths lie flat in one forward pass, and come back from it.

How many drafts each request verifies is `schedule`'s decision; what the rows are worth is `verify`'s.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspark.errors import InputError

__all__ = ["RaggedBatch", "count_accepted", "emitted_tokens", "pack"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Flat rows [anchor, x_1..x_ell] of R requests, on the host.

    ids, pos, req, step: [T] token, absolute position, request and offset of each row.  judges_draft: [T] bool, whether
    the row judges a draft (its last row does not).  cu: [R+1] prefix sums of ell + 1.
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
    if ells.min(initial=0) < 0 or ells.max(initial=0) > width:
        raise InputError(f"verified lengths must lie in 0..{width} (the drafted block), got {ells.min()}..{ells.max()}")
    counts = ells + 1
    cu = np.zeros(requests + 1, np.int64)
    np.cumsum(counts, out=cu[1:])
    used = int(cu[-1])
    req = np.arange(requests).repeat(counts)
    step = np.arange(used) - cu.take(req)
    blocks = np.empty((requests, width + 1), np.int64)
    blocks[:, 0], blocks[:, 1:] = anchors, drafts
    ids, pos, judges = blocks.ravel().take(req * (width + 1) + step), positions.take(req) + step, step < ells.take(req)
    if padded_rows is None:
        return RaggedBatch(ids, pos, req, step, judges, cu)
    if padded_rows < used:
        raise InputError(f"a batch of {used} rows does not fit {padded_rows} padded rows; use a larger graph")
    return RaggedBatch(
        _padded(ids, padded_rows, 0),
        _padded(pos, padded_rows, -1),
        _padded(req, padded_rows, -1),
        _padded(step, padded_rows, 0),
        np.concatenate([judges, np.zeros(padded_rows - used, np.bool_)]),
        cu,
    )


def _padded(values: Ints, total: int, fill: int) -> Ints:
    out = np.full(total, fill, np.int64)
    out[: values.size] = values
    return out


def count_accepted(passed: NDArray[np.bool_], ells: Ints) -> Ints:
    """Return how many leading drafts [R] of passed [R, g] were accepted among the verified `ells` [R]."""
    closed = np.zeros((passed.shape[0], passed.shape[1] + 1), np.bool_)
    closed[:, :-1] = passed
    return np.minimum(closed.argmin(axis=1), ells)


def emitted_tokens(drafts: Ints, accepted: Ints, extra: Ints) -> Ints:
    """Return the step's tokens [R, g+1]: accepted drafts, then the extra token; entries behind `accepted` are not
    tokens.
    """
    tokens = np.empty((drafts.shape[0], drafts.shape[1] + 1), np.int64)
    tokens[:, :-1] = drafts
    tokens[np.arange(drafts.shape[0]), accepted] = extra
    return tokens
