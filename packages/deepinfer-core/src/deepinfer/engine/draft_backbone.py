"""The model's draft stages as a drafter meets them: runs their blocks, times them and the model.

The stages are `model/draft.py`'s, their context is `draft_context.py`'s; what becomes of their rows is the drafter's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, Groups
from deepinfer.engine.drafter import Drafter, DraftRows
from deepinfer.engine.model_runner import Model, Transfer
from deepinfer.engine.sequence import Integers, SequenceTable
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.draft import DraftStages
from deepinfer.model.kv_cache import KVCache

LONGEST_TRIAL_MS = 50.0
"""A step that takes longer is the largest one that is timed; beyond, times are taken to grow with the rows."""
TRIALS = 3


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Of R blocks of B rows: hidden and normed [R, B, D], before and behind the last norm; base [R, B, V], wide."""

    hidden: Tensor
    normed: Tensor
    base: Tensor


class StagesBackbone:
    """Runs blocks of the draft stages for sequences of one table, over the context that was written of them."""

    def __init__(self, stages: DraftStages, table: SequenceTable, transfer: Transfer, cache: KVCache) -> None:
        self._stages = stages
        self._table = table
        self._transfer = transfer
        self._cache = cache

    @property
    def block_size(self) -> int:
        """B: rows of a block, hence drafts of a step."""
        return self._stages.draft.block_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._stages.target.config.vocab_size

    @torch.inference_mode()
    def draft_block(self, anchors: Tensor, positions: Tensor, slots: Tensor) -> BlockRows:
        """Run the block [anchor, noise, ...] of R sequences: last tokens, their positions, state rows, all [R]."""
        rows, width = slots.cpu().numpy(), self.block_size
        count = len(rows)
        table = self._table
        windows = table.windows[rows, : max(1, int(table.window_counts[rows].max(initial=0)))]
        columns = [np.arange(count) * width, np.full(count, width), windows, table.window_bases[rows]]
        columns += [rows, np.maximum(table.decoder_starts[rows], 0), np.repeat(np.arange(count), width)]
        starts, lens, window_tables, bases, states, decoder_starts, numbers = self._transfer.to_device(columns)
        places = positions.unsqueeze(1) + torch.arange(width, device=positions.device)
        batch = Batch(
            token_ids=self._stages.block_ids(anchors).flatten(),
            positions=places.flatten(),
            sequences=numbers,
            history=torch.empty((count * width, 0), dtype=torch.int64, device=positions.device),
            query_starts=starts,
            query_lens=lens,
            context_lens=positions + width,
            block_tables=torch.full((count, 1), -1, device=positions.device),
            window_tables=window_tables,
            window_bases=bases,
            states=states,
            decoder_starts=decoder_starts,
            groups={},
            logit_rows=torch.arange(count * width, device=positions.device),
            max_context=0,
        )
        out = self._stages.forward(batch, self._cache)
        hidden, normed, base = (part.view(count, width, -1) for part in (out.hidden, out.normed, out.logits))
        return BlockRows(hidden, normed, base)


class StepClock:
    """Measures steps: where ops run in this thread by its own processor time, which no other program changes."""

    def __init__(self, transfer: Transfer) -> None:
        self._of_thread = transfer.mark() is None

    def now_ms(self) -> float:
        """Milliseconds since some moment."""
        return (time.thread_time() if self._of_thread else time.perf_counter()) * 1e3


class TimedModel:
    """A model that notes when each step began."""

    def __init__(self, model: Model, transfer: Transfer) -> None:
        self._model = model
        self.clock = StepClock(transfer)
        self.began_ms = 0.0

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        """Run the model."""
        self.began_ms = self.clock.now_ms()
        return self._model.forward(batch, cache)


class Trial:
    """Times the target and the drafter on rows that leave no trace, before any request is there."""

    def __init__(self, model: Model, config: ModelConfig, cache: KVCache, transfer: Transfer) -> None:
        self._model = model
        self._config = config
        self._cache = cache
        self._transfer = transfer
        self._clock = StepClock(transfer)

    def target_ms(self, most: int) -> dict[int, float]:
        """Milliseconds of a step by its rows, 1, 2, 4 ... up to `most`."""
        return self._times(lambda rows: self._wait(self._model.forward(self._batch(rows), self._cache).logits), most)

    def draft_ms(self, drafter: Drafter, most: int) -> dict[int, float]:
        """Milliseconds of drafting by the sequences that draft."""
        return self._times(lambda count: drafter.rehearse(_rehearsed(count)), most)

    def _times(self, run: Callable[[int], None], most: int) -> dict[int, float]:
        """Milliseconds of `run(size)` for sizes 1, 2, 4 ...; where it gets long, the last slope goes on to `most`."""
        found: dict[int, float] = {}
        size = 1
        while size < 2 * most and (not found or max(found.values()) < LONGEST_TRIAL_MS):
            size = min(size, most)
            run(size)  # what is made at the first use of a shape does not count
            found[size] = self._taken(run, size)
            size *= 2
        # The shortest of passes over all sizes: whatever else runs for a while disturbs them all alike.
        for _ in range(TRIALS - 1):
            found = {size: min(ms, self._taken(run, size)) for size, ms in found.items()}
        last = max(found)
        if last < most:
            before = max((known for known in found if known < last), default=0)
            slope = max(found[last] - found.get(before, 0.0), 0.0) / (last - before)
            found[most] = found[last] + slope * (most - last)
        return found

    def _taken(self, run: Callable[[int], None], size: int) -> float:
        began = self._clock.now_ms()
        run(size)
        return self._clock.now_ms() - began

    def _wait(self, tensor: Tensor) -> None:
        tensor[:, :1].cpu()

    def _batch(self, rows: int) -> Batch:
        """One row each of so many sequences that hold no block: everything is written to spare memory."""
        nothing, first = np.full(rows, -1), np.arange(rows)
        columns = [np.zeros(rows, dtype=np.int64), first, nothing, np.ones(rows, dtype=np.int64)]
        zeros, numbers, none, ones = self._transfer.to_device(columns)
        groups = {ratio: Groups(numbers, none) for ratio in self._config.ratios}
        tables, history = none.unsqueeze(1), none.unsqueeze(1).expand(rows, self._config.history).contiguous()
        return Batch(
            token_ids=zeros,
            positions=zeros,
            sequences=numbers,
            history=history,
            query_starts=numbers,
            query_lens=ones,
            context_lens=ones,
            block_tables=tables,
            window_tables=tables,
            window_bases=zeros,
            states=none,
            decoder_starts=zeros,
            groups={ratio: group if ratio == 1 else Groups(zeros[:0], none[:0]) for ratio, group in groups.items()},
            logit_rows=numbers,
            max_context=1,
        )


def _rehearsed(count: int) -> DraftRows:
    """Sequences that only a trial knows."""

    def integers(value: int) -> Integers:
        return np.full(count, value, dtype=np.int64)

    return DraftRows(
        states=np.arange(count),
        anchors=integers(0),
        positions=integers(0),
        seeds=integers(0),
        limits=integers(1),
        temperature=np.ones(count),
        top_k=integers(0),
        top_p=np.ones(count),
        min_p=np.zeros(count),
    )
