"""Cost tables: owns the measured time of a step as a function of its rows and context, and keeps it true while serving.

What to do with the times is `schedule`'s business; measuring them is the engine's, which hands them to `observe`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepspark.errors import ConfigError

__all__ = ["CostTable", "Lookup"]

Lookup = Literal["ceil", "floor", "linear"]
Floats = NDArray[np.float64]

_WINDOW = 31
_ENOUGH = 5
_FORGET = 0.995
_OTHER_CONTEXT = 512.0
_DRIFT_WINDOW = 15


class _ContextSlope:
    """Estimates milliseconds per context token from steps of equal size: decayed, pooled within-size covariance."""

    def __init__(self, nodes: int) -> None:
        self.means: list[tuple[float, float] | None] = [None] * nodes
        self.covariance = 0.0
        self.variance = 0.0

    def update(self, node: int, context_tokens: float, ms: float) -> None:
        mean = self.means[node]
        if mean is None:
            self.means[node] = (context_tokens, ms)
            return
        away_tokens, away_ms = context_tokens - mean[0], ms - mean[1]
        # A text that grows by a token a step tells nothing that other slow changes of times would not tell as well.
        if abs(away_tokens) > max(_OTHER_CONTEXT, mean[0] / 4):
            self.covariance = _FORGET * self.covariance + away_tokens * away_ms
            self.variance = _FORGET * self.variance + away_tokens * away_tokens
        self.means[node] = (mean[0] + away_tokens / 16, mean[1] + away_ms / 16)

    def value(self) -> float | None:
        """Return the slope (never below 0), or None before contexts have differed."""
        return max(self.covariance / self.variance, 0.0) if self.variance > 0 else None


class CostTable:
    """Milliseconds of one step: T(rows, context) = table[rows] + slope_ms * rows + context_ms * context + fixed_ms.

    sizes: ascending row counts at which `ms` was measured.  mode: 'ceil' looks a size up (captured graphs: a step runs
    padded to the next size, and none is larger than the last), 'floor' down, 'linear' in between, both flat outside.
    slope_ms: per row, in 'ceil' mode per padded row.  fixed_ms: per step whatever its rows.  draft_sizes, draft_ms:
    the drafter's time by number of drafting requests, interpolated (empty: free); it is paid only by steps that draft.
    """

    def __init__(  # noqa: PLR0913 - a table is what it is made of
        self,
        sizes: Sequence[int],
        ms: Sequence[float],
        *,
        mode: Lookup = "ceil",
        slope_ms: float = 0.0,
        fixed_ms: float = 0.0,
        context_ms: float = 0.0,
        draft_sizes: Sequence[int] = (),
        draft_ms: Sequence[float] = (),
    ) -> None:
        for name, keys, values in (("sizes", sizes, ms), ("draft_sizes", draft_sizes, draft_ms)):
            if len(keys) != len(values) or any(a >= b for a, b in pairwise(keys)):
                raise ConfigError(
                    f"{name} must ascend and have one time each, got {list(keys)} and {len(values)} times"
                )
        if not sizes or sizes[0] < 1 or min(ms) <= 0:
            raise ConfigError("a cost table needs at least one size >= 1 and times > 0 in milliseconds")
        if mode not in ("ceil", "floor", "linear"):
            raise ConfigError(f"mode must be 'ceil', 'floor' or 'linear', got {mode!r}")
        self.sizes = np.asarray(sizes, np.int64)
        self.base_ms = np.asarray(ms, np.float64)
        self.mode: Lookup = mode
        self.slope_ms, self.fixed_ms, self.context_ms = slope_ms, fixed_ms, context_ms
        self.draft_sizes = np.asarray(draft_sizes, np.float64)
        self.draft_base_ms = np.asarray(draft_ms, np.float64)
        self.factors = np.ones(len(self.base_ms))
        self._drift = 1.0
        self._drifts: deque[float] = deque(maxlen=_DRIFT_WINDOW)
        self._ratios: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in sizes]
        self._context = _ContextSlope(len(self.base_ms))
        self._budgets: dict[tuple[int, int], Floats] = {}
        self._drafting: dict[int, float] = {}
        self._draft_ratios: deque[float] = deque(maxlen=_WINDOW)
        self.draft_factor = 1.0

    @property
    def ms(self) -> Floats:
        """The table as measured so far, one entry a size."""
        return self.base_ms * self.factors

    def step_ms(self, rows: NDArray[np.int64], context_tokens: float = 0.0) -> Floats:
        """Return the time of verifying `rows` [N] rows, drafter not counted; inf where no captured size is large
        enough.
        """
        shared = self.fixed_ms + self.context_ms * context_tokens
        if self.mode == "linear":
            return np.interp(rows, self.sizes, self.ms) + self.slope_ms * rows + shared
        if self.mode == "floor":
            index = np.maximum(np.searchsorted(self.sizes, rows, side="right") - 1, 0)
            return self.ms[index] + self.slope_ms * rows + shared
        index = np.searchsorted(self.sizes, rows, side="left")
        padded = np.append(self.ms + self.slope_ms * self.sizes, np.inf)
        return padded[index] + shared

    def draft_ms(self, requests: int) -> float:
        """Return the drafter's time for a step in which `requests` sequences draft."""
        if requests == 0 or self.draft_sizes.size == 0:
            return 0.0
        ms = self._drafting.get(requests)
        if ms is None:
            profiled = float(np.interp(requests, self.draft_sizes, self.draft_base_ms))
            ms = self._drafting[requests] = profiled * self.draft_factor
        return ms

    def observe_draft(self, requests: int, ms: float) -> None:
        """Learn how long drafting for `requests` sequences took; one factor, a median, corrects all sizes."""
        if self.draft_sizes.size == 0:
            return
        profiled = float(np.interp(requests, self.draft_sizes, self.draft_base_ms))
        if profiled <= 0:
            return
        self._draft_ratios.append(ms / profiled)
        if len(self._draft_ratios) >= _ENOUGH:
            self.draft_factor = median(self._draft_ratios)
            self._drafting.clear()
            self._budgets.clear()

    def budgets_ms(self, requests: int, width: int, context_tokens: float = 0.0) -> Floats:
        """Return the times [requests * width + 1] of a drafting step that verifies 0, 1, ... drafts over all
        requests.
        """
        times = self._budgets.get((requests, width))
        if times is None:
            rows = np.arange(requests, requests * (width + 1) + 1)
            times = self.step_ms(rows) + self.draft_ms(requests)
            self._budgets[requests, width] = times
        return times + self.context_ms * context_tokens

    def observe(self, rows: int, context_tokens: float, ms: float) -> None:
        """Learn from one measured step (drafter not counted).  Updates the table in place; a hiccup moves no median.

        A size is corrected by the median of its last measurements over the profiled time, once it has 5; sizes without
        take the correction of their measured neighbours.  What changes slowly (other work on the machine, a growing
        text) moves all sizes alike, those too that were not measured for long.
        """
        node = self._node(rows)
        self._context.update(node, context_tokens, ms)
        slope = self._context.value()
        if slope is not None:
            self.context_ms = slope
        row_ms = self.slope_ms * (self.sizes[node] if self.mode == "ceil" else rows)
        shared = row_ms + self.fixed_ms + self.context_ms * context_tokens
        base = float(np.interp(rows, self.sizes, self.base_ms)) if self.mode == "linear" else float(self.base_ms[node])
        ratio = max(ms - shared, 0.0) / base
        if len(self._ratios[node]) >= _ENOUGH:
            self._drifts.append(ratio / max(median(self._ratios[node]), 1e-3))
            self._drift = max(median(self._drifts), 1e-3)
        self._ratios[node].append(ratio / self._drift)
        measured = [i for i, ratios in enumerate(self._ratios) if len(ratios) >= _ENOUGH]
        if measured:
            values = [median(self._ratios[i]) * self._drift for i in measured]
            self._budgets.clear()
            self.factors = np.maximum(np.interp(np.arange(len(self.sizes)), measured, values), 1e-3)

    def _node(self, rows: int) -> int:
        """Return the index of the size that served a step of `rows`."""
        if self.mode == "ceil":
            return min(int(np.searchsorted(self.sizes, rows, side="left")), len(self.sizes) - 1)
        if self.mode == "floor":
            return max(int(np.searchsorted(self.sizes, rows, side="right")) - 1, 0)
        after = min(bisect_left(self.sizes.tolist(), rows), len(self.sizes) - 1)
        before = max(after - 1, 0)
        return before if rows - self.sizes[before] < self.sizes[after] - rows else after
