"""A model whose every number can be worked out by hand: it proves that a batch leads each row to its own past.

`CheckingModel` keeps fingerprints of tokens where a real model keeps vectors, in the cache's own memory: in window
blocks of both halves of the stack, in entry blocks of each ratio, in the compressors' tails.  A row's logits hash
everything that the row may read, so one wrong slot, table, position or decoder start changes the tokens, and so does
memory that was moved, shared, kept or read back wrongly.  `expected` computes the same from the tokens alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import settings
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, tail_ring, tail_tokens
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Completion, Progress, Request, SamplingParams
from deepinfer.engine.speculation import Drafting
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.read_config import parse_config
from deepinfer.model.tiny import tiny_config

torch.set_num_threads(1)  # sums this small cost more to share than to do

Hashes = NDArray[np.uint64]

PRECISION = Precision(torch.float32, round_inputs=False, cache="model")
EXAMPLES = settings().max_examples
"""What the hypothesis profile asks for: a test whose example is a whole run takes a share of it."""
EMPTY = -7
"""Stands for a token before the first one."""


WEIGHTS = np.random.default_rng(0).integers(1, 2**64, 128, dtype=np.uint64, endpoint=False) | np.uint64(1)
"""Of the places in a group: two groups with one sum are the same group."""


def small_config(family: str = "deepseek_v41", *, vocab_size: int = 40, window: int | None = None) -> ModelConfig:
    """The tiny model's configuration with a small vocabulary."""
    config = parse_config(tiny_config(family))  # type: ignore[arg-type]
    window = config.window if window is None else window
    return replace(config, vocab_size=vocab_size, window=window, eos_token_ids=(1,), image_token_id=2)


def small_ops() -> Ops:
    return CpuAccelerator().ops(PRECISION)


def engine_config(**changes: object) -> EngineConfig:
    """Sizes that leave room for everything, with `changes`."""
    config = EngineConfig(
        precision=PRECISION,
        decoder_replay=None,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_prefill_tokens_per_step=512,
        overlap=False,
        blocks=32,
        window_blocks=32,
        seed=0,
        prefix_cache="exact",
        snapshots=8,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def checked_engine(config: EngineConfig, model: ModelConfig, drafting: Drafting | None = None) -> Engine:
    return Engine(config, model, CheckingModel(model), small_ops(), CpuAccelerator(), None, drafting=drafting)


def fingerprint(parts: Sequence[NDArray[np.integer] | int]) -> Hashes:
    """Mix integers, element by element, into 64 bits."""
    value = np.uint64(0xCBF29CE484222325)
    with np.errstate(over="ignore"):
        for part in parts:
            value = (value ^ np.asarray(part).astype(np.uint64)) * np.uint64(0x100000001B3)
            value = value ^ (value >> np.uint64(29))
    return np.asarray(value)


def logits_of(values: Hashes, vocab_size: int) -> NDArray[np.float32]:
    """Rows of numbers from -4 to 4, each depending on all bits of its value."""
    bits = fingerprint([values[:, None], np.arange(vocab_size)]) >> np.uint64(40)
    return (bits.astype(np.float64) / 2**24 * 8 - 4).astype(np.float32)


def expected(model: ModelConfig, tokens: Sequence[int], row: int, decoder_start: int) -> NDArray[np.float32]:
    """The logits that `CheckingModel` must give for position `row` of a lone sequence."""
    ids, positions = np.asarray(tokens)[: row + 1], np.arange(row + 1)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        seen = [_window_sums(ids, model.window, half, first) for half, first in enumerate((0, decoder_start))]
        total += seen[0][row] + seen[1][row]
        for ratio in model.ratios:
            ends = positions[ratio - 1 :: ratio]
            known = ends[:, None] - np.arange(tail_tokens(ratio))[::-1]
            members = np.where(known >= 0, ids[known], EMPTY)
            total += _entries(ratio, ends, members, seen[0][ends]).sum()
        before = [int(ids[row - back]) if row >= back else -1 for back in range(1, model.history + 1)]
        total += fingerprint([300, row, *before])
    return logits_of(np.array([total]), model.vocab_size)[0]


def _window_sums(ids: NDArray[np.int64], window: int, half: int, first: int) -> Hashes:
    """What each row sees of the window keys of one half, which begins at `first`."""
    positions = np.arange(len(ids))
    reach = np.minimum(positions + 1 - first, window)
    keys = np.where(reach > 0, _keys(half, positions, ids, reach), np.uint64(0))
    sums = np.concatenate([np.zeros(1, np.uint64), keys.cumsum()])
    return np.asarray(sums[1:] - sums[np.maximum(positions + 1 - window, 0)])


def _keys(half: int, positions: NDArray[np.int64], ids: NDArray[np.int64], reach: NDArray[np.int64]) -> Hashes:
    """Window keys, which depend on how many keys their own row saw."""
    return fingerprint([100 + half, positions, ids, reach])


def _entries(ratio: int, ends: NDArray[np.int64], members: NDArray[np.int64], seen: Hashes) -> Hashes:
    """Entries of groups that end at `ends`, which depend on the tokens of the group and on what its last row saw."""
    with np.errstate(over="ignore"):
        mixed = (members.astype(np.uint64) * WEIGHTS[: members.shape[1]]).sum(1)
    return fingerprint([200 + ratio, ends // ratio, mixed, seen])


class _Memory:
    """Where fingerprints lie in the cache: window keys of both halves, entries and remembered tokens by ratio.

    64-bit fingerprints take the first eight bytes of a record of the first layer that owns it (of the last layer, for
    the decoder half).  A tail holds each token and its position, counted from one, as numbers.
    """

    def __init__(self, model: ModelConfig, cache: KVCache) -> None:
        owners = {layer.ratio: layer.index for layer in reversed(model.layers) if layer.owns_kv}
        halves = [cache.layer(index).window.data for index in (0, model.layers[-1].index)]
        self.windows = [_records(data) for data in halves]
        entries = {ratio: cache.layer(index).entries for ratio, index in owners.items()}
        self.entries = {ratio: _records(view.data) for ratio, view in entries.items() if view is not None}
        tails = {ratio: cache.layer(index).tail for ratio, index in owners.items()}
        self.tails = {
            ratio: (view.scores.numpy()[:, :, 0], view.values.numpy()[:, :, 0])
            for ratio, view in tails.items()
            if view is not None
        }


def _records(data: Tensor) -> Hashes:
    return np.asarray(data.numpy().view(np.uint64)[:, 0])


class CheckingModel:
    """Checks every index of a batch and returns logits as `expected` defines them."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._cache: KVCache | None = None

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        if cache is not self._cache:
            self._cache, self._memory = cache, _Memory(self._model, cache)
        self._check_shape(batch, cache)
        total = np.zeros(len(batch.token_ids), dtype=np.uint64)
        with np.errstate(over="ignore"):
            total += fingerprint([300, batch.positions.numpy(), *batch.history.numpy().T])
            seen = self._window(batch, half=0, first=np.zeros(len(total), dtype=np.int64))
            total += seen
            total += self._groups(batch, seen)
            if batch.decoder_rows is not None:
                total = total[batch.decoder_rows.numpy()]
                batch = batch.narrow()
            starts = batch.decoder_starts[batch.sequences].numpy()
            assert (batch.positions.numpy() >= starts).all(), "a row before its sequence's decoder start"
            total += self._window(batch, half=1, first=starts)
        logits = logits_of(total[batch.logit_rows.numpy()], self._model.vocab_size)
        return ModelOutput(torch.from_numpy(logits), None)

    def _check_shape(self, batch: Batch, cache: KVCache) -> None:
        """Every number of the batch agrees with every other."""
        rows, sequences = len(batch.token_ids), len(batch.query_lens)
        counts, ends, states = batch.query_lens.numpy(), batch.context_lens.numpy(), batch.states.numpy()
        starts = counts.cumsum() - counts
        assert counts.sum() == rows
        assert (counts > 0).all()
        assert (batch.query_starts.numpy() == starts).all()
        assert (batch.sequences.numpy() == np.repeat(np.arange(sequences), counts)).all()
        assert batch.history.shape == (rows, self._model.history)
        assert len(set(states.tolist())) == sequences
        assert ((states >= 0) & (states < cache.states)).all()
        assert batch.max_context >= ends.max(initial=0)
        assert (batch.positions.numpy() == np.arange(rows) + np.repeat(ends - counts - starts, counts)).all()
        limits = {"blocks": (batch.block_tables, cache.blocks), "windows": (batch.window_tables, cache.window_blocks)}
        for name, (table, limit) in limits.items():
            lines = np.sort(table.numpy(), axis=1)
            assert ((lines[:, 1:] > lines[:, :-1]) | (lines[:, :-1] < 0)).all(), f"{name}: twice"
            assert (lines < limit).all(), f"{name}: no such block"

    def _groups(self, batch: Batch, seen: Hashes) -> Hashes:
        """Write the entries that the step completes, then hash all that each row sees."""
        positions = batch.positions.numpy()
        tables = batch.block_tables.numpy()[batch.sequences.numpy()]
        total = np.zeros(len(positions), dtype=np.uint64)
        assert set(batch.groups) == set(self._model.ratios)
        for ratio, groups in batch.groups.items():
            rows, slots, memory = groups.rows.numpy(), groups.slots.numpy(), self._memory.entries[ratio]
            completes = (positions + 1) % ratio == 0
            assert completes[rows].all(), "an entry of a group that is not complete"
            assert len(set(slots.tolist())) == len(slots), "an entry of two rows"
            each, own = BLOCK_TOKENS // ratio, np.zeros_like(completes)
            own[rows] = True
            # What a row need not write is what it would have written, but for a bounded replay.
            ends = np.flatnonzero(completes & (own | ~self._cut_short(batch)))
            values = _entries(ratio, positions[ends], self._members(batch, ratio, ends), seen[ends])
            memory[slots] = values[own[ends]]
            places = positions[ends] // ratio
            found = memory[tables[ends, places // each] * each + places % each]
            assert (found == values).all(), "a shared entry differs"
            self._remember(batch, ratio)
            entries = np.arange(batch.max_context // ratio)
            visible = entries < ((positions + 1) // ratio)[:, None]
            blocks = tables[:, entries // each]
            assert (blocks >= 0)[visible].all(), "an entry without a block"
            total += np.where(visible, memory[blocks * each + entries % each], np.uint64(0)).sum(1)
        return total

    def _members(self, batch: Batch, ratio: int, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that the entries of rows `ends` are made of: of this step, or what earlier ones left in the tail."""
        sequences, states = batch.sequences.numpy()[ends], batch.states.numpy()
        first = (batch.context_lens - batch.query_lens).numpy()[sequences][:, None]
        known = batch.positions.numpy()[ends][:, None] - np.arange(tail_tokens(ratio))[::-1]
        places = batch.query_starts.numpy()[sequences][:, None] + known - first
        here = batch.token_ids.numpy()[np.clip(places, 0, len(batch.token_ids) - 1)]
        if ratio == 1:
            return here
        ring, earlier = tail_ring(ratio), (known >= 0) & (known < first)
        tokens, stored = (part[states[sequences][:, None], known % ring] for part in self._memory.tails[ratio])
        assert (stored == known + 1)[earlier].all(), "the compressor has lost a token of its group"
        return np.where(known < 0, EMPTY, np.where(earlier, tokens.astype(np.int64), here))

    def _remember(self, batch: Batch, ratio: int) -> None:
        """Leave the step's last tokens to the next one."""
        if ratio == 1:
            return
        sequences, positions, ring = batch.sequences.numpy(), batch.positions.numpy(), tail_ring(ratio)
        rows = np.flatnonzero(positions >= batch.context_lens.numpy()[sequences] - ring)
        tokens, stored = self._memory.tails[ratio]
        places = batch.states.numpy()[sequences[rows]], positions[rows] % ring
        tokens[places], stored[places] = batch.token_ids.numpy()[rows], positions[rows] + 1

    def _cut_short(self, batch: Batch) -> NDArray[np.bool_]:
        """Rows of a bounded replay, whose window begins behind the sequence's first token."""
        if batch.window_starts is None:
            return np.zeros(len(batch.positions), dtype=np.bool_)
        return np.asarray((batch.window_starts[batch.sequences] > 0).numpy())

    def _window(self, batch: Batch, *, half: int, first: NDArray[np.int64]) -> Hashes:
        """Write each row's window key, then hash those that it sees."""
        tables = batch.window_tables.numpy()[batch.sequences.numpy()]
        bases, positions = batch.window_bases.numpy()[batch.sequences.numpy()], batch.positions.numpy()
        memory = self._memory.windows[half]
        if batch.window_starts is not None:
            first = np.maximum(first, batch.window_starts.numpy()[batch.sequences.numpy()])
        keys = positions[:, None] + np.arange(1 - self._model.window, 1)
        visible = keys >= first[:, None]
        places = keys // BLOCK_TOKENS - bases[:, None]
        assert ((places >= 0) & (places < tables.shape[1]))[visible].all(), "a window key outside the table"
        blocks = np.take_along_axis(tables, np.clip(places, 0, tables.shape[1] - 1), 1)
        assert (blocks >= 0)[visible].all(), "a window key without a block"
        slots = blocks * BLOCK_TOKENS + keys % BLOCK_TOKENS
        assert len(set(slots[:, -1].tolist())) == len(slots), "a window key of two rows"
        memory[slots[:, -1]] = _keys(half, positions, batch.token_ids.numpy(), visible.sum(1))
        return np.asarray(np.where(visible, memory[slots], np.uint64(0)).sum(1))


def lone_run(model: ModelConfig, config: EngineConfig, request: Request) -> Completion:
    """What a request must become, worked out without an engine."""
    tokens, params, ops = list(request.prompt_token_ids), request.params, small_ops()
    replay = config.replay_of(params)
    start = 0 if replay is None else max(0, len(tokens) - replay)
    limit = config.max_model_len - len(tokens) if params.max_tokens is None else params.max_tokens
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else model.eos_token_ids)}
    generated: list[int] = []
    reason = "length"
    while len(generated) < limit:
        row = torch.from_numpy(expected(model, tokens, len(tokens) - 1, start)).unsqueeze(0)
        assert params.temperature == 0
        generated.append(int(ops.greedy(row)))
        tokens.append(generated[-1])
        if generated[-1] in stops:
            reason = "stop"
            break
    rows = None
    if params.prompt_logprobs is not None:
        count = len(request.prompt_token_ids)
        logits = [expected(model, tokens[:count], row, start) for row in range(count)]
        rows = ops.log_probs(torch.from_numpy(np.stack(logits)))
    return Completion(
        tuple(request.prompt_token_ids),
        tuple(generated),
        "",
        reason,
        prompt_logprobs=rows,  # type: ignore[arg-type]
    )


def drain(engine: Engine, *, steps: int = 10_000) -> dict[int, list[Progress]]:
    """Step until nothing is left, with the books checked after every step; progress by request id."""
    gained: dict[int, list[Progress]] = {}
    for _ in range(steps):
        if not engine.has_work:
            return gained
        for progress in engine.step():
            gained.setdefault(progress.request_id, []).append(progress)
        engine.scheduler.check()
    raise AssertionError(f"work is left after {steps} steps")


def tokens_of(progress: Sequence[Progress]) -> tuple[int, ...]:
    return tuple(token for part in progress for token in part.token_ids)


def greedy(**changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, **changes)  # type: ignore[arg-type]
