"""A model whose every number can be worked out by hand: it proves that a batch leads each row to its own past.

`CheckingModel` keeps fingerprints of tokens where a real model keeps vectors: in window blocks (one memory for each
half of the stack), in entry blocks of each ratio, in per-sequence state.  A row's logits hash everything that the row
may read, so one wrong slot, table, position or decoder start changes the tokens.  `expected` computes the same from
the tokens alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import settings
from numpy.typing import NDArray

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch
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
REMEMBERED = 1200
EXAMPLES = settings().max_examples
"""What the hypothesis profile asks for: a test whose example is a whole run takes a share of it."""
EMPTY = -7


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
    ids = np.asarray(tokens)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for half, first in enumerate((0, decoder_start)):
            keys = np.arange(max(first, row - model.window + 1, 0), row + 1)
            total += fingerprint([100 + half, keys, ids[keys]]).sum()
        for ratio in model.ratios:
            groups = ids[: (row + 1) // ratio * ratio].reshape(-1, ratio)
            total += fingerprint([200 + ratio, np.arange(len(groups)), *groups.T]).sum()
        before = [int(ids[row - back]) if row >= back else -1 for back in range(1, model.history + 1)]
        total += fingerprint([300, row, *before])
    return logits_of(np.array([total]), model.vocab_size)[0]


class CheckingModel:
    """Checks every index of a batch and returns logits as `expected` defines them."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._windows: list[NDArray[np.uint64]] = []
        self._entries: dict[int, NDArray[np.uint64]] = {}
        self._ring = np.empty(0)

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        if not self._windows:
            slots = cache.window_blocks * BLOCK_TOKENS
            self._windows = [np.zeros(slots, dtype=np.uint64) for _ in range(2)]
            sizes = {ratio: cache.blocks * (BLOCK_TOKENS // ratio) for ratio in self._model.ratios}
            self._entries = {ratio: np.zeros(size, dtype=np.uint64) for ratio, size in sizes.items()}
            self._ring = np.full((cache.states, REMEMBERED, 2), EMPTY)
        self._check_shape(batch, cache)
        total = np.zeros(len(batch.token_ids), dtype=np.uint64)
        with np.errstate(over="ignore"):
            total += self._histories(batch)
            total += self._groups(batch)
            total += self._window(batch, half=0, first=np.zeros(len(total), dtype=np.int64))
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
        assert batch.query_lens.sum() == rows
        assert (batch.query_lens > 0).all()
        assert batch.query_starts.tolist() == (batch.query_lens.cumsum(0) - batch.query_lens).tolist()
        assert batch.sequences.tolist() == torch.arange(sequences).repeat_interleave(batch.query_lens).tolist()
        assert batch.history.shape == (rows, self._model.history)
        assert len(set(batch.states.tolist())) == sequences
        assert all(0 <= state < cache.states for state in batch.states.tolist())
        assert batch.max_context >= batch.context_lens.max() if sequences else True
        within = torch.arange(rows) - batch.query_starts[batch.sequences]
        first = batch.context_lens - batch.query_lens
        assert batch.positions.tolist() == (first[batch.sequences] + within).tolist()
        for name, table in (("blocks", batch.block_tables), ("windows", batch.window_tables)):
            held = table[table >= 0].tolist()
            assert all(len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in table), f"{name}: twice"
            limit = cache.blocks if name == "blocks" else cache.window_blocks
            assert all(block < limit for block in held), f"{name}: no such block"

    def _histories(self, batch: Batch) -> Hashes:
        """Remember the rows in their sequence's state; hash the earlier ids that each was given."""
        states, positions = batch.states[batch.sequences].numpy(), batch.positions.numpy()
        self._ring[states, positions] = np.stack([positions, batch.token_ids.numpy()], 1)
        return fingerprint([300, positions, *batch.history.numpy().T])

    def _groups(self, batch: Batch) -> Hashes:
        """Write the entries that the step completes, then hash all that each row sees."""
        states, positions = batch.states[batch.sequences].numpy(), batch.positions.numpy()
        tables = batch.block_tables.numpy()[batch.sequences.numpy()]
        seen = np.zeros(len(positions), dtype=np.uint64)
        assert set(batch.groups) == set(self._model.ratios)
        for ratio, groups in batch.groups.items():
            rows, slots, memory = groups.rows.numpy(), groups.slots.numpy(), self._entries[ratio]
            ends = np.flatnonzero((positions + 1) % ratio == 0)
            assert set(rows.tolist()) <= set(ends.tolist())
            assert len(set(slots.tolist())) == len(slots), "an entry of two rows"
            self._check_entries_left_out(batch, ratio, np.setdiff1d(ends, rows))
            known = positions[rows][:, None] - np.arange(ratio)[::-1]
            stored = self._ring[states[rows][:, None], known]
            assert (stored[:, :, 0] == known).all(), "the state has lost a token of an unfinished group"
            memory[slots] = fingerprint([200 + ratio, positions[rows] // ratio, *stored[:, :, 1].T])
            entries = np.arange(batch.max_context // ratio)
            visible = entries < ((positions + 1) // ratio)[:, None]
            blocks = tables[:, entries // (BLOCK_TOKENS // ratio)]
            assert (blocks >= 0)[visible].all(), "an entry without a block"
            places = blocks * (BLOCK_TOKENS // ratio) + entries % (BLOCK_TOKENS // ratio)
            seen += np.where(visible, memory[places], np.uint64(0)).sum(1)
        return seen

    def _check_entries_left_out(self, batch: Batch, ratio: int, rows: NDArray[np.int64]) -> None:
        """What a row need not write is what it would have written."""
        states, positions = batch.states[batch.sequences].numpy()[rows], batch.positions.numpy()[rows]
        places, each = positions // ratio, BLOCK_TOKENS // ratio
        blocks = batch.block_tables.numpy()[batch.sequences.numpy()[rows], places // each]
        stored = self._ring[states[:, None], positions[:, None] - np.arange(ratio)[::-1]]
        would = fingerprint([200 + ratio, places, *stored[:, :, 1].T])
        assert (self._entries[ratio][blocks * each + places % each] == would).all(), "a shared entry differs"

    def _window(self, batch: Batch, *, half: int, first: NDArray[np.int64]) -> Hashes:
        """Write each row's window key, then hash those that it sees."""
        tables = batch.window_tables.numpy()[batch.sequences.numpy()]
        bases, positions = batch.window_bases.numpy()[batch.sequences.numpy()], batch.positions.numpy()
        memory = self._windows[half]
        keys = positions[:, None] + np.arange(1 - self._model.window, 1)
        visible = keys >= np.maximum(first, 0)[:, None]
        places = keys // BLOCK_TOKENS - bases[:, None]
        assert ((places >= 0) & (places < tables.shape[1]))[visible].all(), "a window key outside the table"
        blocks = np.take_along_axis(tables, np.clip(places, 0, tables.shape[1] - 1), 1)
        assert (blocks >= 0)[visible].all(), "a window key without a block"
        slots = blocks * BLOCK_TOKENS + keys % BLOCK_TOKENS
        assert len(set(slots[:, -1].tolist())) == len(slots), "a window key of two rows"
        memory[slots[:, -1]] = fingerprint([100 + half, positions, batch.token_ids.numpy()])
        return np.asarray(np.where(visible, memory[slots], np.uint64(0)).sum(1))


def lone_run(model: ModelConfig, config: EngineConfig, request: Request) -> Completion:
    """What a request must become, worked out without an engine."""
    tokens, params, ops = list(request.prompt_token_ids), request.params, small_ops()
    replay = config.replay_of(params)
    start = 0 if replay is None else max(0, len(tokens) - replay)
    limit = config.max_model_len - len(tokens) if params.max_tokens is None else params.max_tokens
    generated: list[int] = []
    reason = "length"
    while len(generated) < limit:
        row = torch.from_numpy(expected(model, tokens, len(tokens) - 1, start)).unsqueeze(0)
        assert params.temperature == 0
        generated.append(int(ops.greedy(row)))
        tokens.append(generated[-1])
        if generated[-1] in model.eos_token_ids and not params.ignore_eos:
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
