"""What is counted while an engine runs: counters, gauges and histograms in plain Python, and snapshots of them.

What feeds them is `observer.py`'s; Prometheus' text form is `deepinfer.prometheus`'s.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

TIMES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of times, in seconds; one more has no bound."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram at one moment: values at most each of `bounds` (cumulative), how many in all, and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    sum: float

    @property
    def mean(self) -> float:
        """The mean value; 0 of none."""
        return self.sum / self.count if self.count else 0.0


@dataclass(slots=True)
class Histogram:
    """Values counted by bucket."""

    bounds: tuple[float, ...] = TIMES_S
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def spread(self) -> Spread:
        """The histogram at this moment."""
        *below, count = accumulate(self.counts)
        return Spread(self.bounds, tuple(below), count, self.sum)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric at one moment.

    kind    "counter" only grows, "gauge" is a level, "histogram" a spread of values
    label   what tells its values apart; "" where there is only one
    values  by the value of the label
    """

    name: str
    kind: str
    text: str
    label: str
    values: dict[str, float | Spread]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All metrics at one moment, by name; times are in seconds."""

    families: dict[str, Family]

    def value(self, name: str, label: str = "") -> float:
        """A counter or gauge; 0 for a label that has not come yet."""
        value = self.families[name].values.get(label, 0.0)
        assert not isinstance(value, Spread), f"{name} is a histogram: use spread"
        return value

    def spread(self, name: str, label: str = "") -> Spread:
        """A histogram; empty for a label that has not come yet."""
        value = self.families[name].values.get(label)
        assert value is None or isinstance(value, Spread), f"{name} is no histogram: use value"
        return Histogram().spread() if value is None else value


_COUNTERS = {
    "steps": "Steps of the engine.",
    "failed_steps": "Steps that raised an error; their requests ended.",
    "prefill_rows": "Rows computed of prompts, and of what is recomputed after a preemption.",
    "decode_rows": "Rows computed behind prompts, drafts included.",
    "requests": "Requests that were accepted.",
    "prompt_tokens": "Tokens of their prompts.",
    "generated_tokens": "Tokens that requests gained.",
    "cache_queries": "Requests that ended after they were looked up in the prefix cache.",
    "cache_query_tokens": "Tokens of their prompts.",
    "cache_hit_tokens": "Of these, tokens whose compressed KV was found.",
    "cache_replayed_tokens": "Of these, tokens that ran again all the same.",
    "drafts_proposed": "Draft tokens that were drawn.",
    "drafts_verified": "Draft tokens that the model judged.",
    "drafts_accepted": "Draft tokens that were right.",
    "preemptions": "Sequences that gave their memory to another and were computed again.",
}
_GAUGES = {
    "running": "Sequences in the last step.",
    "waiting": "Requests that have not ended and were not in the last step.",
    "free_blocks": "Blocks of compressed KV that nobody holds.",
    "free_window_blocks": "Blocks of window KV that nobody holds.",
}
_TIMES = {
    "time_to_first_token": "From the arrival of a request to its first token.",
    "time_between_tokens": "From one token of a request to its next; of tokens that come together, the mean.",
    "request_time": "From the arrival of a request to its end.",
    "step_time": "Of a step.",
}


class Metrics:
    """The numbers of one engine; `Observer` alone changes them."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.gauges = dict.fromkeys(_GAUGES, 0)
        self.times = {name: Histogram() for name in _TIMES}
        self.finished: dict[str, int] = {}
        """Requests that ended, by why."""
        self.parts: dict[str, Histogram] = {}
        """Time of each part of a step."""

    def snapshot(self) -> Snapshot:
        """All of them at this moment."""
        families = [
            *(Family(name, "counter", text, "", {"": self.counters[name]}) for name, text in _COUNTERS.items()),
            Family("finished_requests", "counter", "Requests that ended.", "reason", dict(self.finished)),
            *(Family(name, "gauge", text, "", {"": self.gauges[name]}) for name, text in _GAUGES.items()),
            *(
                Family(f"{name}_seconds", "histogram", text, "", {"": self.times[name].spread()})
                for name, text in _TIMES.items()
            ),
            Family(
                "step_part_seconds",
                "histogram",
                "Of each part of a step.",
                "part",
                {part: histogram.spread() for part, histogram in self.parts.items()},
            ),
        ]
        return Snapshot({family.name: family for family in families})
