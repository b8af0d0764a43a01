"""All memory of one engine, reserved when it is made: its sequences' table, its cache, and what shares that.

Who uses it for what is the `Scheduler`'s.
"""

from dataclasses import dataclass

from deepinfer.accelerator.ops import Ops
from deepinfer.engine.block_pool import content_key
from deepinfer.engine.cache_tiers import CacheTiers, open_tiers
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.pinning import Pins
from deepinfer.engine.prefix_cache import PrefixCache
from deepinfer.engine.sequence import SequenceTable, blocks_for
from deepinfer.model.cache_pieces import CachePieces
from deepinfer.model.config import ModelConfig
from deepinfer.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine keeps; without a prefix cache nothing is shared, pinned or copied to slower memory."""

    table: SequenceTable
    cache: KVCache
    prefixes: PrefixCache | None = None
    pins: Pins | None = None
    tiers: CacheTiers | None = None


def reserve(config: EngineConfig, model: ModelConfig, ops: Ops, drafts: int) -> Memory:
    """Reserve everything; `drafts` is the size of a draft block, 0 = none.

    Raises ConfigError for a folder of cached pieces that is taken or cannot be used.
    """
    table = SequenceTable(
        config.max_num_seqs,
        history=model.history,
        blocks=blocks_for(config.max_model_len),
        windows=config.window_width(model.window, 2 * drafts + 1 if drafts else 0),
        drafts=drafts,
    )
    cache = KVCache(
        model,
        ops,
        config.precision,
        blocks=config.blocks,
        window_blocks=config.window_blocks,
        states=config.max_num_seqs,
        snapshots=config.snapshots,
    )
    if config.prefix_cache == "off":
        return Memory(table, cache)
    layout = _layout(config, cache, ops)
    prefixes = PrefixCache(config, model, cache, layout)
    spare = config.blocks - blocks_for(config.max_model_len)
    # Beside what one sequence needs for the largest step.
    spare_windows = max(config.window_blocks - config.window_width(model.window), 0)
    pins = Pins(prefixes, blocks=spare, windows=spare_windows)
    if not config.prefix_cache_host_bytes and config.prefix_cache_dir is None:
        return Memory(table, cache, prefixes, pins)
    return Memory(table, cache, prefixes, pins, open_tiers(config, prefixes, CachePieces(cache, ops), layout))


def _layout(config: EngineConfig, cache: KVCache, ops: Ops) -> bytes:
    """What engines have in common that may use each other's cached bytes, hashed to 32 bytes."""
    device = f"{type(ops).__module__}.{type(ops).__qualname__}"
    parts = [cache.layout.fingerprint, repr(config.precision), config.weights_id, device]
    return content_key([(b"part", part.encode()) for part in parts])
