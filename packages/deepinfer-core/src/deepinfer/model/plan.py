"""How much memory a model needs, before anything is loaded: weights by component, cache by kind, the context that fits.

All numbers are sums over file headers (or over the inventory, for a folder without weights) and over the cache layout.
Reserving memory is the engine's, which also needs room for activations.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.accelerator.parameters import Precision
from deepinfer.errors import ConfigError
from deepinfer.model.cache_layout import cache_layout
from deepinfer.model.config import ModelConfig
from deepinfer.model.headers import INDEX, SINGLE, read_headers
from deepinfer.model.inventory import COMPONENTS, ENGRAM_TABLES, component, inventory, not_loaded
from deepinfer.model.read_config import read_config

WINDOW_BLOCKS = 2
"""Blocks of window KV that a decoding sequence holds: a window of 128 tokens may lie across two."""

RELEASED = Precision(torch.bfloat16, round_inputs=True, cache="records")
"""Bfloat16 activations and the model's own cache records."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a model takes; all sizes in bytes.

    source           "headers" of the weight files, or "inventory": computed from config.json alone
    tensors          number of tensors
    total_bytes      all of them
    components       bytes by component; they add up to `total_bytes`
    not_loaded       components whose tensors are only checked
    device_bytes     weights on the device: all that is loaded but the Engram tables; in the checkpoint's formats,
                     which an accelerator may widen
    host_bytes       Engram tables, in host memory
    token_bytes      compressed KV and index keys for each token of context
    window_bytes     window KV of one sequence: two blocks for each layer and draft stage
    state_bytes      compressor tails of one sequence
    memory_bytes     memory given; None = not asked
    sequences        sequences that share it
    context_tokens   context of each that fits beside the weights, at most what the model can; None = not asked
    max_positions    longest context of the model
    """

    source: str
    tensors: int
    total_bytes: int
    components: Mapping[str, int]
    not_loaded: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    token_bytes: float
    window_bytes: int
    state_bytes: int
    memory_bytes: int | None
    sequences: int
    context_tokens: int | None
    max_positions: int

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return asdict(self)


def make_plan(
    folder: Path, *, memory_bytes: int | None = None, sequences: int = 1, precision: Precision = RELEASED
) -> MemoryPlan:
    """Plan a checkpoint folder, or a folder that holds nothing but config.json.

    memory_bytes  memory of the device for weights and cache; None = leave out the context that fits
    sequences     how many sequences share it
    precision     decides the cache formats

    Raises CheckpointError for a folder that cannot be read, ConfigError for a number below 1.
    """
    for name, value in (("memory_bytes", memory_bytes), ("sequences", sequences)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is expected to be at least 1, got {value}")
    config = read_config(folder)
    source, sizes = _tensor_bytes(folder, config)
    components = Counter(dict.fromkeys(COMPONENTS, 0))
    for name, size in sizes.items():
        components[component(name)] += size
    layout = cache_layout(config, precision)
    unread = not_loaded(config)
    device = sum(size for name, size in components.items() if name != ENGRAM_TABLES and name not in unread)
    window = WINDOW_BLOCKS * layout.window_block_bytes
    left = None if memory_bytes is None else memory_bytes - device - sequences * (window + layout.state_bytes)
    return MemoryPlan(
        source=source,
        tensors=len(sizes),
        total_bytes=sum(sizes.values()),
        components=dict(components.most_common()),
        not_loaded=unread,
        device_bytes=device,
        host_bytes=components[ENGRAM_TABLES],
        token_bytes=layout.bytes_per_token,
        window_bytes=window,
        state_bytes=layout.state_bytes,
        memory_bytes=memory_bytes,
        sequences=sequences,
        context_tokens=None if left is None else _context(config, left // sequences, layout.block_bytes),
        max_positions=config.max_positions,
    )


def _tensor_bytes(folder: Path, config: ModelConfig) -> tuple[str, dict[str, int]]:
    """Where the sizes come from, and the bytes of every tensor."""
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return "headers", {name: tensor.bytes for name, tensor in read_headers(folder).items()}
    return "inventory", {name: spec.bytes for name, spec in inventory(config).items() if not spec.optional}


def render(plan: MemoryPlan) -> str:
    """Return the plan as lines of text."""
    sources = {"headers": "the headers of the weight files", "inventory": "config.json: the folder has no weight files"}
    places = {ENGRAM_TABLES: "host memory"} | dict.fromkeys(plan.not_loaded, "checked, not loaded")
    rows = [(name, size, places.get(name, "")) for name, size in plan.components.items() if size]
    width = max(len(name) for name, _, _ in rows)
    lines = [
        f"{plan.tensors:,} tensors, {plan.total_bytes:,} bytes (from {sources[plan.source]})",
        "",
        *(
            f"  {name:<{width}}  {format_bytes(size, plan.total_bytes):>12}  {place}".rstrip()
            for name, size, place in rows
        ),
        "",
        f"Weights on the device {format_bytes(plan.device_bytes)}, in host memory {format_bytes(plan.host_bytes)}",
        f"Cache {plan.token_bytes:,.0f} bytes a token, and {plan.window_bytes + plan.state_bytes:,} bytes a sequence",
    ]
    if plan.memory_bytes is not None and plan.context_tokens is not None:
        lines.append(_fit(plan, plan.memory_bytes, plan.context_tokens))
    return "\n".join(lines)


def format_bytes(size: int, like: int | None = None) -> str:
    """Return a size in the unit that keeps it readable, or that keeps `like` readable."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if (size if like is None else like) >= scale:
            return f"{size / scale:,.3f} {unit}"
    return f"{size} bytes"


def _context(config: ModelConfig, left: int, block_bytes: int) -> int:
    """Tokens of context of a sequence that has `left` bytes for them, in whole blocks."""
    if left <= 0:
        return 0
    if block_bytes == 0:  # window-only layers
        return config.max_positions
    return min(left // block_bytes * BLOCK_TOKENS, config.max_positions)


def _fit(plan: MemoryPlan, memory: int, context: int) -> str:
    asked = f"{format_bytes(memory)} and {plan.sequences:,} sequence{'s' * (plan.sequences > 1)}"
    if context == 0:
        first = plan.sequences * (plan.window_bytes + plan.state_bytes + plan.token_bytes * BLOCK_TOKENS)
        missing = format_bytes(int(plan.device_bytes + first) - memory)
        return f"With {asked} it does not fit: {missing} are missing for the first block of tokens"
    bound = ", the model's longest" if context == plan.max_positions else ""
    return f"With {asked} there is room for {context:,} tokens of context each{bound} (activations not counted)"
