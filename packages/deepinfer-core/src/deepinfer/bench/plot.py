"""Draws latency against load as a PNG (extra `plot`).

The numbers are `run.py`'s.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from deepinfer.bench.report import offered
from deepinfer.bench.run import PERCENTILES, Result, Times
from deepinfer.errors import ConfigError


def draw(results: Sequence[Result], path: Path, title: str) -> None:
    """Write the picture: three kinds of latency over the requests a second that came through.

    Raises ConfigError when the file cannot be written.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title)
    ordered = sorted(results, key=lambda result: result.requests_per_s)
    loads = [result.requests_per_s for result in ordered]
    panels: tuple[tuple[str, list[Times]], ...] = (
        ("time to first token", [result.time_to_first_token for result in ordered]),
        ("time per output token", [result.time_per_output_token for result in ordered]),
        ("end to end", [result.end_to_end for result in ordered]),
    )
    for axes, (name, times) in zip(figure.subplots(1, 3), panels, strict=True):
        for percent in PERCENTILES:
            values = [1000 * {50: one.p50, 90: one.p90, 99: one.p99}[percent] for one in times]
            axes.plot(loads, values, marker="o", label=f"p{percent}")
        for result, load, one in zip(ordered, loads, times, strict=True):
            axes.annotate(offered(result.rate), (load, 1000 * one.p50), textcoords="offset points", xytext=(4, 4))
        axes.set(title=name, xlabel="requests a second", ylabel="ms", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: the picture cannot be written ({error.strerror}): choose another file") from error
