"""Per-sequence state: `Sequence` (one request under way) and `SequenceTable` (numpy columns, a row a running sequence).

Both belong to the `Scheduler`, which alone changes them; the builder and the sampler read columns.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.constraint import Matching
from deepinfer.engine.detokenizer import TextStream
from deepinfer.engine.draft_report import DraftStep
from deepinfer.engine.request import CacheUse, FinishReason, Logprobs, Progress, Request
from deepinfer.engine.token_rules import TokenRules

if TYPE_CHECKING:
    from deepinfer.engine.block_pool import Hit, Trail

Integers = NDArray[np.int64]

NO_LOGPROBS = -2

NO_TOKEN_LEFT = (
    "no token is left that the constraint allows and the other parameters do not ban: loosen it, or take away from "
    "bad_words and logit_bias"
)


class Gained(NamedTuple):
    """What a step added to a request: its tokens, the text that is now certain, why and on what the request ends.

    `error` says more where the reason is "error".
    """

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request under way.

    seed           of its noise, resolved
    tokens         ids to compute: the prompt, and after a preemption what was generated before it
    decoder_start  first position that runs the decoder half: fixed at admission, kept through recomputation
    limit          how many tokens it generates at most
    stop_ids       tokens that end it
    text           None where there is no tokenizer
    prompt_rows    prompt positions whose log-probabilities were handed out; None = none are wanted
    deadline       when it must have ended, in seconds of the engine's clock; None = whenever
    finished       whether its end was told; a step in flight may still hold a row of it, which is dropped
    matching       where it stands in what it must match; None where it need not
    rules          what its parameters do to logits, from its own tokens; None where they do nothing
    trail          where it stands in the prefix cache; None until it is looked up there
    """

    id: int
    request: Request
    seed: int
    tokens: Integers
    decoder_start: int
    limit: int
    stop_ids: frozenset[int]
    text: TextStream | None
    prompt_rows: int | None
    deadline: float | None = None
    rules: TokenRules | None = None
    matching: Matching | None = None
    generated: list[int] = field(default_factory=list)
    finished: bool = False
    trail: "Trail | None" = None

    @property
    def priority(self) -> int:
        """Its class."""
        return self.request.priority

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether prompt positions are left whose log-probabilities are wanted."""
        return self.prompt_rows is not None and self.prompt_rows < self.prompt_length

    @property
    def cache_use(self) -> CacheUse | None:
        """What the prefix cache did for the prompt; None before it ran."""
        return None if self.trail is None else self.trail.use

    def ids(self, start: int, stop: int) -> Integers:
        """Tokens start .. stop - 1, of the prompt and of what was generated."""
        known = len(self.tokens)
        if stop <= known:
            return self.tokens[start:stop]
        more = self.generated[max(start, known) - self.prompt_length : stop - self.prompt_length]
        return np.concatenate([self.tokens[start:], np.array(more, dtype=np.int64)])

    @property
    def resume_limit(self) -> int:
        """The last position at which it may go on: every row whose log-probabilities are wanted must run."""
        return (self.prompt_rows or 0) if self.wants_prompt_rows else len(self.tokens) - 1

    def take(self, tokens: list[int]) -> "Gained":
        """Append generated tokens up to the one that ends the request; what lies behind that one is dropped."""
        texts: list[str] = []
        for place, token in enumerate(tokens):
            text, reason, stop = self._take_one(token)
            texts.append(text)
            if reason is not None:
                error = NO_TOKEN_LEFT if reason == "error" else None
                return Gained(tuple(tokens[: place + 1]), "".join(texts), reason, stop, error)
        return Gained(tuple(tokens), "".join(texts))

    def _take_one(self, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Append a token; return the text that is now certain, and why and on what the request ends."""
        self.generated.append(token)
        if token in self.stop_ids:
            return self._rest(), "stop", token
        if self.matching is not None and not self.matching.accept(token):
            return self._rest(), "error", None
        text = ""
        if self.text is not None:
            text = self.text.push(token, may_stop=len(self.generated) > self.request.params.min_tokens)
            if self.text.stop is not None:
                return text, "stop", self.text.stop
        if len(self.generated) < self.limit:
            return text, None, None
        text += self._rest()
        stop = None if self.text is None else self.text.stop
        return text, "length" if stop is None else "stop", stop

    def _rest(self) -> str:
        return "" if self.text is None else self.text.close()


def progress_of(
    sequence: Sequence,
    gained: Gained,
    logprobs: Logprobs | None,
    prompt_logprobs: Logprobs | None,
    draft_step: DraftStep | None,
) -> Progress:
    """Tell what a request gained, with log-probabilities of the tokens that it kept."""
    if logprobs is not None:
        logprobs = logprobs[: len(gained.tokens)]
    ending = gained.text, gained.reason, gained.stop, gained.error
    cache = None if gained.reason is None else sequence.cache_use
    return Progress(sequence.id, gained.tokens, *ending, logprobs, prompt_logprobs, draft_step, cache)


def ending_of(sequence: Sequence, reason: FinishReason, error: str | None = None) -> Progress:
    """Tell that a request ends before its time, with the rest of its text."""
    text = "" if sequence.text is None else sequence.text.close()
    return Progress(sequence.id, text=text, finish_reason=reason, error=error, cache=sequence.cache_use)


class SequenceTable:
    """Columns of the running sequences; a sequence's row is also its row in per-sequence cache memory.

    lengths, computed    tokens there are, and tokens whose cache is written, both as of the last step that was launched
    recent [S, 1 + n]    the last tokens that the host knows, newest first, as many as n-grams need; -1 before the start
    limits               length at which the sequence ends
    priorities           its class
    host_bound           bool: the host must know its newest token before the next step is launched
    blocks [S, B]        block of tokens 128 b .. 128 b + 127 of entries and index keys; -1 = none
    block_counts         how many of them it holds
    windows [S, W]       window blocks, from the block number in `window_bases` on; -1 = none
    window_counts        how many of them it holds
    reach                tokens up to which it holds blocks of both kinds
    decoder_starts       first position that runs the decoder half
    draft_tokens [S, W]  what a drafter proposes to lay behind its last token
    draft_counts         how many of them are to be verified; -1 = nothing was proposed
    written              entries before this position were found and are not written again
    window_starts        first position whose window KV its rows see
    temperature, top_p, top_k, min_p, seeds   its sampling parameters
    version              changes whenever any sequence gains or loses a block
    logprobs             wanted with each generated token: n, -1 = whole rows, NO_LOGPROBS = none
    processed            whether these are of the distribution that was drawn from, not of the model
    """

    def __init__(self, rows: int, *, history: int, blocks: int, windows: int, drafts: int = 0) -> None:
        def integers(*shape: int) -> Integers:
            return np.full(shape, -1, dtype=np.int64)

        self.sequences: list[Sequence | None] = [None] * rows
        self.lengths, self.computed, self.decoder_starts = integers(rows), integers(rows), integers(rows)
        self.written, self.window_starts = integers(rows), integers(rows)
        self.recent = integers(rows, 1 + history)
        self.limits, self.priorities = integers(rows), integers(rows)
        self.host_bound = np.zeros(rows, dtype=np.bool_)
        self.blocks, self.block_counts = integers(rows, blocks), integers(rows)
        self.windows, self.window_counts, self.window_bases = integers(rows, windows), integers(rows), integers(rows)
        self.reach = integers(rows)
        self.draft_tokens, self.draft_counts = integers(rows, drafts), integers(rows)
        self.version = 0
        self.top_k, self.seeds, self.logprobs = integers(rows), integers(rows), integers(rows)
        self.temperature, self.top_p, self.min_p = np.zeros((3, rows), dtype=np.float64)
        self.processed = np.zeros(rows, dtype=np.bool_)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def free_rows(self) -> int:
        """How many more sequences may run."""
        return len(self._free_rows)

    def __getitem__(self, row: int) -> Sequence:
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def seat(self, sequence: Sequence) -> int:
        """Give `sequence` a row, nothing of it computed, no block held; return the row."""
        row = self._free_rows.pop()
        self.sequences[row] = sequence
        newest = sequence.tokens[: -1 - self.recent.shape[1] : -1]
        self.recent[row] = -1
        self.recent[row, : len(newest)] = newest
        self.lengths[row], self.computed[row] = len(sequence.tokens), 0
        self.limits[row], self.priorities[row] = sequence.prompt_length + sequence.limit, sequence.priority
        self.decoder_starts[row], self.draft_counts[row] = sequence.decoder_start, -1
        self.written[row] = self.window_starts[row] = 0
        self.block_counts[row] = self.window_counts[row] = self.window_bases[row] = self.reach[row] = 0
        params = sequence.request.params
        self.temperature[row], self.top_p[row], self.min_p[row] = params.temperature, params.top_p, params.min_p
        self.top_k[row], self.seeds[row] = max(params.top_k, 0), sequence.seed
        self.logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.processed[row] = params.logprobs_mode == "processed"
        self.host_bound[row] = sequence.rules is not None or sequence.matching is not None
        return row

    def resume(self, row: int, hit: "Hit") -> None:
        """Note what a seated sequence shares with earlier ones, before it gets blocks of its own."""
        self.computed[row], self.written[row] = hit.start, hit.written
        self.window_starts[row], self.window_bases[row] = hit.window_start, hit.window_base
        if hit.blocks:
            self.add_blocks(row, list(hit.blocks))
        self.add_windows(row, list(hit.windows))

    def unseat(self, row: int) -> None:
        """Free the row; its blocks have been given back."""
        self.sequences[row] = None
        self._free_rows.append(row)

    def clear(self) -> None:
        """Free every row, whatever it held."""
        self.sequences = [None] * len(self.sequences)
        self._free_rows = list(range(len(self.sequences) - 1, -1, -1))

    def advance(self, plan_rows: Integers, counts: Integers, drawn: Integers) -> None:
        """Count `counts` more computed tokens of `plan_rows`, and one more of each that draws one."""
        self.computed[plan_rows] += counts
        self.lengths[drawn] += 1

    def append(self, rows: Integers, tokens: Integers, counts: Integers) -> None:
        """Note `counts` [R] tokens, at least one, of each of `rows`; `tokens` lie flat, one row behind the other.

        `advance` has counted the first of each; those behind it are accepted drafts, whose cache is written too.
        """
        if len(tokens) == len(rows):
            self.recent[rows, 1:] = self.recent[rows, :-1]
            self.recent[rows, 0] = tokens
            return
        # The newest come first: those that were added, from the last one back, then those that were known before.
        back = np.arange(self.recent.shape[1])
        added = (counts.cumsum() - 1)[:, None] - back
        known = np.take_along_axis(self.recent[rows], np.maximum(back - counts[:, None], 0), 1)
        self.recent[rows] = np.where(back < counts[:, None], tokens[np.maximum(added, 0)], known)
        self.lengths[rows] += counts - 1
        self.computed[rows] += counts - 1

    def propose(self, rows: Integers, draft_tokens: Integers, counts: Integers) -> None:
        """Note draft tokens [R, W] behind the last tokens of `rows`, of which the first `counts` are to be verified."""
        self.draft_tokens[rows] = draft_tokens
        self.draft_counts[rows] = counts

    def add_blocks(self, row: int, taken: list[int]) -> None:
        """Note blocks of entries behind those that the sequence holds."""
        count = self.block_counts[row]
        self.blocks[row, count : count + len(taken)] = taken
        self.block_counts[row] = count + len(taken)
        self._note_reach(row)

    def drop_blocks(self, row: int) -> list[int]:
        """Return all blocks of entries, and forget them."""
        dropped: list[int] = self.blocks[row, : self.block_counts[row]].tolist()
        self.blocks[row] = -1
        self.block_counts[row] = 0
        return dropped

    def add_windows(self, row: int, taken: list[int]) -> None:
        """Note window blocks behind those that the sequence holds."""
        count = self.window_counts[row]
        self.windows[row, count : count + len(taken)] = taken
        self.window_counts[row] = count + len(taken)
        self._note_reach(row)

    def drop_windows(self, row: int, base: int) -> list[int]:
        """Return the window blocks before block number `base`, and forget them."""
        gone = min(base - self.window_bases[row], self.window_counts[row])
        dropped: list[int] = self.windows[row, :gone].tolist()
        self.windows[row, : self.windows.shape[1] - gone] = self.windows[row, gone:]
        self.windows[row, self.windows.shape[1] - gone :] = -1
        self.window_counts[row] -= gone
        self.window_bases[row] = base
        self._note_reach(row)
        return dropped

    def _note_reach(self, row: int) -> None:
        self.version += 1
        windows = self.window_bases[row] + self.window_counts[row]
        self.reach[row] = min(self.block_counts[row], windows) * BLOCK_TOKENS

    def held(self) -> tuple[list[int], list[int]]:
        """All blocks of entries, and all window blocks, that running sequences hold: for checking the books."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence is not None]
        blocks = chain.from_iterable(self.blocks[row, : self.block_counts[row]].tolist() for row in rows)
        windows = chain.from_iterable(self.windows[row, : self.window_counts[row]].tolist() for row in rows)
        return list(blocks), list(windows)


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)
