"""Sends requests to an engine when their time comes and notes when each token came: `measure`, and its statistics.

What is asked is `load.py`'s; tables and pictures are `report.py`'s and `plot.py`'s.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer.bench.load import Arrival
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request, SamplingParams
from deepinfer.errors import RequestError

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Answer:
    """What became of one request; times are seconds from the start of the run."""

    arrival: Arrival
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    ended_s: float | None = None
    error: str | None = None
    cached: int = 0

    def take(self, progress: Progress, now: float) -> None:
        """Note what a step gave."""
        if progress.token_ids:
            self.first_s = now if self.first_s is None else self.first_s
            self.last_s = now
            self.tokens += len(progress.token_ids)
        if progress.finish_reason is not None:
            self.ended_s, self.error = now, progress.error
            if progress.cache is not None:
                self.cached = progress.cache.hit - progress.cache.replayed


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: the mean, and the percentiles 50, 90 and 99."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> "Times":
        """The statistics of some times; not a number where there are none."""
        if not values:
            return Times(*[float("nan")] * 4)
        return Times(float(np.mean(values)), *np.percentile(values, PERCENTILES).tolist())


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run in numbers; all times count from when a request arrives, whether the engine was ready for it or not.

    rate                requests a second that were offered; None = as a file says
    requests, failed    how many were sent, and how many of them ended with an error
    errors              the different errors
    duration_s          from the start to the last token
    prompt_tokens, output_tokens   of the requests that ended well
    cached_tokens       of these prompt tokens, how many were found in the prefix cache and did not run
    requests_per_s, output_tokens_per_s, tokens_per_s   the latter of prompt and output
    time_to_first_token   from the arrival to the first token
    time_per_output_token   between the first and the last token, over the tokens behind the first
    end_to_end          from the arrival to the end
    """

    rate: float | None
    requests: int
    failed: int
    errors: list[str] = field(default_factory=list)
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    time_to_first_token: Times
    time_per_output_token: Times
    end_to_end: Times


def measure(engine: Engine, load: Sequence[Arrival], *, rate: float | None, temperature: float = 1.0) -> Result:
    """Run a load whose arrivals are in order of time, and return its numbers."""
    return summarise(answer(engine, load, temperature), rate)


def answer(engine: Engine, load: Sequence[Arrival], temperature: float) -> list[Answer]:
    """Send each request when its time comes, step while there is work, and return what became of each."""
    answers = [Answer(arrival) for arrival in load]
    under_way: dict[int, Answer] = {}
    sent, begin = 0, time.perf_counter()
    while sent < len(answers) or under_way:
        now = time.perf_counter() - begin
        while sent < len(answers) and load[sent].time_s <= now:
            _send(engine, answers[sent], sent, temperature, under_way)
            sent += 1
        if under_way:
            for progress in engine.step():
                gained = under_way[progress.request_id]
                gained.take(progress, time.perf_counter() - begin)
                if gained.ended_s is not None:
                    del under_way[progress.request_id]
        elif sent < len(answers):
            time.sleep(max(0.0, load[sent].time_s - (time.perf_counter() - begin)))
    return answers


def _send(engine: Engine, answer: Answer, index: int, temperature: float, under_way: dict[int, Answer]) -> None:
    arrival = answer.arrival
    params = SamplingParams(max_tokens=arrival.output_tokens, temperature=temperature, ignore_eos=True)
    try:
        under_way[engine.add(Request(arrival.prompt, params, index=index))] = answer
    except RequestError as error:
        answer.error = str(error)


def summarise(answers: Sequence[Answer], rate: float | None) -> Result:
    """The numbers of a run."""
    good = [one for one in answers if one.error is None and one.first_s is not None and one.ended_s is not None]
    duration = max((one.ended_s or 0.0 for one in good), default=0.0)
    prompt, output = sum(len(one.arrival.prompt) for one in good), sum(one.tokens for one in good)

    def per_second(count: int) -> float:
        return count / duration if duration else 0.0

    return Result(
        rate=rate,
        requests=len(answers),
        failed=len(answers) - len(good),
        errors=sorted({one.error for one in answers if one.error is not None}),
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=sum(one.cached for one in good),
        output_tokens=output,
        requests_per_s=per_second(len(good)),
        output_tokens_per_s=per_second(output),
        tokens_per_s=per_second(prompt + output),
        time_to_first_token=Times.of([(one.first_s or 0.0) - one.arrival.time_s for one in good]),
        time_per_output_token=Times.of(
            [(one.last_s - (one.first_s or 0.0)) / (one.tokens - 1) for one in good if one.tokens > 1]
        ),
        end_to_end=Times.of([(one.ended_s or 0.0) - one.arrival.time_s for one in good]),
    )
