"""Metrics in the text form that Prometheus reads, by its client library (extra `metrics`).

What is counted is `engine/metrics.py`'s; serving the text is the caller's.
"""

from collections.abc import Iterator
from typing import override

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deepinfer.engine.metrics import Family, Snapshot, Spread

PREFIX = "deepinfer_"


def prometheus_text(snapshot: Snapshot) -> str:
    """The metrics of `LLM.metrics()` as text, names with the prefix `deepinfer_`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(snapshot))
    return generate_latest(registry).decode()


class _Snapshot(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @override
    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._snapshot.families.values())


def _metric(family: Family) -> Metric:
    name, labels = PREFIX + family.name, [family.label] if family.label else []
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.text, labels=labels)
        for label, spread in family.values.items():
            assert isinstance(spread, Spread)
            bounds = [*map(str, spread.bounds), "+Inf"]
            buckets = list(zip(bounds, map(float, (*spread.counts, spread.count)), strict=True))
            histogram.add_metric([label] if labels else [], buckets, spread.sum)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = kind(name, family.text, labels=labels)
    for label, value in family.values.items():
        assert not isinstance(value, Spread)
        plain.add_metric([label] if labels else [], value)
    return plain
