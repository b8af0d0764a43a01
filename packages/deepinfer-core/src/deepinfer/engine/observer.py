"""Sees every step of an engine from outside: its plan, its progress and the time of each part.

An engine that nobody observes does not know of this file. Numbers are `metrics.py`'s, timelines `trace.py`'s, warnings
`alarms.py`'s.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.alarms import Alarms
from deepinfer.engine.metrics import Histogram, Metrics
from deepinfer.engine.trace import REQUESTS, STEPS, Trace

if TYPE_CHECKING:
    from deepinfer.engine.batch_builder import BatchBuilder
    from deepinfer.engine.constraint import Matching
    from deepinfer.engine.draft_report import DraftStep
    from deepinfer.engine.engine import Engine
    from deepinfer.engine.model_runner import ModelRunner
    from deepinfer.engine.plan import Plan
    from deepinfer.engine.request import CacheUse, Progress
    from deepinfer.engine.sampler import Sampler
    from deepinfer.engine.scheduler import Scheduler
    from deepinfer.engine.sequence import Integers, Sequence

PARTS = {
    "scheduler": {
        "schedule": "schedule",
        "schedule_ahead": "schedule",
        "commit": "commit",
        "fail": "commit",
        "retract": "commit",
        "reset": "commit",
    },
    "builder": {"build": "build"},
    "runner": {"run": "run"},
    "sampler": {"draw": "sample", "read": "read"},
}
"""The parts of a step by room and method. A device may still work when `run` and `sample` are over; `read` waits for
it."""


@dataclass(slots=True)
class _Open:
    """A request under way: when it came, was first computed, gave its first token and its last.

    `beginning` is a number for its first block, 0 where the prompt is not longer than that; `matching` what it must
    match, if anything.
    """

    prompt_tokens: int
    beginning: int
    arrived: float
    matching: "Matching | None" = None
    computed: float | None = None
    first: float | None = None
    last: float = 0.0


class _Room:
    """A room of the engine whose calls are seen; everything else is the room's own."""

    def __init__(self, room: object, calls: dict[str, Callable[..., Any]]) -> None:
        self._room = room
        for name, call in calls.items():
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._room, name)


def observe(engine: "Engine", trace: str | Path | None) -> "Observer":
    """Begin to observe; raises ConfigError when the file of the timeline cannot be written."""
    return Observer(engine, None if trace is None else Trace(Path(trace)))


class Observer:
    """Observes one engine from now on, until it is closed; for the thread that steps the engine.

    Its metrics count requests that are added from now on. With `trace`, a timeline is written as well.
    """

    def __init__(self, engine: "Engine", trace: Trace | None = None) -> None:
        self.metrics = Metrics()
        self._alarms = Alarms()
        self._engine = engine
        self._trace = trace
        self._open: dict[int, _Open] = {}
        self._step_began: float | None = None
        self._lock = threading.Lock()
        self._beginnings: set[int] = set()
        self._repeats = 0
        self._tokens: list[Integers | None] = [None] * len(engine.table.sequences)
        self._known = np.zeros(len(self._tokens), dtype=np.int64)
        self._scheduler = engine.scheduler
        self._rooms = (engine.scheduler, engine.builder, engine.runner, engine.sampler)
        engine.scheduler = cast("Scheduler", self._watched("scheduler", engine.scheduler, submit=self._submit))
        engine.builder = cast("BatchBuilder", self._watched("builder", engine.builder))
        engine.runner = cast("ModelRunner", self._watched("runner", engine.runner))
        engine.sampler = cast("Sampler", self._watched("sampler", engine.sampler))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the engine run unobserved again, and finish the trace."""
        engine = self._engine
        engine.scheduler, engine.builder, engine.runner, engine.sampler = self._rooms
        if self._trace is not None:
            self._trace.close()

    def _watched(self, name: str, room: object, **calls: Callable[..., Any]) -> _Room:
        timed = {method: self._timed(part, method, getattr(room, method)) for method, part in PARTS[name].items()}
        return _Room(room, timed | calls)

    def _timed(self, part: str, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time noted and what it returns looked at."""
        histogram = self.metrics.parts.setdefault(part, Histogram())
        look: dict[str, Callable[..., None]] = {
            "schedule": self._planned,
            "schedule_ahead": self._planned,
            "commit": self._committed,
            "fail": self._failed,
            "retract": self._broken_off,
            "reset": self._broken_off,
        }
        seen = look.get(method)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            if self._step_began is None:
                self._step_began = begin
            result = call(*arguments, **named)
            end = time.perf_counter()
            histogram.add(end - begin)
            if self._trace is not None:
                self._trace.span(STEPS, 0, part, begin, end)
            if seen is not None:
                seen(result, end)
            return result

        return timed

    def _submit(self, sequence: "Sequence") -> None:
        """A request came; from any thread."""
        salt, first = sequence.request.cache_salt, sequence.tokens[:BLOCK_TOKENS]
        beginning = hash((salt, first.tobytes())) if sequence.prompt_length > BLOCK_TOKENS else 0
        self._open[sequence.id] = _Open(sequence.prompt_length, beginning, time.perf_counter(), sequence.matching)
        if sequence.request.params.structured is not None and sequence.matching is None:
            self._alarms.unconstrained()
        with self._lock:
            self._repeats += beginning != 0 and beginning in self._beginnings
            self.metrics.counters["requests"] += 1
            self.metrics.counters["prompt_tokens"] += sequence.prompt_length
        self._scheduler.submit(sequence)

    def _planned(self, plan: "Plan | None", now: float) -> None:
        if plan is None:
            return
        counters, gauges = self.metrics.counters, self.metrics.gauges
        gauges["running"] = len(plan.rows)
        gauges["waiting"] = max(0, len(self._open) - len(plan.rows))
        gauges["free_blocks"] = self._scheduler.blocks.free
        gauges["free_window_blocks"] = self._scheduler.windows.free
        sequences, rows = self._engine.table.sequences, plan.rows.tolist()
        for row in rows:
            sequence = sequences[row]
            if sequence is not None and sequence.tokens is not self._tokens[row]:
                self._seated(row, sequence, now)
        prefill = int(np.clip(self._known[plan.rows] - plan.starts, 0, plan.counts).sum())
        counters["prefill_rows"] += prefill
        counters["decode_rows"] += int(plan.counts.sum()) - prefill

    def _seated(self, row: int, sequence: "Sequence", now: float) -> None:
        """A sequence is computed for the first time, or anew: a preemption makes its tokens a new array."""
        self._tokens[row], self._known[row] = sequence.tokens, len(sequence.tokens)
        request = self._open.get(sequence.id)
        if request is None:
            return
        if request.computed is None:
            request.computed = now
        else:
            self.metrics.counters["preemptions"] += 1

    def _committed(self, progress: "list[Progress]", now: float) -> None:
        for one in progress:
            self._gained(one, now)
        self._end_step(now)

    def _failed(self, progress: "list[Progress]", now: float) -> None:
        self.metrics.counters["failed_steps"] += 1
        self._committed(progress, now)

    def _broken_off(self, progress: "list[Progress] | None", now: float) -> None:
        """An interrupt ended the step."""
        for one in progress or ():
            self._gained(one, now)
        self._step_began = None

    def _end_step(self, now: float) -> None:
        metrics = self.metrics
        metrics.counters["steps"] += 1
        begin, self._step_began = now if self._step_began is None else self._step_began, None
        metrics.times["step_time"].add(now - begin)
        if self._trace is not None:
            levels = {name: float(value) for name, value in metrics.gauges.items()}
            self._trace.span(STEPS, 0, "step", begin, now)
            self._trace.levels("sequences", now, running=levels["running"], waiting=levels["waiting"])
            self._trace.levels("blocks", now, free=levels["free_blocks"], free_windows=levels["free_window_blocks"])

    def _gained(self, progress: "Progress", now: float) -> None:
        metrics, request = self.metrics, self._open.get(progress.request_id)
        count = len(progress.token_ids)
        metrics.counters["generated_tokens"] += count
        if progress.cache is not None and progress.cache.mode != "off":
            self._looked_up(progress.cache)
        if progress.draft_step is not None:
            self._drafted(progress.draft_step)
        if progress.finish_reason is not None:
            metrics.finished[progress.finish_reason] = metrics.finished.get(progress.finish_reason, 0) + 1
        if request is None:
            return
        if count:
            if request.first is None:
                request.first = request.last = now
                metrics.times["time_to_first_token"].add(now - request.arrived)
                count -= 1
            if count:
                metrics.times["time_between_tokens"].add((now - request.last) / count, count)
            request.last = now
        if progress.finish_reason is not None:
            metrics.times["request_time"].add(now - request.arrived)
            self._beginnings.add(request.beginning)
            if request.matching is not None:
                self._alarms.constraint(masks=request.matching.masks, forbade=request.matching.forbade)
            del self._open[progress.request_id]
            if self._trace is not None:
                self._draw(progress, request, now)

    def _looked_up(self, use: "CacheUse") -> None:
        counters = self.metrics.counters
        counters["cache_queries"] += 1
        counters["cache_query_tokens"] += use.hit - use.replayed + use.computed
        counters["cache_hit_tokens"] += use.hit
        counters["cache_replayed_tokens"] += use.replayed
        self._alarms.prefix_cache(repeats=self._repeats, hits=counters["cache_hit_tokens"])

    def _drafted(self, step: "DraftStep") -> None:
        counters = self.metrics.counters
        counters["drafts_proposed"] += step.proposed
        counters["drafts_verified"] += step.verified
        counters["drafts_accepted"] += step.accepted
        self._alarms.drafts(verified=counters["drafts_verified"], accepted=counters["drafts_accepted"])

    def _draw(self, progress: "Progress", request: _Open, now: float) -> None:
        """A finished request's own track: waiting, prefill, decode."""
        assert self._trace is not None
        track = progress.request_id
        self._trace.name_track(REQUESTS, track, f"request {track}: {progress.finish_reason}")
        marks = [("waiting", request.arrived), ("prefill", request.computed), ("decode", request.first)]
        told = [(name, at) for name, at in marks if at is not None]
        for (name, begin), (_, end) in zip(told, [*told[1:], ("", now)], strict=True):
            self._trace.span(REQUESTS, track, name, begin, end, prompt_tokens=request.prompt_tokens)
