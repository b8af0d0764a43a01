"""How other engines choose budgets: owns what is needed to reproduce and compare them, and nothing that deepspark uses.

Source: DSpark specification, table of section 3.4.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from deepspark.cost import CostTable
from deepspark.schedule import allocate, choose_budget

__all__ = ["SlopeEstimator", "WindowMedian", "deepinfer_rows", "deepinfer_total_rows", "vllm_budget"]

Floats = NDArray[np.float64]


def deepinfer_total_rows(
    survivals: Floats, sizes: Sequence[int], ms: Sequence[float], extra_ms: float, slope_ms: float
) -> int:
    """Return DeepInfer 0.1's rows of a step: best budget over captured sizes looked up upward, plus slope x size.

    extra_ms: its sampler's median time.  Sizes past the last graph are skipped.  Survivals [R, g] are summed in
    float32.
    """
    table = CostTable(sizes, ms, mode="ceil", slope_ms=slope_ms, fixed_ms=extra_ms)
    requests, width = survivals.shape
    budget = choose_budget(survivals.astype(np.float32), table.budgets_ms(requests, width))
    return int(requests + budget.drafts)


def deepinfer_rows(survivals: Floats, total_rows: int) -> list[int]:
    """Return DeepInfer's rows of each request: the anchor, and the largest survivals by flat index."""
    lengths = allocate(survivals, total_rows - survivals.shape[0], "request")
    return [int(length) + 1 for length in lengths]


def vllm_budget(survivals: Floats, draft_ms: Sequence[float], verify_ms: Sequence[float], non_draft_rows: int) -> int:
    """Return vLLM's budget of drafts: tokens over draft_ms[requests] + verify_ms[drafts + non-draft rows], a rising
    staircase.

    Budgets beyond the table are not considered.
    """
    requests, width = survivals.shape
    stairs = np.maximum.accumulate(np.asarray(verify_ms, np.float64))
    rows = np.arange(requests * width + 1) + non_draft_rows
    times = np.append(stairs, np.inf)[np.minimum(rows, stairs.size)] + draft_ms[requests]
    return choose_budget(survivals, times).drafts


class WindowMedian:
    """Median of the last `n` values, None before `min_samples` of them."""

    def __init__(self, n: int, min_samples: int) -> None:
        self._values: deque[float] = deque(maxlen=n)
        self._min_samples = min_samples

    def push(self, value: float) -> float | None:
        """Add a value and return the median."""
        self._values.append(value)
        return median(self._values) if len(self._values) >= self._min_samples else None


class SlopeEstimator:
    """DeepInfer's run-time correction: median over sizes of the per-size median of (measured - profiled) / size, at
    least 0.

    Only the last `window` steps count, and sizes with `min_samples` of them.
    """

    def __init__(self, window: int, min_samples: int) -> None:
        self._events: deque[tuple[int, float]] = deque(maxlen=window)
        self._min_samples = min_samples

    def push(self, size: int, measured_ms: float, profiled_ms: float) -> float:
        """Add a step and return the slope in milliseconds a row."""
        self._events.append((size, (measured_ms - profiled_ms) / size))
        by_size: dict[int, list[float]] = {}
        for each, slope in self._events:
            by_size.setdefault(each, []).append(slope)
        medians = [median(slopes) for slopes in by_size.values() if len(slopes) >= self._min_samples]
        return max(median(medians), 0.0) if medians else 0.0
