"""Names, shapes and dtypes of all tensors of a checkpoint, computed from its configuration.

Comparing files with this list is `checkpoint.py`'s, reading tensors is `weights.py`'s.
"""

import math
import re
from dataclasses import dataclass

from deepinfer.model.config import LayerConfig, ModelConfig

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
"""Bytes of an element, by the dtype names of the safetensors format that checkpoints of these models use."""

FP4_GROUP = 32
"""Columns of an FP4 row, or of a row of an FP8 Engram table, that share one scale."""

ENGRAM_TABLES = "engram tables"

COMPONENTS = {
    "draft": r"mtp\.",
    "vision": r"vision\.|aligner\.|image_",
    "embedding": r"embed\.",
    "head": r"head\.",
    "routed experts": r".*\.ffn\.experts\.",
    "shared experts": r".*\.ffn\.shared_experts\.",
    ENGRAM_TABLES: r".*\.engram\.embed\.",
    "engram projections": r".*\.engram\.",
    "attention": r".*\.attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.",
    "router, mixing, compressors, norms": r"",
}
"""Parts of the model, and what the names of their tensors begin with; the first that fits counts."""

_COMPONENT = re.compile("|".join(f"({pattern})" for pattern in COMPONENTS.values()))

PLAIN = ("BF16", "F32")
FLOAT = ("F32",)
SCALE = ("F8_E8M0",)


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor must be: its shape and the dtypes it may have, the released one first.

    `optional` tensors (V4's `mtp.*`) may be absent; they are checked when present and never loaded.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False

    @property
    def bytes(self) -> int:
        """Size in the released dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtypes[0]]


def inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """List every tensor that a checkpoint of `config` holds, by name, without the `model.` prefix that some files have.

    A checkpoint without quantisation has BF16 or F32 matrices and no scales.  For the released V4.1 configuration:
    96,085 tensors.  Source: the released checkpoint's headers (V4.1); published names and shapes (V4).
    """
    tensors = _Tensors(config)
    tensors.model()
    for layer in config.layers:
        tensors.layer(f"layers.{layer.index}", layer)
    if config.family == "deepseek_v4":
        return tensors.specs | _v4_draft(config)
    tensors.draft()
    tensors.vision()
    return tensors.specs


def component(name: str) -> str:
    """Return the part of the model that a tensor belongs to, one of `COMPONENTS`."""
    match = _COMPONENT.match(name)
    assert match is not None, "the last pattern fits every name"
    assert match.lastindex is not None, "every pattern is a group"
    return tuple(COMPONENTS)[match.lastindex - 1]


def not_loaded(config: ModelConfig) -> tuple[str, ...]:
    """Return the components whose tensors are checked and stay in the file: vision, and V4's draft block."""
    return ("vision", "draft") if config.family == "deepseek_v4" else ("vision",)


def _v4_draft(config: ModelConfig) -> dict[str, TensorSpec]:
    """V4's draft block as far as it is known: a window-only block with its own projections and head mixing."""
    tensors = _Tensors(config)
    hidden = config.hidden
    tensors.block("mtp.0", config.experts)
    tensors.learned_gate("mtp.0.ffn.gate", config.experts)
    for name in ("enorm", "hnorm", "norm"):
        tensors.add(f"mtp.0.{name}.weight", PLAIN, hidden)
    for name in ("e_proj", "h_proj"):
        tensors.linear(f"mtp.0.{name}", hidden, hidden)
    tensors.head_mixing("mtp.0.")
    return {name: TensorSpec(spec.shape, spec.dtypes, optional=True) for name, spec in tensors.specs.items()}


class _Tensors:
    """Collects specs; each method adds the tensors of one part of the model under a prefix."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.specs: dict[str, TensorSpec] = {}

    def add(self, name: str, dtypes: tuple[str, ...], *shape: int) -> None:
        self.specs[name] = TensorSpec(shape, dtypes)

    def linear(self, name: str, rows: int, columns: int) -> None:
        """A matrix that the released checkpoints keep in FP8 with a scale per square block."""
        quant = self.config.quant
        if quant is None:
            self.add(f"{name}.weight", PLAIN, rows, columns)
            return
        self.add(f"{name}.weight", ("F8_E4M3",), rows, columns)
        self.add(f"{name}.scale", SCALE, -(-rows // quant.block), -(-columns // quant.block))

    def expert_matrix(self, name: str, rows: int, columns: int) -> None:
        """A matrix of a routed expert: FP4 pairs with a scale per row and 32 columns, or as any other."""
        if self.config.quant is None or self.config.quant.experts != "fp4":
            self.linear(name, rows, columns)
            return
        self.add(f"{name}.weight", ("I8",), rows, columns // 2)
        self.add(f"{name}.scale", SCALE, rows, columns // FP4_GROUP)

    def model(self) -> None:
        config = self.config
        self.add("embed.weight", PLAIN, config.vocab_size, config.hidden)
        self.add("head.weight", PLAIN, config.vocab_size, config.hidden)
        self.add("norm.weight", PLAIN, config.hidden)
        if not config.hc_shifted:
            self.head_mixing("")

    def head_mixing(self, prefix: str) -> None:
        streams = self.config.streams
        self.add(f"{prefix}hc_head_fn", FLOAT, streams, streams * self.config.hidden)
        self.add(f"{prefix}hc_head_base", FLOAT, streams)
        self.add(f"{prefix}hc_head_scale", FLOAT, 1)

    def layer(self, prefix: str, layer: LayerConfig) -> None:
        config = self.config
        self.block(prefix, config.experts)
        if layer.hash_routing:
            self.add(f"{prefix}.ffn.gate.tid2eid", ("I64",), config.vocab_size, config.top_k)
        else:
            self.learned_gate(f"{prefix}.ffn.gate", config.experts)
        if layer.owns_kv:
            self.compressor(f"{prefix}.attn.compressor", layer.ratio, config.head_dim)
        if layer.owns_index:
            self.indexer(f"{prefix}.attn.indexer", layer)
        if layer.engram is not None:
            self.engram(f"{prefix}.engram", layer.engram.rows)

    def block(self, prefix: str, experts: int) -> None:
        """What layers and draft stages share: attention, norms, stream mixing, router matrix, experts."""
        config = self.config
        hidden = config.hidden
        self.add(f"{prefix}.attn_norm.weight", PLAIN, hidden)
        self.add(f"{prefix}.ffn_norm.weight", PLAIN, hidden)
        self.linear(f"{prefix}.attn.wq_a", config.q_rank, hidden)
        self.add(f"{prefix}.attn.q_norm.weight", PLAIN, config.q_rank)
        self.linear(f"{prefix}.attn.wq_b", config.heads * config.head_dim, config.q_rank)
        self.linear(f"{prefix}.attn.wkv", config.head_dim, hidden)
        self.add(f"{prefix}.attn.kv_norm.weight", PLAIN, config.head_dim)
        self.add(f"{prefix}.attn.attn_sink", FLOAT, config.heads)
        group = config.heads // config.o_groups * config.head_dim
        self.linear(f"{prefix}.attn.wo_a", config.o_groups * config.o_rank, group)
        self.linear(f"{prefix}.attn.wo_b", hidden, config.o_groups * config.o_rank)
        mixes = config.streams * (config.streams + 2)
        for part in ("attn", "ffn"):
            self.add(f"{prefix}.hc_{part}_fn", FLOAT, mixes, config.streams * hidden)
            self.add(f"{prefix}.hc_{part}_base", FLOAT, mixes)
            self.add(f"{prefix}.hc_{part}_scale", FLOAT, 3)
        self.add(f"{prefix}.ffn.gate.weight", PLAIN, experts, hidden)
        for expert in range(experts):
            for name, shape in self._expert_shapes():
                self.expert_matrix(f"{prefix}.ffn.experts.{expert}.{name}", *shape)
        for name, shape in self._expert_shapes():
            self.linear(f"{prefix}.ffn.shared_experts.{name}", *shape)

    def _expert_shapes(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        hidden, inner = self.config.hidden, self.config.intermediate
        return ("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))

    def learned_gate(self, prefix: str, experts: int) -> None:
        self.add(f"{prefix}.bias", FLOAT, experts)
        if self.config.family == "deepseek_v41":
            self.add(f"{prefix}.bias_vl", FLOAT, experts)

    def compressor(self, prefix: str, ratio: int, width: int) -> None:
        """Ratio 4 overlaps, so its projections have two halves; only V4 adds a learned position bias to the gate."""
        channels = 2 * width if ratio == 4 else width
        self.add(f"{prefix}.wkv.weight", PLAIN, channels, self.config.hidden)
        if ratio > 1:
            self.add(f"{prefix}.wgate.weight", PLAIN, channels, self.config.hidden)
        if self.config.family == "deepseek_v4":
            self.add(f"{prefix}.ape", ("F32", "BF16"), ratio, channels)
        self.add(f"{prefix}.norm.weight", PLAIN, width)

    def indexer(self, prefix: str, layer: LayerConfig) -> None:
        config = self.config
        self.linear(f"{prefix}.wq_b", config.index_heads * config.index_dim, config.q_rank)
        self.add(f"{prefix}.weights_proj.weight", PLAIN, config.index_heads, config.hidden)
        if config.family == "deepseek_v4":
            self.compressor(f"{prefix}.compressor", layer.ratio, config.index_dim)
        elif layer.owns_index_keys:
            self.add(f"{prefix}.wk.weight", PLAIN, config.index_dim, config.head_dim)
            self.add(f"{prefix}.k_norm.weight", PLAIN, config.index_dim)

    def engram(self, prefix: str, rows: int) -> None:
        config = self.config
        assert config.engram is not None, "a layer has an Engram only when the model does"
        width = config.engram.head_dim
        if config.quant is None:
            self.add(f"{prefix}.embed.weight", PLAIN, rows, width)
        else:
            self.add(f"{prefix}.embed.weight", ("F8_E4M3",), rows, width)
            self.add(f"{prefix}.embed.scale", SCALE, rows, -(-width // FP4_GROUP))
        lookup = (config.engram.max_ngram - 1) * config.engram.heads * width
        self.linear(f"{prefix}.wkv", (config.streams + 1) * config.hidden, lookup)
        self.add(f"{prefix}.q_weight", PLAIN, config.streams, config.hidden)
        self.add(f"{prefix}.k_weight", PLAIN, config.streams, config.hidden)

    def draft(self) -> None:
        draft, hidden = self.config.draft, self.config.hidden
        if draft is None:
            return
        for stage in range(draft.stages):
            self.block(f"mtp.{stage}", draft.experts)
            self.learned_gate(f"mtp.{stage}.ffn.gate", draft.experts)
        self.linear("mtp.0.main_proj", hidden, len(draft.target_layers) * hidden)
        self.add("mtp.0.main_norm.weight", PLAIN, hidden)
        last = f"mtp.{draft.stages - 1}"
        self.add(f"{last}.norm.weight", PLAIN, hidden)
        self.add(f"{last}.markov_head.embed.weight", PLAIN, self.config.vocab_size, draft.markov_rank)
        self.add(f"{last}.markov_head.head.weight", PLAIN, self.config.vocab_size, draft.markov_rank)
        self.add(f"{last}.confidence_head.proj.weight", PLAIN, 1, hidden + draft.markov_rank)

    def vision(self) -> None:
        vision, hidden = self.config.vision, self.config.hidden
        if vision is None:
            return
        for name in ("image_start", "image_end", "image_newline"):
            self.add(name, PLAIN, hidden)
        width = vision.hidden
        self._biased("vision.patch_embed.proj", width, 3 * vision.patch**2)
        for block in range(vision.layers):
            prefix = f"vision.blocks.{block}"
            self.add(f"{prefix}.norm1.weight", PLAIN, width)
            self.add(f"{prefix}.norm2.weight", PLAIN, width)
            self._biased(f"{prefix}.attn.wqkv", 3 * width, width)
            self._biased(f"{prefix}.attn.wo", width, width)
            self.add(f"{prefix}.mlp.w1.weight", PLAIN, 2 * vision.intermediate, width)
            self.add(f"{prefix}.mlp.w2.weight", PLAIN, width, vision.intermediate)
        self.add("vision.norm.weight", PLAIN, width)
        self._biased("aligner.w1", hidden, width * vision.downsample**2)
        self._biased("aligner.w2", hidden, hidden)

    def _biased(self, name: str, rows: int, columns: int) -> None:
        self.add(f"{name}.weight", PLAIN, rows, columns)
        self.add(f"{name}.bias", PLAIN, rows)
