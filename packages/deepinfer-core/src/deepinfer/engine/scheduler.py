"""Which sequences run in a step, with how many tokens and which blocks; owns the queues and each sequence's tokens.

What a block holds is `KVCache`'s; how a plan becomes tensors is the `BatchBuilder`'s; whether a request is valid was
settled by `Engine.add`.
"""

from collections import deque

import numpy as np

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.block_pool import BlockPool
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.plan import Plan, Sampled
from deepinfer.engine.request import FinishReason, Logprobs, Progress
from deepinfer.engine.sequence import Gained, Integers, Sequence, SequenceTable, blocks_for

PROMPT_ROWS = 512
"""Most rows of a request in a step when the logits of all are wanted: a row is as long as the vocabulary."""


class Scheduler:
    """Continuous batching, first come, first served.

    A sequence gets the blocks of all tokens it has when it is admitted, one more whenever it has grown by a block, and
    window blocks for the rows of a step and the window before them.  Every running sequence computes at least one
    token a step; what the budget leaves goes to prefill chunks, oldest first, then to new sequences.  When a pool runs
    dry, the newest sequence gives everything back and is recomputed later; the oldest always finds room, because the
    pools hold the longest sequence that is admitted.
    """

    def __init__(self, config: EngineConfig, window: int, table: SequenceTable) -> None:
        self.blocks = BlockPool("blocks", config.blocks)
        self.windows = BlockPool("window blocks", config.window_blocks)
        self._table = table
        self._window = window
        assert config.max_num_batched_tokens >= config.max_num_seqs, "each running sequence computes a token a step"
        assert config.blocks >= blocks_for(config.max_model_len), "the longest sequence fits into the pool alone"
        assert config.window_blocks >= min(config.window_width(window), 2), "so does its window"
        self._budget = config.max_num_batched_tokens
        self._inbox: deque[Sequence | int] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: Integers = np.empty(0, dtype=np.int64)
        self._prompt_readers: set[int] = set()
        self._notices: list[Progress] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._waiting or self._notices or len(self._running))

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; from any thread."""
        self._inbox.append(sequence)

    def abort(self, sequence_id: int) -> None:
        """End a sequence at the start of the next step; from any thread. One that has ended is left alone."""
        self._inbox.append(sequence_id)

    def schedule(self) -> Plan:
        """Choose what the next step computes, and reserve its blocks."""
        self._receive()
        table, rows = self._table, self._running
        starts = table.computed[rows]
        counts = table.lengths[rows] - starts
        growing = (counts > 1) | (starts + counts > table.reach[rows])
        if not (self._waiting or self._prompt_readers or growing.any()):
            return Plan(rows, starts, counts, counts, counts == 1, decoding=True)
        rows, counts, spare = self._continue_running(starts, counts)
        if len(rows) == len(starts) and self._waiting:
            rows, counts = self._admit(rows, counts, spare)
        starts = table.computed[rows]
        samples = starts + counts == table.lengths[rows]
        logit_counts = samples.astype(np.int64)
        readers: list[int] = []
        if self._prompt_readers:
            readers = [i for i, row in enumerate(rows.tolist()) if row in self._prompt_readers]
        for i in readers:
            start, done = int(starts[i]), self._table[rows[i]].prompt_rows or 0
            logit_counts[i] = max(start + int(counts[i]) - max(start, done), 0)
        decoding = not readers and bool((samples & (counts == 1)).all())
        return Plan(rows, starts, counts, logit_counts, samples, tuple(i for i in readers if logit_counts[i]), decoding)

    def commit(self, plan: Plan, sampled: Sampled) -> list[Progress]:
        """Append the new tokens, free what is no longer needed, and return what each request gained."""
        table = self._table
        table.computed[plan.rows] += plan.counts
        drawn = plan.rows[plan.samples]
        table.computed[drawn] += sampled.counts - 1
        table.append(drawn, sampled.token_ids, sampled.counts)
        progress, self._notices = self._notices, []
        for i in plan.prompt_rows:
            self._note_prompt_rows(int(plan.rows[i]), int(plan.logit_counts[i]))
            if not plan.samples[i]:
                row = int(plan.rows[i])
                progress.append(Progress(table[row].id, prompt_logprobs=sampled.prompt_logprobs[row]))
        tokens, end = sampled.token_ids.tolist(), 0
        for row, count in zip(drawn.tolist(), sampled.counts.tolist(), strict=True):
            sequence = table[row]
            start, end = end, end + count
            gained = sequence.take(tokens[start:end])
            logprobs = sampled.logprobs.get(row) if sampled.logprobs else None
            prompt_logprobs = sampled.prompt_logprobs.get(row) if sampled.prompt_logprobs else None
            progress.append(_progress(sequence.id, gained, logprobs, prompt_logprobs))
            if gained.reason is not None:
                self._release(row)
        self._release_windows()
        return progress

    def fail(self, plan: Plan, error: Exception) -> list[Progress]:
        """End every sequence of a step that raised `error`; the others go on."""
        progress, self._notices = self._notices, []
        told = f"the step that computed this request failed: {type(error).__name__}: {error}"
        for row in plan.rows.tolist():
            progress.append(self._ended(self._table[row], "error", told))
            self._release(row)
        return progress

    def retract(self) -> None:
        """Forget a step that was interrupted half-way: what it wrote is recomputed for every sequence that it ran."""
        while len(self._running):
            self._preempt_newest()

    def reset(self) -> list[Progress]:
        """End every request and begin with clean books, after an interrupt in the middle of a change."""
        told = "the engine was interrupted while it changed its books: send the request again"
        left = [*(sequence for sequence in self._table.sequences if sequence is not None), *self._waiting]
        progress, self._notices = [*self._notices, *(self._ended(sequence, "abort", told) for sequence in left)], []
        self._waiting.clear()
        self._prompt_readers.clear()
        self._running = np.empty(0, dtype=np.int64)
        self._table.clear()
        self.blocks = BlockPool(self.blocks.name, self.blocks.size)
        self.windows = BlockPool(self.windows.name, self.windows.size)
        return progress

    def check(self) -> None:
        """Re-add the books of both pools; raises AssertionError when they do not balance."""
        blocks, windows = self._table.held()
        self.blocks.check(blocks)
        self.windows.check(windows)

    def _receive(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Sequence):
                self._waiting.append(message)
                continue
            for sequence in [waiting for waiting in self._waiting if waiting.id == message]:
                self._waiting.remove(sequence)
                self._notices.append(self._ended(sequence, "abort"))
            for row in [row for row in self._running.tolist() if self._table[row].id == message]:
                self._notices.append(self._ended(self._table[row], "abort"))
                self._release(row)

    def _ended(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> Progress:
        text = "" if sequence.text is None else sequence.text.close()
        return Progress(sequence.id, text=text, finish_reason=reason, error=error)

    def _continue_running(self, starts: Integers, counts: Integers) -> tuple[Integers, Integers, int]:
        """Tokens of each running sequence, with blocks reserved, and what is left of the budget."""
        table, rows = self._table, self._running
        spare = self._budget - len(rows)
        for i in np.flatnonzero(counts > 1).tolist():
            counts[i] = 1 + min(int(counts[i]) - 1, spare, self._longest_chunk(int(rows[i])) - 1)
            spare -= int(counts[i]) - 1
        ends = starts + counts
        for i in np.flatnonzero(ends > table.reach[rows]).tolist():
            row = int(rows[i])
            if table.sequences[row] is not None:
                counts[i] = self._reserve(row, int(ends[i])) - starts[i]
        if len(self._running) < len(rows):
            alive = np.array([table.sequences[row] is not None for row in rows.tolist()], dtype=np.bool_)
            rows, counts = rows[alive], counts[alive]
        return rows, counts, spare

    def _longest_chunk(self, row: int) -> int:
        return PROMPT_ROWS if row in self._prompt_readers else self._budget

    def _reserve(self, row: int, end: int) -> int:
        """Give `row` the blocks to compute up to `end`, or as far as there are window blocks; return that end.

        Takes blocks from the newest sequences; when `row` is the newest itself, it is preempted.
        """
        table = self._table
        while (need := blocks_for(end) - int(table.block_counts[row])) > self.blocks.free:
            if self._preempt_newest() == row:
                return end
        if need > 0:
            table.add_blocks(row, self.blocks.take(need))
        held = int(table.window_bases[row] + table.window_counts[row])
        while (room := (held + self.windows.free) * BLOCK_TOKENS) <= table.computed[row]:
            if self._preempt_newest() == row:
                return end
        end = min(end, room)
        table.add_windows(row, self.windows.take(max(blocks_for(end) - held, 0)))
        return end

    def _admit(self, rows: Integers, counts: Integers, spare: int) -> tuple[Integers, Integers]:
        """Seat waiting sequences, in order, while there are budget, rows and blocks for the next one."""
        new: list[int] = []
        chunks: list[int] = []
        while self._waiting and spare > 0 and self._table.free_rows and self.windows.free:
            sequence = self._waiting[0]
            length = len(sequence.tokens)
            if blocks_for(length) > self.blocks.free:
                break
            self._waiting.popleft()
            row = self._table.seat(sequence)
            if sequence.wants_prompt_rows:
                self._prompt_readers.add(row)
            chunk = min(length, spare, self._longest_chunk(row), self.windows.free * BLOCK_TOKENS)
            self._table.add_blocks(row, self.blocks.take(blocks_for(length)))
            self._table.add_windows(row, self.windows.take(blocks_for(chunk)))
            new.append(row)
            chunks.append(chunk)
            spare -= chunk
        if not new:
            return rows, counts
        self._running = np.array([*self._running.tolist(), *new], dtype=np.int64)
        return np.array([*rows.tolist(), *new], dtype=np.int64), np.array([*counts.tolist(), *chunks], dtype=np.int64)

    def _preempt_newest(self) -> int:
        """Take everything from the newest sequence and queue it first, to be recomputed with what it has generated."""
        row = int(self._running[-1])
        sequence = self._table[row]
        prompt = sequence.tokens[: sequence.prompt_length]
        sequence.tokens = np.concatenate([prompt, np.array(sequence.generated, dtype=np.int64)])
        self._release(row)
        self._waiting.appendleft(sequence)
        return row

    def _release(self, row: int) -> None:
        """Free the row and its blocks."""
        table = self._table
        self.blocks.give(table.drop_blocks(row))
        self.windows.give(table.drop_windows(row, int(table.window_bases[row] + table.window_counts[row])))
        table.unseat(row)
        self._prompt_readers.discard(row)
        self._running = self._running[self._running != row]

    def _release_windows(self) -> None:
        """Free window blocks that lie wholly before the window of each sequence's next row."""
        table, rows = self._table, self._running
        bases = np.maximum(table.computed[rows] - self._window + 1, 0) // BLOCK_TOKENS
        for i in np.flatnonzero(bases > table.window_bases[rows]).tolist():
            self.windows.give(table.drop_windows(int(rows[i]), int(bases[i])))

    def _note_prompt_rows(self, row: int, count: int) -> None:
        sequence = self._table[row]
        sequence.prompt_rows = (sequence.prompt_rows or 0) + count
        if not sequence.wants_prompt_rows:
            self._prompt_readers.discard(row)


def _progress(request_id: int, gained: Gained, logprobs: Logprobs | None, prompt_logprobs: Logprobs | None) -> Progress:
    """Tell what a request gained, with log-probabilities of the tokens that it kept."""
    if logprobs is not None:
        logprobs = logprobs[: len(gained.tokens)]
    return Progress(request_id, gained.tokens, gained.text, gained.reason, gained.stop, None, logprobs, prompt_logprobs)
