"""What `deepinfer bench` does: checks everything before a model is opened, then runs load after load.

Options and their help are `cli.py`'s.
"""

import importlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.bench.load import AT_ONCE, Arrival, Lengths, LoadOptions, at_rate, check_rate, from_facts, read_file
from deepinfer.bench.report import offered
from deepinfer.bench.run import Result, measure
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.llm import LLM

_log = logging.getLogger(__name__)

_PLOT = "deepinfer.bench.plot"
"""The module that needs matplotlib, by name: everything else works without it."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured: each of `rates`, or the `arrivals` of a file; `warmup` requests run before and do not count."""

    load: LoadOptions
    rates: tuple[float, ...] = (AT_ONCE,)
    arrivals: Path | None = None
    temperature: float = 1.0
    warmup: int = 2
    plot: Path | None = None

    def check(self) -> None:
        """Raise ConfigError or RequestError for what no model could do."""
        if self.warmup < 0:
            raise ConfigError(f"warmup must be a number of requests, 0 for none, got {self.warmup}")
        for rate in self.rates:
            check_rate(rate)
        SamplingParams(temperature=self.temperature).check()


def parse(  # noqa: PLR0913 - the options of the command, all by keyword
    *,
    requests: int,
    prompt_tokens: str,
    output_tokens: str,
    shared_prefix: float,
    rates: tuple[float, ...],
    arrivals: Path | None,
    temperature: float,
    warmup: int,
    seed: int,
    plot: Path | None,
) -> BenchOptions:
    """Read the options of the command line; raises ConfigError or RequestError before a model is opened."""
    if arrivals is not None and rates:
        raise ConfigError("expected --rate or --arrivals FILE, got both: leave one out")
    load = LoadOptions(
        requests=requests,
        prompt_tokens=Lengths.parse(prompt_tokens, "--prompt-tokens"),
        output_tokens=Lengths.parse(output_tokens, "--output-tokens"),
        shared_prefix=shared_prefix,
        seed=seed,
    )
    options = BenchOptions(
        load=load,
        rates=rates or (AT_ONCE,),
        arrivals=arrivals,
        temperature=temperature,
        warmup=warmup,
        plot=plot,
    )
    options.check()
    if arrivals is not None:
        read_file(arrivals)
    if plot is not None:
        _plot_module()
    return options


def draw_into(path: Path, results: list[Result], model: str) -> None:
    """Draw latency against load; raises ConfigError without matplotlib, or where the file cannot be written."""
    _plot_module().draw(results, path, f"{model}: {results[0].requests} requests a run")


def _plot_module() -> Any:
    try:
        return importlib.import_module(_PLOT)
    except ImportError as error:
        raise ConfigError(
            f"a picture needs matplotlib ({error}): install it with `pip install 'deepinfer-core[plot]'`, or leave "
            "--plot out"
        ) from error


def run_all(llm: "LLM", options: BenchOptions) -> list[Result]:
    """Run each load on its own, one after the other."""
    options.check()
    model = llm.model_config
    loads: list[tuple[float | None, list[Arrival]]]
    if options.arrivals is not None:
        loads = [(None, from_facts(read_file(options.arrivals), options.load, model))]
    else:
        loads = [(rate, at_rate(rate, options.load, model)) for rate in options.rates]
    if options.warmup:
        before = replace(options.load, requests=options.warmup, seed=options.load.seed + 1, shared_prefix=0.0)
        measure(llm.engine, at_rate(AT_ONCE, before, model), rate=AT_ONCE, temperature=options.temperature)
    results = []
    for rate, load in loads:
        _log.info("%s: %d requests", offered(rate), len(load))
        results.append(measure(llm.engine, load, rate=rate, temperature=options.temperature))
        for error in results[-1].errors:
            _log.warning("%s", error)
    return results
