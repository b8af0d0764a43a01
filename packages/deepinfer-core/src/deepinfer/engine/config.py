"""`EngineConfig`: the choices of one engine, with every "auto" and None resolved.

What a caller may choose, and how it is resolved, is `options.py`'s; facts about the model are `model/config.py`'s.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.request import CacheMode, SamplingParams
from deepinfer.engine.sequence import blocks_for

DraftChoice = Literal["off", "auto", "on"]
DraftRule = Literal["match", "chain", "block", "greedy"]
"""How drafts are judged.

match    the text is that of decoding without drafts, for every seed and load
chain    the law of the text is that of decoding without drafts; more drafts are accepted than by "match"
block    the same, judged as a block: never fewer tokens than "chain"
greedy   as "match", but drafts are the drafter's best tokens: cheaper to draw, for low temperatures
"""

SNAPSHOT_SPACING = 4096
"""Tokens between the snapshots that a long text keeps for texts that leave it early: each is as large as 32 blocks."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything resolved. See `EngineOptions`; `decoder_replay` None = all rows run the whole model.

    blocks, window_blocks  of 128 tokens, in the pool of entries and index keys, and in the pool of window KV
    snapshots              how many of the window blocks are meant for snapshots of the prefix cache
    weights_id             tells checkpoints of one shape apart whose cached numbers differ
    """

    precision: Precision
    decoder_replay: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens_per_step: int
    overlap: bool
    blocks: int
    window_blocks: int
    seed: int
    deterministic: bool = False
    graphs: bool = False
    prefix_cache: CacheMode = "off"
    snapshots: int = 0
    prefix_cache_host_bytes: int = 0
    prefix_cache_disk_bytes: int = 0
    prefix_cache_dir: Path | None = None
    weights_id: str = ""

    def window_width(self, window: int, ahead: int = 0) -> int:
        """Most window blocks of a sequence: a step's rows, the window before the first, and `ahead` for drafts."""
        return min(window_blocks(self.max_num_batched_tokens + ahead, window), blocks_for(self.max_model_len))

    def replay_of(self, params: SamplingParams) -> int | None:
        """Last prompt tokens of a request that run the decoder half; None = all, as where all logits are wanted."""
        return self.decoder_replay if params.prompt_logprobs is None else None


def window_blocks(rows: int, window: int) -> int:
    """Blocks that `rows` consecutive rows and the window before the first may touch, wherever they begin."""
    return max(window - 1 + rows - 2, 0) // BLOCK_TOKENS + 2
