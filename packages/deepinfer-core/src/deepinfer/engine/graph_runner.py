"""Steps of few rows as recorded graphs: owns the graphs and the memory that they read and write.

What a step computes is the model's; recording and replaying are the accelerator's; which rows run is the
`BatchBuilder`'s.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Groups
from deepinfer.engine.config import EngineConfig, window_blocks
from deepinfer.engine.model_runner import Model
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache

RECORD_SECONDS = 20.0
"""How long recording may take before the first request; what is not recorded by then is when it is first needed."""
SHORTEST_CONTEXT, CONTEXT_FACTOR = 512, 4
LONGEST_AT_START = 8192
"""Graphs of longer contexts are recorded when the first request gets there: few do, and most steps never need them."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphLimits:
    """What a graph must be able to hold.

    sequences    most that decode at once
    rows_each    most rows of a sequence: its newest token and the draft tokens that are verified behind it
    context      longest, in tokens
    """

    sequences: int
    rows_each: int
    context: int


@dataclass(frozen=True)
class GraphSize:
    """One graph: its rows, its sequences (as many = every sequence decodes one row) and the longest context."""

    rows: int
    sequences: int
    context: int


class GraphRunner:
    """A `Model` over another: replays steps of few rows from graphs, runs all others as they come.

    A step is laid into the smallest graph that holds it.  Lengths are data: rows that are left over belong to no
    sequence, see nothing, and write to spare memory.  Output lies in a graph's own memory until its next replay.
    """

    def __init__(
        self, model: Model, config: ModelConfig, cache: KVCache, accelerator: Accelerator, limits: GraphLimits
    ) -> None:
        self._model = model
        self._config = config
        self._cache = cache
        self._accelerator = accelerator
        self._limits = limits
        self._windows = window_blocks(limits.rows_each, config.window)
        self._recorded: dict[GraphSize, _Recorded] = {}
        self._failed: str | None = None
        self._too_large: set[GraphSize] = set()

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        """Run one step; `cache` is the one that graphs were recorded over."""
        assert cache is self._cache, "a graph reads and writes the cache that it was recorded over"
        size = self.size_of(batch)
        recorded = None if size is None else self._recorded.get(size) or self._record(size)
        return self._model.forward(batch, cache) if recorded is None else recorded.run(batch)

    @torch.inference_mode()
    def prepare(self, seconds: float = RECORD_SECONDS) -> int:
        """Record what decoding needs first, short contexts before long ones, for at most so long; returns how many."""
        begin = time.perf_counter()
        count = 0
        for size in self._first_sizes():
            if time.perf_counter() - begin > seconds or self._record(size) is None:
                break
            count += 1
        _log.info("recorded %d graphs in %.1f s", count, time.perf_counter() - begin)
        return count

    def size_of(self, batch: Batch) -> GraphSize | None:
        """The smallest graph that holds a step; None for a step that runs as it comes."""
        rows, sequences = batch.token_ids.shape[0], batch.query_lens.shape[0]
        special = (batch.decoder_rows, batch.image_rows, batch.window_starts)
        if self._failed is not None or rows == 0 or any(part is not None for part in special):
            return None
        limits = self._limits
        fits = rows <= sequences * limits.rows_each and sequences <= limits.sequences
        if not fits or batch.window_tables.shape[1] > self._windows or batch.max_context > limits.context:
            return None
        decoding = rows == sequences
        each = 1 if decoding else limits.rows_each
        size = GraphSize(
            rows=min(_step_up(rows), limits.sequences * each),
            sequences=min(_step_up(sequences), limits.sequences),
            context=next(bound for bound in _contexts(limits.context) if bound >= batch.max_context),
        )
        return None if size in self._too_large else size

    def _first_sizes(self) -> Iterator[GraphSize]:
        most = self._limits.sequences
        for context in _contexts(self._limits.context):
            count, last = 0, context > LONGEST_AT_START
            while count < most and not last:
                count = min(_step_up(count + 1), most)
                yield GraphSize(count, count, context)

    def _record(self, size: GraphSize) -> "_Recorded | None":
        """Record one graph; the first that cannot be recorded is the last that is tried, unless memory was missing."""
        batch = _empty_batch(size, self._config, self._windows, self._accelerator.device)
        outputs: list[ModelOutput] = []

        def run() -> None:
            outputs[:] = [self._model.forward(batch, self._cache)]

        try:
            replay = self._accelerator.capture(run)
        except torch.OutOfMemoryError:
            self._too_large.add(size)
            _log.warning("no memory is left for a graph of %s: such steps run without", size)
            return None
        except Exception as error:  # noqa: BLE001 - whatever a device cannot record it can still run
            self._failed = str(error).splitlines()[0] if str(error) else type(error).__name__
            _log.warning("steps run without graphs, this one cannot be recorded: %s", self._failed)
            return None
        assert replay is not None, f"accelerator {self._accelerator.name!r} says that it records graphs"
        self._recorded[size] = _Recorded(batch, replay, outputs)
        return self._recorded[size]


def record_graphs(
    model: Model, model_config: ModelConfig, config: EngineConfig, cache: KVCache, accelerator: Accelerator, drafts: int
) -> Model:
    """Return the model with graphs of its first steps recorded, or as it is where the engine runs without."""
    if not config.graphs:
        return model
    limits = GraphLimits(config.max_num_seqs, 1 + drafts, config.max_model_len)
    runner = GraphRunner(model, model_config, cache, accelerator, limits)
    runner.prepare()
    return runner


class _Column:
    """One tensor of a graph's batch: what is laid over its beginning, the rest as it was."""

    def __init__(self, static: Tensor) -> None:
        self._static = static
        self._empty = static.clone()
        self._last: Tensor | None = None

    def stage(self, given: Tensor, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Add the copies that bring `given` in; none when it is what lies there."""
        last, self._last = self._last, given
        if given is last:
            return
        if given.ndim == 2:
            given = given[:, : self._static.shape[1]]
            target = self._static[: given.shape[0], : given.shape[1]]
            narrower = last is not None and given.shape[1] < last.shape[1]
        else:
            target, narrower = self._static[: given.shape[0]], False
        if narrower:
            self._static.copy_(self._empty)
        elif last is not None and given.shape[0] < last.shape[0]:
            left = slice(given.shape[0], last.shape[0])
            targets.append(self._static[left])
            sources.append(self._empty[left])
        targets.append(target)
        sources.append(given)


class _Recorded:
    """One graph with the batch that it reads."""

    def __init__(self, batch: Batch, replay: Callable[[], None], outputs: list[ModelOutput]) -> None:
        self._replay = replay
        self._outputs = outputs
        self._columns = [_Column(tensor) for tensor in _tensors(batch)]

    def run(self, batch: Batch) -> ModelOutput:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for column, given in zip(self._columns, _tensors(batch), strict=True):
            column.stage(given, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._replay()
        output = self._outputs[0]
        logits = output.logits[: batch.logit_rows.shape[0]]
        hidden = None if output.hidden is None else output.hidden[: batch.token_ids.shape[0]]
        return replace(output, logits=logits, hidden=hidden)


def _tensors(batch: Batch) -> list[Tensor]:
    """What a step brings, in one order."""
    groups = [part for _, group in sorted(batch.groups.items()) for part in (group.rows, group.slots)]
    of_rows = [batch.token_ids, batch.positions, batch.sequences, batch.history, batch.logit_rows]
    of_sequences = [batch.query_starts, batch.query_lens, batch.context_lens, batch.block_tables, batch.window_tables]
    return [*of_rows, *of_sequences, batch.window_bases, batch.states, batch.decoder_starts, *groups]


def _empty_batch(size: GraphSize, config: ModelConfig, windows: int, device: torch.device) -> Batch:
    """A step of rows that no sequence has: they see nothing and write to spare memory.

    Where every sequence decodes, each row is its own sequence; else all belong to one behind the others.
    """
    rows, decoding = size.rows, size.rows == size.sequences
    sequences = size.sequences if decoding else size.sequences + 1

    def full(value: int, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=device)

    numbers = torch.arange(rows, device=device)
    return Batch(
        token_ids=full(0, rows),
        positions=full(0, rows),
        sequences=numbers.clone() if decoding else full(size.sequences, rows),
        history=full(-1, rows, config.history),
        query_starts=numbers.clone() if decoding else full(0, sequences),
        query_lens=full(1 if decoding else 0, sequences),
        context_lens=full(1, sequences),
        block_tables=full(-1, sequences, -(-size.context // BLOCK_TOKENS)),
        window_tables=full(-1, sequences, windows),
        window_bases=full(0, sequences),
        states=full(-1, sequences),
        decoder_starts=full(0, sequences),
        groups={ratio: Groups(full(0, rows), full(-1, rows)) for ratio in config.ratios},
        logit_rows=numbers.clone() if decoding else full(0, rows),
        max_context=size.context,
    )


def _contexts(longest: int) -> list[int]:
    """Bounds of contexts that graphs are recorded for, up to `longest`."""
    bounds = [SHORTEST_CONTEXT]
    while bounds[-1] < longest:
        bounds.append(bounds[-1] * CONTEXT_FACTOR)
    return [*bounds[:-1], max(longest, SHORTEST_CONTEXT)] if longest > SHORTEST_CONTEXT else [longest]


def _step_up(count: int) -> int:
    """The size that holds `count`: 1, 2, 4, 8, then powers of two and the middles between them."""
    size = 1 << max(count - 1, 0).bit_length()
    half = size * 3 // 4
    return half if size >= 16 and count <= half else size
