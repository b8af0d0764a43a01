"""Shows the results of a benchmark: a table for people, a dict for JSON.

The numbers are `run.py`'s; the picture is `plot.py`'s.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table

from deepinfer.bench.run import Result, Times


def table(results: Sequence[Result]) -> Group:
    """What each run gave in all, and how long its requests took."""
    throughput = _table("throughput", "offered", "requests", "requests/s", "output tokens/s", "tokens/s", "cached")
    latency = _table("latency in ms", "offered", "time", "mean", "p50", "p90", "p99")
    for result in results:
        load = offered(result.rate)
        throughput.add_row(
            load,
            f"{result.requests - result.failed} of {result.requests}" if result.failed else str(result.requests),
            f"{result.requests_per_s:.2f}",
            f"{result.output_tokens_per_s:,.1f}",
            f"{result.tokens_per_s:,.1f}",
            f"{result.cached_tokens / max(result.prompt_tokens, 1):.0%}",
        )
        latency.add_row(load, "to first token", *_cells(result.time_to_first_token))
        latency.add_row("", "per output token", *_cells(result.time_per_output_token))
        latency.add_row("", "end to end", *_cells(result.end_to_end), end_section=True)
    return Group(throughput, latency)


def _table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for name in columns:
        made.add_column(name, justify="left" if name in ("offered", "time") else "right", no_wrap=True)
    return made


def as_dict(results: Sequence[Result], **facts: Any) -> dict[str, Any]:
    """All numbers in the units of `Result`; null where a number is none, "inf" for the rate of all at once."""
    return {**facts, "runs": [_plain(asdict(result)) for result in results]}


def offered(rate: float | None) -> str:
    """A load in words."""
    if rate is None:
        return "file"
    return "all at once" if math.isinf(rate) else f"{rate:g}/s"


def _cells(times: Times) -> list[str]:
    values = (times.mean, times.p50, times.p90, times.p99)
    return ["-" if math.isnan(value) else f"{value * 1000:,.1f}" for value in values]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    return value
