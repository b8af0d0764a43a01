"""`EngineOptions`, what a caller may choose, and how it becomes an `EngineConfig` that fits the model and the memory.

Facts about the model are `model/config.py`'s; measuring memory is the accelerator's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from deepinfer.accelerator.base import CacheLayout
from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.config import SNAPSHOT_SPACING, DraftChoice, DraftRule, EngineConfig, window_blocks
from deepinfer.engine.request import CacheMode
from deepinfer.engine.sequence import blocks_for
from deepinfer.errors import ConfigError
from deepinfer.model.config import ModelConfig

DtypeChoice = Literal["auto", "bfloat16", "float32", "float64"]
CacheChoice = Literal["auto", "model"]

REPLAY_MARGIN = 12
"""Decoder replay beyond the window by default: room to roll back rejected drafts, as trained for (128 + 12 = 140)."""

SNAPSHOTS_A_SEQUENCE = 4
SNAPSHOT_SHARE = 4
"""Snapshots take at most a quarter of the memory for entries."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a caller may choose; None means resolved from the model and the memory there is.

    decoder_replay          last prompt tokens that run the decoder half; "auto" = window + 12 (V4.1), "off" = all
    max_model_len           tokens of a sequence, prompt and generated
    max_num_seqs            sequences that run at once
    max_num_batched_tokens  rows of a step: the budget that prefill chunks and decoding share
    max_prefill_tokens_per_step  prompt rows of a step in which a sequence decodes, beside one for each sequence: bounds
                            the gap between tokens; None = what the budget leaves
    overlap                 the host prepares a step while the device runs the one before; no gain, and off, where the
                            device is the host
    graphs                  replay steps of few rows from recorded graphs, where the device has them; off with
                            `deterministic`
    memory_fraction         share of free memory that weights and cache may take, the rest is for activations;
                            None = 0.9, and of host memory 64 MiB of entries unless the longest sequence needs more
    draft                   "off", "on" (whole blocks in every step), or "auto": as many drafts as pay
    draft_rule              how drafts are judged: "match", "chain", "block" or "greedy", see `DraftRule`
    seed                    of requests that have none of their own
    deterministic           bitwise the same logits and tokens whatever else runs, however prompts are cut, after a
                            preemption and from the cache; on one device, with one set of versions and threads
    prefix_cache            how requests use what earlier ones computed: "exact" goes on with the numbers of a cold run,
                            "replay" runs the last window again instead of keeping it (approximate, as trained for),
                            "off"
    prefix_cache_host_bytes, prefix_cache_disk_bytes, prefix_cache_dir
                            host memory that keeps what leaves the device, and a folder and its size that keep it beyond
                            the end of the process; None = no folder
    """

    decoder_replay: int | Literal["auto", "off"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefill_tokens_per_step: int | None = None
    overlap: bool = True
    graphs: bool = True
    memory_fraction: float | None = None
    draft: DraftChoice = "off"
    draft_rule: DraftRule = "match"
    seed: int = 0
    deterministic: bool = False
    prefix_cache: CacheMode = "exact"
    prefix_cache_host_bytes: int = 0
    prefix_cache_disk_bytes: int = 1 << 34
    prefix_cache_dir: str | Path | None = None


@dataclass(frozen=True)
class CacheMemory:
    """Bytes for the cache: the `most`, and how much is `enough` unless the longest sequence needs more (None = all)."""

    most: int
    enough: int | None = None


def resolve_precision(dtype: str, kv_cache_dtype: str, model: ModelConfig, stored: torch.dtype) -> Precision:
    """Choose how numbers are held. `stored`, the dtype of `embed.weight`, decides for checkpoints without quantisation.

    "auto" computes quantised checkpoints in bfloat16 with inputs rounded to FP8, as they were trained.
    """
    check_dtypes(dtype, kv_cache_dtype)
    cache = "model" if kv_cache_dtype == "model" else "records"
    if dtype != "auto":
        return Precision(DTYPES[dtype], round_inputs=False, cache=cache)
    if model.quant is not None:
        return Precision(torch.bfloat16, round_inputs=True, cache=cache)
    return Precision(stored, round_inputs=False, cache=cache)


def check_dtypes(dtype: str, kv_cache_dtype: str) -> None:
    """Raise ConfigError for a dtype that no model could have."""
    if dtype not in get_args(DtypeChoice):
        raise ConfigError(f"dtype must be one of {', '.join(get_args(DtypeChoice))}, got {dtype!r}")
    if kv_cache_dtype not in get_args(CacheChoice):
        raise ConfigError(
            'kv_cache_dtype must be "auto" (the model\'s quantised records) or "model" (unquantised), '
            f"got {kv_cache_dtype!r}"
        )


def check_options(options: EngineOptions, model: ModelConfig | None = None) -> None:
    """Raise ConfigError for the first option that no memory could honour; without `model`, that no model could."""
    for name, value, low, high in (
        ("max_model_len", options.max_model_len, 2, None if model is None else model.max_positions),
        ("max_num_seqs", options.max_num_seqs, 1, None),
        ("max_num_batched_tokens", options.max_num_batched_tokens, 1, None),
        ("max_prefill_tokens_per_step", options.max_prefill_tokens_per_step, 1, None),
        ("seed", options.seed, 0, 2**63 - 1),
        ("prefix_cache_host_bytes", options.prefix_cache_host_bytes, 0, None),
        ("prefix_cache_disk_bytes", options.prefix_cache_disk_bytes, 0, None),
    ):
        if value is None and name in ("max_model_len", "max_prefill_tokens_per_step"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise ConfigError(f"{name} must be an integer, {limits}, got {value!r}")
    for name, choice, choices in (
        ("draft", options.draft, get_args(DraftChoice)),
        ("draft_rule", options.draft_rule, get_args(DraftRule)),
    ):
        if choice not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {choice!r}")
    switches = {"overlap": options.overlap, "graphs": options.graphs, "deterministic": options.deterministic}
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ConfigError(f"{name} must be True or False, got {switch!r}")
    if options.deterministic and options.draft != "off" and options.draft_rule in ("chain", "block"):
        raise ConfigError(
            f'draft_rule must be "match" or "greedy" with deterministic=True, got {options.draft_rule!r}: with that '
            "rule a text depends on where its drafts begin, and so on load"
        )
    _check_prefix_cache(options)
    fraction = options.memory_fraction
    plain = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if fraction is not None and not (plain and 0 < fraction <= 1):
        raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {fraction!r}")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={options.max_num_batched_tokens} must be at least "
            f"max_num_seqs={options.max_num_seqs}, so that every decoding sequence gets its token in every step"
        )


def _check_prefix_cache(options: EngineOptions) -> None:
    if options.prefix_cache not in get_args(CacheMode):
        raise ConfigError(f'prefix_cache must be "exact", "replay" or "off", got {options.prefix_cache!r}')
    folder = options.prefix_cache_dir
    if folder is not None and not isinstance(folder, str | Path):
        raise ConfigError(f"prefix_cache_dir must be a folder or None, got {folder!r}")
    if options.prefix_cache == "off" and (folder is not None or options.prefix_cache_host_bytes):
        raise ConfigError('prefix_cache="off" keeps nothing: leave prefix_cache_dir and prefix_cache_host_bytes out')


def resolve(
    options: EngineOptions, model: ModelConfig, precision: Precision, layout: CacheLayout, memory: CacheMemory
) -> EngineConfig:
    """Turn checked options into sizes that fit; raises ConfigError with the numbers when they cannot.

    Window blocks come first, as many as the largest step may hold; entries get the rest, at most what `max_num_seqs`
    full sequences need.
    """
    wanted = model.max_positions if options.max_model_len is None else options.max_model_len
    windows = _needed_windows(options, model, wanted)
    fixed = windows * layout.window_block_bytes + options.max_num_seqs * layout.state_bytes
    useful = options.max_num_seqs * blocks_for(wanted)
    if memory.enough is not None:
        useful = min(useful, max(blocks_for(wanted), memory.enough // layout.block_bytes))
    left = max(0, memory.most - fixed)
    snapshot_bytes = layout.window_block_bytes + layout.snapshot_bytes
    spare = min(left // SNAPSHOT_SHARE, max(0, left - blocks_for(wanted) * layout.block_bytes))
    snapshots = min(_useful_snapshots(options, useful), spare // snapshot_bytes)
    blocks = min((left - snapshots * snapshot_bytes) // layout.block_bytes, useful)
    if blocks < blocks_for(wanted) and (options.max_model_len is not None or blocks == 0):
        needed = fixed + blocks_for(wanted) * layout.block_bytes
        raise ConfigError(
            f"max_model_len={wanted} with max_num_seqs={options.max_num_seqs} needs {needed / 1e9:.2f} GB of cache "
            f"({blocks_for(wanted)} blocks of {layout.block_bytes} bytes and {fixed / 1e9:.2f} GB of window KV and "
            f"states), there are {memory.most / 1e9:.2f} GB: lower one of them or raise memory_fraction"
        )
    return EngineConfig(
        precision=precision,
        decoder_replay=_replay(options.decoder_replay, model),
        max_model_len=min(wanted, blocks * BLOCK_TOKENS),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_tokens_per_step=options.max_prefill_tokens_per_step or options.max_num_batched_tokens,
        overlap=options.overlap,
        blocks=blocks,
        window_blocks=windows + snapshots,
        seed=options.seed,
        deterministic=options.deterministic,
        graphs=options.graphs and not options.deterministic,
        prefix_cache=options.prefix_cache,
        snapshots=snapshots,
        prefix_cache_host_bytes=options.prefix_cache_host_bytes,
        prefix_cache_disk_bytes=options.prefix_cache_disk_bytes,
        prefix_cache_dir=None if options.prefix_cache_dir is None else Path(options.prefix_cache_dir),
    )


def _needed_windows(options: EngineOptions, model: ModelConfig, longest: int) -> int:
    """Window blocks that the largest step may hold."""
    # A decoding sequence needs those of its row, and of drafts; one long chunk at a time begins inside its window.
    ahead = 2 * model.draft.block_size + 1 if model.draft is not None and options.draft != "off" else 0
    windows = window_blocks(1 + ahead, model.window) * options.max_num_seqs
    windows += window_blocks(options.max_num_batched_tokens + ahead, model.window)
    return min(windows, options.max_num_seqs * blocks_for(longest))


def _useful_snapshots(options: EngineOptions, blocks: int) -> int:
    """How many snapshots go with `blocks` blocks of entries."""
    if options.prefix_cache != "exact":
        return 0
    return min(SNAPSHOTS_A_SEQUENCE * options.max_num_seqs + blocks // (SNAPSHOT_SPACING // BLOCK_TOKENS), blocks)


def _replay(choice: int | str, model: ModelConfig) -> int | None:
    has_halves = model.first_decoder_layer is not None
    if choice == "auto":
        return model.window + REPLAY_MARGIN if has_halves else None
    if choice == "off":
        return None
    if isinstance(choice, bool) or not isinstance(choice, int):
        raise ConfigError(f'decoder_replay must be "auto", "off" or a number of tokens, got {choice!r}')
    if not has_halves:
        raise ConfigError(
            f'decoder_replay={choice} needs a model with a decoder half; {model.family} has none: use "auto" or "off"'
        )
    if choice < model.window:
        raise ConfigError(
            f"decoder_replay={choice} must be at least the window of {model.window} tokens: "
            "fewer would leave holes in the window of the first generated tokens"
        )
    return choice
