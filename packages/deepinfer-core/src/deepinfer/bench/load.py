"""What a benchmark asks, and when: prompts of random tokens that arrive all at once, at random, or as a file says.

Answering and timing are `run.py`'s.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError
from deepinfer.model.config import ModelConfig

AT_ONCE = math.inf
"""The rate at which all requests are there from the start."""

FORM = '{"time": seconds, "prompt_tokens": number, "output_tokens": number}'

type Facts = tuple[float, int, int]
"""A request without its tokens: when it comes, in seconds, and the lengths of prompt and output."""

_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    @staticmethod
    def parse(text: str, what: str) -> "Lengths":
        """Read "128" or "64:256"; raises ConfigError."""
        match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip())
        low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= low <= high:
            raise ConfigError(f"{what} is expected as a number of at least 1, or a range such as 64:256, got {text!r}")
        return Lengths(low, high)

    def draw(self, generator: np.random.Generator, count: int) -> _Integers:
        """Draw `count` lengths."""
        return generator.integers(self.low, self.high + 1, count)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What requests look like.

    requests       how many
    prompt_tokens, output_tokens   how long each is
    shared_prefix  the share, 0 to 1, of a prompt that it has in common with all others
    seed           of arrivals, lengths and tokens
    """

    requests: int = 32
    prompt_tokens: Lengths = Lengths(128, 128)
    output_tokens: Lengths = Lengths(64, 64)
    shared_prefix: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"the number of requests must be at least 1, got {self.requests}")
        if not 0 <= self.shared_prefix <= 1:
            raise ConfigError(f"the shared prefix must be a share from 0 to 1, got {self.shared_prefix}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds from the start, its prompt, and how many tokens it generates."""

    time_s: float
    prompt: tuple[int, ...]
    output_tokens: int


def check_rate(rate: float) -> None:
    """Raise ConfigError for a rate that is none."""
    if not rate > 0:
        raise ConfigError(f"a rate must be a number of requests a second above 0, or inf for all at once, got {rate}")


def at_rate(rate: float, options: LoadOptions, model: ModelConfig) -> list[Arrival]:
    """Requests that come at random, independent of one another, `rate` a second in the mean (a Poisson process).

    With `AT_ONCE` all come at 0.  The same seed gives the same requests at every rate, nearer to one another or not.
    Raises ConfigError for a rate that is none.
    """
    check_rate(rate)
    generator = np.random.default_rng(options.seed)
    gaps = generator.exponential(1.0, options.requests)
    times = np.zeros(options.requests) if rate == AT_ONCE else gaps.cumsum() / rate
    prompts = options.prompt_tokens.draw(generator, options.requests)
    outputs = options.output_tokens.draw(generator, options.requests)
    return from_facts(list(zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)), options, model)


def read_file(path: Path) -> list[Facts]:
    """Requests as a file of JSON lines tells them; raises ConfigError, naming the line, for what is no request."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a file of JSON lines, {FORM}: {error}") from error
    facts = [_read(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not facts:
        raise ConfigError(f"{path}: expected one request a line, found none")
    return sorted(facts)


def _read(line: str, where: str) -> Facts:
    try:
        value = json.loads(line)
        time, prompt, output = (value[name] for name in ("time", "prompt_tokens", "output_tokens"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{where}: expected {FORM}, got {line.strip():.60}") from error
    numbers = all(isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in (prompt, output))
    if not numbers or not isinstance(time, int | float) or not 0 <= time < math.inf:
        raise ConfigError(f"{where}: expected {FORM}, times from 0 and lengths from 1, got {line.strip():.60}")
    return float(time), prompt, output


def from_facts(facts: Sequence[Facts], options: LoadOptions, model: ModelConfig) -> list[Arrival]:
    """Give each request its prompt: what it shares with all others, then tokens of its own."""
    generator = np.random.default_rng([options.seed, 1])
    special = {*model.eos_token_ids, model.bos_token_id, model.image_token_id}
    usable = np.setdiff1d(np.arange(model.vocab_size), [token for token in special if token is not None])
    common = generator.choice(usable, max(prompt for _, prompt, _ in facts)).tolist()
    arrivals = []
    for time_s, length, output in facts:
        shared = round(length * options.shared_prefix)
        own = generator.choice(usable, length - shared).tolist()
        arrivals.append(Arrival(time_s, (*common[:shared], *own), output))
    return arrivals
