"""The model's configuration: frozen dataclasses that V4.1 and V4 share.

Everything that differs between the families is a field here, so that the layers branch on facts and never on a name.
Reading config.json is `read_config.py`'s, tensor names and shapes are `inventory.py`'s.
Source: model card, config.json and V4 to V4.1.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """RoPE of the last `dim` channels: plain base for window-only layers, a YaRN-stretched base for compressed ones."""

    dim: int
    theta: float
    compressed_theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


@dataclass(frozen=True)
class EngramConfig:
    """One Engram layer: `rows` is the length of its table; `order` counts Engram layers from 0."""

    rows: int
    order: int


@dataclass(frozen=True)
class EngramHashConfig:
    """What all Engram layers share: how token ids become table rows."""

    layer_ids: tuple[int, ...]
    max_ngram: int
    heads: int
    head_dim: int
    vocab_size: int
    compressed_vocab_size: int
    pad_token_id: int


@dataclass(frozen=True)
class LayerConfig:
    """One layer of the stack.

    ratio         tokens per compressed entry; 0 = window only
    kv_source     layer whose compressed KV this one reads (itself for an owner); None when ratio is 0
    index_source  layer whose selection of entries this one uses; None = window only or all entries (ratio 128)
    owns_kv       has a compressor
    owns_index    has an indexer (queries); with `owns_index_keys` also writes index keys
    candidates    "source": keeps candidate blocks for later index sources; "reader": scores only inside them
    decoder       belongs to the decoder half (V4: False everywhere, it has no halves)
    hash_routing  experts are looked up by token id (`gate.tid2eid`) instead of learned
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index: bool
    owns_index_keys: bool
    candidates: Literal["source", "reader"] | None
    decoder: bool
    engram: EngramConfig | None
    hash_routing: bool


@dataclass(frozen=True)
class QuantConfig:
    """Checkpoint formats: FP8 E4M3 weights with UE8M0 scales per `block` x `block`; FP4 experts with a scale per 32."""

    block: int
    experts: Literal["fp4", "fp8"]


@dataclass(frozen=True)
class DraftConfig:
    """The DSpark stages in `mtp.*` (V4.1)."""

    stages: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the image tower, enough to check its tensors; the tower itself is not built."""

    layers: int
    hidden: int
    intermediate: int
    patch: int
    downsample: int


@dataclass(frozen=True)
class ModelConfig:
    """All facts about one checkpoint. Frozen; every default is resolved."""

    family: Literal["deepseek_v41", "deepseek_v4"]
    vocab_size: int
    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    eps: float
    window: int
    max_positions: int
    rope: RopeConfig
    layers: tuple[LayerConfig, ...]
    intermediate: int
    experts: int
    shared_experts: int
    top_k: int
    routed_scale: float
    swiglu_limit: float
    normalize_top_k: bool
    index_heads: int
    index_dim: int
    index_top_k: int
    candidate_blocks: int
    candidate_block_size: int
    streams: int
    sinkhorn_iters: int
    hc_eps: float
    hc_shifted: bool
    q_head_norm: bool
    hadamard: bool
    fp4_entries: bool
    engram: EngramHashConfig | None
    quant: QuantConfig | None
    draft: DraftConfig | None
    draft_layers_declared: int
    vision: VisionConfig | None
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None

    @property
    def first_decoder_layer(self) -> int | None:
        """The layer whose compressed KV the whole decoder half reads; None for V4, which has no halves."""
        return next((layer.index for layer in self.layers if layer.decoder), None)

    @property
    def history(self) -> int:
        """How many earlier token ids a row needs (Engram n-grams)."""
        return self.engram.max_ngram - 1 if self.engram else 0

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios above 0 that occur, ascending."""
        return tuple(sorted({layer.ratio for layer in self.layers if layer.ratio}))
