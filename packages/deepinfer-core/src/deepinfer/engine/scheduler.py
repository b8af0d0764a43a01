"""Which sequences run in a step, with how many tokens and which blocks; owns each running sequence's tokens.

Who waits for a place is kept in `waiting.py`; what a block holds is `KVCache`'s; how a plan becomes tensors is the
`BatchBuilder`'s; whether a request is valid was settled by `Engine.add`.
"""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.block_pool import NOTHING, BlockPool
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.plan import NOT_FINITE, Plan, Sampled
from deepinfer.engine.prefix_cache import PrefixCache
from deepinfer.engine.request import Progress
from deepinfer.engine.sequence import Integers, Sequence, SequenceTable, blocks_for, ending_of, progress_of
from deepinfer.engine.waiting import Arrivals

if TYPE_CHECKING:
    from deepinfer.engine.cache_tiers import CacheTiers

PROMPT_ROWS = 512
"""Most rows of a request in a step when the logits of all are wanted: a row is as long as the vocabulary."""


class _NeedsTokens(Exception):
    """The next step cannot be chosen before the tokens of the one in flight are known."""


class Scheduler:
    """Continuous batching: the highest class first, first come, first served inside a class.

    A sequence gets the blocks of all tokens it has when it is admitted, one more whenever it has grown by a block, and
    window blocks for the rows of a step and the window before them.  Every running sequence computes at least one
    token a step; what the budget leaves goes to prefill chunks, of the highest class and the oldest first, then to new
    sequences.  When a pool runs dry, or a higher class waits for a place, the newest sequence of the lowest class gives
    everything back and is recomputed later; the oldest of the highest class always finds room, because the pools hold
    the longest sequence that is admitted.

    The gap between two tokens of a sequence that keeps its place is one step.  A step has at most
    `max_num_batched_tokens` rows; while any sequence decodes, at most one for each running sequence and
    `max_prefill_tokens_per_step` more.

    The order of calls is `schedule`, `advance` when the device has been given the step, `commit` when its tokens have
    come.  With `schedule_ahead` and `advance` in between, a second step is in flight.  The device runs steps in order,
    so what one no longer reads may be handed to the next; what a sequence held that ended is free only when no step in
    flight has a row of it.
    """

    def __init__(
        self, config: EngineConfig, window: int, table: SequenceTable, prefixes: PrefixCache | None = None
    ) -> None:
        self.blocks = BlockPool("blocks", config.blocks) if prefixes is None else prefixes.blocks
        self.windows = BlockPool("window blocks", config.window_blocks) if prefixes is None else prefixes.windows
        self._prefixes = prefixes
        self.tiers: CacheTiers | None = None
        self._table = table
        assert config.max_num_batched_tokens >= config.max_num_seqs, "each running sequence computes a token a step"
        assert config.blocks >= blocks_for(config.max_model_len), "the longest sequence fits into the pool alone"
        assert config.window_blocks >= min(config.window_width(window), 2), "so does its window"
        self._budget = config.max_num_batched_tokens
        self._longest = config.max_model_len
        # A step reads a sequence's drafts, and then as many rows again are scratch where the next ones are drawn.
        self._drafts_ahead = 2 * table.draft_tokens.shape[1]
        # A block of drafts sees the whole window before it, a row of the model also itself.
        self._kept = window + 1 if self._drafts_ahead else window
        self._most_prefill = config.max_prefill_tokens_per_step
        self._arrivals = Arrivals()
        self._waiting = self._arrivals.queue
        self._running: Integers = np.empty(0, dtype=np.int64)
        self._leaving: list[int] = []
        self._launched: deque[Plan] = deque()
        self._prompt_readers: set[int] = set()
        self._notices: list[Progress] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        owed = self._arrivals or self._notices or self._launched or self._leaving
        return bool(owed) or len(self._running) > 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; from any thread."""
        self._arrivals.submit(sequence)

    def abort(self, sequence_id: int) -> None:
        """End a sequence at the start of the next step; from any thread. One that has ended is left alone."""
        self._arrivals.submit(sequence_id)

    def schedule(self, now: float) -> Plan:
        """Choose what the next step computes, and reserve its blocks; `now` is the time of the engine's clock."""
        self._receive(now)
        table, rows = self._table, self._running
        starts = table.computed[rows]
        counts = table.lengths[rows] - starts
        growing = starts + self._drafts_ahead >= table.reach[rows]
        drafts = self._drafts_ahead and (growing | (table.draft_counts[rows] > 0)).any()
        if self._waiting or self._prompt_readers or drafts or counts.max(initial=1) > 1:
            return self._mixed()
        for row in rows[growing].tolist():
            if table.sequences[row] is not None:
                self._reserve(row, int(table.lengths[row]))
        if rows is not self._running:
            return self._mixed(admit=False)
        return Plan(rows, starts, counts, counts, counts == 1, decoding=True)

    def schedule_ahead(self, now: float) -> Plan | None:
        """Choose what comes behind the step in flight, without its tokens; None when it must wait for them.

        It waits for requests that need their newest token on the host, and where sequences would lose their place.
        """
        if self._prompt_readers or self._table.host_bound[self._running].any():
            return None
        try:
            plan = self.schedule(now)
        except _NeedsTokens:
            return None
        return plan if len(plan.rows) else None

    def advance(self, plan: Plan) -> None:
        """Move the books behind a step that the device was given; a sequence that draws its last token runs no more."""
        table = self._table
        drawn = plan.rows if plan.decoding else plan.rows[plan.samples]
        table.advance(plan.rows, plan.counts if plan.drafts is None else plan.counts - plan.drafts, drawn)
        self._launched.append(plan)
        if self._prefixes is not None:
            self._prefixes.passed(table, plan)
        full = table.lengths[drawn] >= table.limits[drawn]
        if full.any():
            self._running = self._running[~np.isin(self._running, drawn[full])]
            self._leaving += drawn[full].tolist()
        self._release_windows()

    def commit(self, plan: Plan, sampled: Sampled) -> list[Progress]:
        """Append the new tokens, free what is no longer needed, and return what each request gained."""
        table = self._table
        self._land(plan)
        drawn = plan.rows if plan.decoding else plan.rows[plan.samples]
        table.append(drawn, sampled.token_ids, sampled.counts)
        table.draft_counts[drawn] = -1
        if sampled.proposal is not None:
            table.propose(sampled.proposal.rows, sampled.proposal.draft_tokens, sampled.proposal.counts)
        progress, self._notices = self._notices, []
        for i in plan.prompt_rows:
            row = int(plan.rows[i])
            self._note_prompt_rows(row, int(plan.logit_counts[i]))
            if not (plan.samples[i] or table[row].finished):
                progress.append(Progress(table[row].id, prompt_logprobs=sampled.prompt_logprobs[row]))
        tokens, end = sampled.token_ids.tolist(), 0
        ended: list[int] = []
        for row, count in zip(drawn.tolist(), sampled.counts.tolist(), strict=True):
            sequence = table[row]
            start, end = end, end + count
            if sequence.finished:
                continue
            if row in sampled.lost:
                length = sequence.prompt_length + len(sequence.generated)
                progress.append(ending_of(sequence, "error", NOT_FINITE.format(length)))
                ended.append(row)
                continue
            gained = sequence.take(tokens[start:end])
            logprobs = sampled.logprobs.get(row) if sampled.logprobs else None
            prompt_logprobs = sampled.prompt_logprobs.get(row) if sampled.prompt_logprobs else None
            draft_step = sampled.draft_steps.get(row) if sampled.draft_steps else None
            progress.append(progress_of(sequence, gained, logprobs, prompt_logprobs, draft_step))
            if gained.reason is not None:
                ended.append(row)
        if self._prefixes is not None:
            self._prefixes.landed(table, plan, sampled)
        self._leave(ended)
        return progress

    def fail(self, plan: Plan, error: Exception) -> list[Progress]:
        """End every sequence of a step that raised `error`; the others go on."""
        self._land(plan)
        progress, self._notices = self._notices, []
        told = f"the step that computed this request failed: {type(error).__name__}: {error}"
        sequences = {row: self._table.sequences[row] for row in plan.rows.tolist()}
        alive = {row: sequence for row, sequence in sequences.items() if sequence is not None and not sequence.finished}
        progress += [ending_of(sequence, "error", told) for sequence in alive.values()]
        self._leave(list(alive))
        return progress

    def retract(self) -> None:
        """Forget all steps in flight: what they wrote is recomputed for every sequence that they ran."""
        self._launched.clear()
        table = self._table
        unheard = [row for row in self._leaving if not table[row].finished]
        self._running = np.array(sorted([*self._running.tolist(), *unheard], key=lambda row: table[row].id), np.int64)
        self._leaving = [row for row in self._leaving if table[row].finished]
        self._leave([])
        while len(self._running):
            self._preempt()

    def narrow(self) -> int:
        """Compute all again in steps of half as many rows, for which memory was missing; 0 = one row is the least."""
        if self._budget > 1:
            self._budget //= 2
            self.retract()
            return self._budget
        return 0

    def reset(self) -> list[Progress]:
        """End every request and begin with clean books, after an interrupt in the middle of a change."""
        told = "the engine was interrupted while it changed its books: send the request again"
        seated = [sequence for sequence in self._table.sequences if sequence is not None and not sequence.finished]
        left = [*seated, *self._arrivals.clear()]
        progress, self._notices = [*self._notices, *(ending_of(sequence, "abort", told) for sequence in left)], []
        self._prompt_readers.clear()
        self._launched.clear()
        self._leaving.clear()
        self._running = np.empty(0, dtype=np.int64)
        self._table.clear()
        self.blocks.clear()
        self.windows.clear()
        if self._prefixes is not None:
            self._prefixes.clear()
        return progress

    def check(self) -> None:
        """Re-add the books of both pools; raises AssertionError when they do not balance."""
        blocks, windows = self._table.held()
        if self._prefixes is not None:
            kept = self._prefixes.check(sequence for sequence in self._table.sequences if sequence is not None)
            blocks, windows = blocks + kept[0], windows + kept[1]
        self.blocks.check(blocks)
        self.windows.check(windows)

    def _receive(self, now: float) -> None:
        """Take in what came from other threads, and end who is aborted or out of time, also in flight."""
        told, gone = self._arrivals.receive(now, idle=not (self._notices or len(self._running)))
        self._notices += told
        for sequence_id, error in gone:
            for row, sequence in enumerate(self._table.sequences):
                if sequence is not None and sequence.id == sequence_id and not sequence.finished:
                    self._notices.append(ending_of(sequence, "abort", error))
                    self._leave([row])

    def _mixed(self, *, admit: bool = True) -> Plan:
        """The plan of a step in which not every sequence just decodes; who has just lost its place is not admitted."""
        urgent = self._make_room()
        rows, counts, spare = self._continue_running(urgent)
        if admit and self._waiting:
            rows, counts = self._admit(rows, counts, spare)
        table = self._table
        starts = table.computed[rows]
        samples = starts + counts == table.lengths[rows]
        logit_counts = samples.astype(np.int64)
        readers: list[int] = []
        if self._prompt_readers:
            readers = [i for i, row in enumerate(rows.tolist()) if row in self._prompt_readers]
        for i in readers:
            start, done = int(starts[i]), table[rows[i]].prompt_rows or 0
            logit_counts[i] = max(start + int(counts[i]) - max(start, done), 0)
        prompt_rows = tuple(i for i in readers if logit_counts[i])
        # What is cut here, and what was reserved, knows nothing of this step's drafts: else their law would change.
        drafts = np.where(samples, np.minimum(table.draft_counts[rows], table.reach[rows] - starts - 1), 0).clip(0)
        if drafts.any():
            return Plan(rows, starts, counts + drafts, logit_counts + drafts, samples, prompt_rows, False, drafts)
        decoding = not readers and bool((samples & (counts == 1)).all())
        return Plan(rows, starts, counts, logit_counts, samples, prompt_rows, decoding)

    def _make_room(self) -> int | None:
        """Take places from lower classes for the first of the waiting; return its class when it can be admitted."""
        if not self._waiting:
            return None
        first, table = self._waiting.first, self._table
        lower = self._running[table.priorities[self._running] < first.priority]
        within_reach = self.blocks.free + int(table.block_counts[lower].sum())
        if blocks_for(len(first.tokens)) <= within_reach:
            for _ in lower:
                if self._has_place(first):
                    break
                self._preempt()
        return first.priority if self._has_place(first) else None

    def _has_place(self, sequence: Sequence) -> bool:
        if not (self._table.free_rows and self.windows.free):
            return False
        need = blocks_for(len(sequence.tokens)) - self.blocks.free
        if need <= 0 or self._prefixes is None:
            return need <= 0
        return need <= self._prefixes.shared_by(sequence)

    def _continue_running(self, urgent: int | None) -> tuple[Integers, Integers, int]:
        """The running sequences with the tokens of each, blocks reserved, and what is left of the budget for others.

        While a request of class `urgent` can be admitted, prefill of lower classes gets one row, and it the rest.
        """
        table, rows = self._table, self._running
        starts = table.computed[rows]
        counts = table.lengths[rows] - starts
        spare = self._budget - len(rows) - int(table.draft_counts[rows].clip(0).sum())
        if (counts == 1).any():
            spare = min(spare, self._most_prefill)
        for i in self._by_class(np.flatnonzero(counts > 1)):
            row = int(rows[i])
            held_back = urgent is not None and table.priorities[row] < urgent
            more = 0 if held_back else min(int(counts[i]) - 1, spare, self._longest_chunk(row, int(starts[i])) - 1)
            counts[i] = 1 + more
            spare -= more
        ends = starts + counts
        for i in np.flatnonzero(ends + self._drafts_ahead > table.reach[rows]).tolist():
            row = int(rows[i])
            if table.sequences[row] is not None:
                counts[i] = self._reserve(row, int(ends[i])) - starts[i]
                self._reserve_ahead(row, int(ends[i]))
        if len(self._running) == len(rows):
            return rows, counts, spare
        # Who has just lost its place must not have it back in the same step.
        alive = np.array([table.sequences[row] is not None for row in rows.tolist()], dtype=np.bool_)
        return rows[alive], counts[alive], 0

    def _by_class(self, places: Integers) -> list[int]:
        """Places among the running sequences, the highest class first, inside a class in the order of admission."""
        classes = self._table.priorities[self._running[places]]
        order: list[int] = places[np.argsort(-classes, kind="stable")].tolist()
        return order

    def _longest_chunk(self, row: int, start: int) -> int:
        """Most tokens of a sequence in a step, whatever the budget."""
        longest = PROMPT_ROWS if row in self._prompt_readers else self._budget
        return longest if self._prefixes is None else self._prefixes.cut(self._table[row], start, longest)

    def _reserve(self, row: int, end: int) -> int:
        """Give `row` the blocks to compute up to `end`, or as far as there are window blocks; return that end.

        Takes blocks from the newest sequences of the lowest class; when `row` is that one itself, it is preempted.
        """
        table = self._table
        while (need := blocks_for(end) - int(table.block_counts[row])) > self.blocks.free:
            if self._preempt() == row:
                return end
        if need > 0:
            table.add_blocks(row, self.blocks.take(need))
        held = int(table.window_bases[row] + table.window_counts[row])
        while (room := (held + self.windows.free) * BLOCK_TOKENS) <= table.computed[row]:
            if self._preempt() == row:
                return end
        end = min(end, room)
        table.add_windows(row, self.windows.take(max(blocks_for(end) - held, 0)))
        return end

    def _reserve_ahead(self, row: int, end: int) -> None:
        """Give `row` blocks for drafts behind `end`, where there are any left; nobody is preempted for drafts."""
        table = self._table
        if not self._drafts_ahead or table.sequences[row] is None:
            return
        wanted = blocks_for(min(end + self._drafts_ahead, self._longest))
        need = max(wanted - int(table.block_counts[row]), 0)
        windows = max(wanted - int(table.window_bases[row] + table.window_counts[row]), 0)
        if need + windows > 0 and need <= self.blocks.free and windows <= self.windows.free:
            table.add_blocks(row, self.blocks.take(need))
            table.add_windows(row, self.windows.take(windows))

    def _admit(self, rows: Integers, counts: Integers, spare: int) -> tuple[Integers, Integers]:
        """Seat waiting sequences, in order, while there are budget, rows and blocks for the next one."""
        new: list[int] = []
        chunks: list[int] = []
        while self._waiting and spare > 0 and self._has_place(self._waiting.first):
            row = self._seat(self._waiting.first)
            if row is None:
                break
            start, length = int(self._table.computed[row]), int(self._table.lengths[row])
            held = int(self._table.window_bases[row] + self._table.window_counts[row])
            room = (held + self.windows.free) * BLOCK_TOKENS - start
            chunk = min(length - start, spare, self._longest_chunk(row, start), room)
            self._table.add_windows(row, self.windows.take(max(blocks_for(start + chunk) - held, 0)))
            self._reserve_ahead(row, start + chunk)
            new.append(row)
            chunks.append(chunk)
            spare -= chunk
        if not new:
            return rows, counts
        self._running = np.array([*self._running.tolist(), *new], dtype=np.int64)
        return np.array([*rows.tolist(), *new], dtype=np.int64), np.array([*counts.tolist(), *chunks], dtype=np.int64)

    def _seat(self, sequence: Sequence) -> int | None:
        """Give the first of the waiting a row and blocks, found or new; None = no room, or they are on their way."""
        if self.tiers is not None and not self.tiers.fetch(sequence):
            return None
        hit = NOTHING if self._prefixes is None else self._prefixes.find(sequence)
        need = blocks_for(len(sequence.tokens)) - len(hit.blocks)
        if self._prefixes is not None and (need > self.blocks.free or not self.windows.free):
            self._prefixes.give_back(hit)
            return None
        self._waiting.remove(sequence.id)
        row = self._table.seat(sequence)
        self._table.resume(row, hit)
        self._table.add_blocks(row, self.blocks.take(need))
        if self._prefixes is not None:
            self._prefixes.adopt(self._table, row, hit)
        if sequence.wants_prompt_rows:
            self._prompt_readers.add(row)
        return row

    def _preempt(self) -> int:
        """Take everything from the newest sequence of the lowest class and queue it first in its class.

        It is recomputed later, with what it has generated.  Raises `_NeedsTokens` while a step is in flight.
        """
        if self._launched:
            raise _NeedsTokens
        classes = self._table.priorities[self._running]
        row = int(self._running[np.flatnonzero(classes == classes.min())[-1]])
        sequence = self._table[row]
        prompt = sequence.tokens[: sequence.prompt_length]
        sequence.tokens = np.concatenate([prompt, np.array(sequence.generated, dtype=np.int64)])
        self._running = self._running[self._running != row]
        self._release(row)
        self._waiting.push_first(sequence)
        return row

    def _land(self, plan: Plan) -> None:
        """Note that a step is no longer in flight, if it ever was."""
        if self._launched and self._launched[0] is plan:
            self._launched.popleft()

    def _leave(self, ended: list[int]) -> None:
        """Let sequences go whose end was told; what they and earlier ones held is free once no step has a row of it."""
        for row in ended:
            self._table[row].finished = True
            self._prompt_readers.discard(row)
            if row not in self._leaving:
                self._leaving.append(row)
        if not self._leaving:
            return
        self._running = self._running[~np.isin(self._running, self._leaving)]
        for row in list(self._leaving):
            if self._table[row].finished and not any((plan.rows == row).any() for plan in self._launched):
                self._leaving.remove(row)
                self._release(row)

    def _release(self, row: int) -> None:
        """Free the row and its blocks."""
        table = self._table
        if self._prefixes is not None:
            self._prefixes.leave(table[row])
        # From the end on, so that what is cached of a text is lost from its end on.
        self.blocks.give(reversed(table.drop_blocks(row)))
        self.windows.give(table.drop_windows(row, int(table.window_bases[row] + table.window_counts[row])))
        table.unseat(row)
        self._prompt_readers.discard(row)

    def _release_windows(self) -> None:
        """Free window blocks that lie wholly before the window of each sequence's next row."""
        table, rows = self._table, self._running
        bases = np.maximum(table.computed[rows] - self._kept + 1, 0) // BLOCK_TOKENS
        for i in np.flatnonzero(bases > table.window_bases[rows]).tolist():
            self.windows.give(table.drop_windows(int(rows[i]), int(bases[i])))

    def _note_prompt_rows(self, row: int, count: int) -> None:
        sequence = self._table[row]
        sequence.prompt_rows = (sequence.prompt_rows or 0) + count
        if not sequence.wants_prompt_rows:
            self._prompt_readers.discard(row)
