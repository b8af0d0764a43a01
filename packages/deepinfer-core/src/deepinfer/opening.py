"""From a name and options to what an engine is made of: a checked checkpoint, a resolved configuration, a loaded model.

Joining them with prompts and completions is `llm.py`'s.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.report import shapes_of, start_line
from deepinfer.drafting import find_drafter
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.drafter import DraftMode
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import CacheMemory, EngineOptions, check_dtypes, check_options, resolve, resolve_precision
from deepinfer.engine.speculation import Drafting
from deepinfer.errors import ConfigError
from deepinfer.model.cache_layout import cache_layout
from deepinfer.model.checkpoint import Checkpoint, open_checkpoint
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.draft import DraftStages
from deepinfer.model.plan import make_plan
from deepinfer.model.weights import Progress as LoadingProgress
from deepinfer.model.weights import Weights

NOT_LOADED = ("vision.", "aligner.", "image_")
"""Tensors whose headers are checked and whose data waits for the image tower."""

_log = logging.getLogger(__name__)

MEMORY_FRACTION = 0.9
HOST_CACHE_BYTES = 1 << 26
"""Cache in host memory, which the rest of the machine needs too, unless the caller says how much may be taken."""


def open_model(model: str | Path, options: EngineOptions) -> Checkpoint:
    """Open a checkpoint by name and hold the options against it."""
    checkpoint = open_checkpoint(model)
    check_options(options, checkpoint.config)
    return checkpoint


def resolve_options(
    options: EngineOptions, checkpoint: Checkpoint, accelerator: Accelerator, dtype: str, kv_cache_dtype: str
) -> EngineConfig:
    """Decide everything that was left to be decided, by the checkpoint and the device."""
    config = checkpoint.config
    precision = resolve_precision(dtype, kv_cache_dtype, config, checkpoint.read("embed.weight").dtype)
    memory = _cache_memory(options.memory_fraction, checkpoint, accelerator)
    options = replace(
        options,
        overlap=options.overlap and not accelerator.synchronous,
        graphs=options.graphs and accelerator.graphs,
    )
    resolved = resolve(options, config, precision, cache_layout(config, precision), memory)
    # Only files outlive the weights that they were computed from.
    return resolved if resolved.prefix_cache_dir is None else replace(resolved, weights_id=checkpoint.identity())


def check_early(model: object, dtype: str, kv_cache_dtype: str, options: EngineOptions) -> None:
    """Raise ConfigError for what no model can have, before one is looked for or downloaded."""
    if not isinstance(model, str | Path):
        raise ConfigError(f'model must be "demo", "tiny", a folder or a name on the Hugging Face Hub, got {model!r}')
    check_dtypes(dtype, kv_cache_dtype)
    check_options(options)


def _cache_memory(fraction: float | None, checkpoint: Checkpoint, accelerator: Accelerator) -> CacheMemory:
    """What the weights leave of the memory that may be used; raises ConfigError when they do not fit."""
    free, total = accelerator.memory()
    weights = make_plan(checkpoint.folder).device_bytes
    usable = int(free * (MEMORY_FRACTION if fraction is None else fraction))
    if weights >= usable:
        raise ConfigError(
            f"the weights take {weights / 1e9:.2f} GB, and only {usable / 1e9:.2f} GB may be used of "
            f"{free / 1e9:.2f} GB free ({total / 1e9:.2f} GB in all): use a larger device, free some memory or raise "
            "memory_fraction"
        )
    on_host = accelerator.device.type == "cpu"
    return CacheMemory(usable - weights, HOST_CACHE_BYTES if on_host and fraction is None else None)


def load_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    accelerator: Accelerator,
    options: EngineOptions,
    progress: LoadingProgress | None,
) -> Engine:
    """Load the model and, where drafts are wanted, its draft stages; no tensor is left over.

    Raises ConfigError when the device has too little memory for all of it.
    """
    choose = accelerator.deterministic_ops if config.deterministic else accelerator.ops
    ops = choose(config.precision)
    _log.info("%s", start_line(accelerator, ops, shapes_of(checkpoint.config)))
    drafter = find_drafter(options.draft, checkpoint.config)
    with _memory_explained(config, checkpoint, accelerator):
        weights = Weights(checkpoint, ops, accelerator, progress)
        model = DeepSeek(checkpoint.config, weights, ops)
        drafting = None
        if drafter is not None:
            mode: DraftMode = "on" if options.draft == "on" else "auto"
            drafting = Drafting(DraftStages(model, weights), drafter, options.draft_rule, mode)
        weights.check_only(NOT_LOADED if drafting else (*NOT_LOADED, "mtp."))
        weights.finish()
        return Engine(config, checkpoint.config, model, ops, accelerator, checkpoint.tokenizer, drafting=drafting)


@contextmanager
def _memory_explained(config: EngineConfig, checkpoint: Checkpoint, accelerator: Accelerator) -> Iterator[None]:
    """Say what takes the memory and what to change, as ConfigError, where the device has too little."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = accelerator.memory()
        weights = make_plan(checkpoint.folder).device_bytes
        raise ConfigError(
            f"the device ran out of memory while the model was loaded: its weights take {weights / 1e9:.2f} GB in the "
            f"checkpoint's formats, the cache {_cache_bytes(config, checkpoint) / 1e9:.2f} GB, and of "
            f"{total / 1e9:.2f} GB {free / 1e9:.2f} are free now: lower memory_fraction, max_num_seqs or "
            "max_model_len, free memory that other processes hold, or use a larger device"
        ) from error


def _cache_bytes(config: EngineConfig, checkpoint: Checkpoint) -> int:
    layout = cache_layout(checkpoint.config, config.precision)
    states = config.max_num_seqs * layout.state_bytes + config.snapshots * layout.snapshot_bytes
    return config.blocks * layout.block_bytes + config.window_blocks * layout.window_block_bytes + states
