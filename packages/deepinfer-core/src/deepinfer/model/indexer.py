"""The indexer of an index source: scores compressed entries for each row and keeps the best."""

from dataclasses import dataclass

from torch import Tensor

from deepinfer.accelerator.batch import Batch, Rope, Selection
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sparse_attention import IndexRequest
from deepinfer.model.compressor import Compressor
from deepinfer.model.config import LayerConfig, ModelConfig
from deepinfer.model.kv_cache import LayerCache
from deepinfer.model.layers import dense_ratios
from deepinfer.model.weights import Weights


@dataclass(frozen=True)
class Index:
    """What an index source hands to the layers above: its selection, and candidate blocks [T, Kb] if it keeps any."""

    selection: Selection
    candidates: Tensor | None = None


class Indexer:
    """`prefix`.{wq_b, weights_proj} and, where the layer owns index keys, their making."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, weights: Weights, ops: Ops, prefix: str, rope: Rope
    ) -> None:
        wide = ops.precision.wide
        self.config, self.layer, self.ops, self.rope = config, layer, ops, rope
        self.queries = weights.linear(f"{prefix}.wq_b")
        self.weights = weights.linear(f"{prefix}.weights_proj")
        self.factor = config.index_dim**-0.5 * config.index_heads**-0.5
        own = layer.owns_index_keys
        v4 = config.family == "deepseek_v4"
        self.compressor = Compressor(config, weights, ops, f"{prefix}.compressor", layer.ratio) if own and v4 else None
        self.keys = weights.linear(f"{prefix}.wk") if own and not v4 else None
        self.key_norm = weights.vector(f"{prefix}.k_norm.weight", wide) if own and not v4 else None

    def write_keys(self, x: Tensor, latents: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Store index keys of new entries: from the main latents (V4.1) or from a compressor of their own (V4)."""
        assert cache.index_keys is not None
        if self.compressor is not None:
            keys = self.compressor.forward(x, batch, cache.index_tail)
        elif self.keys is not None:
            keys = self.ops.rms_norm(self.ops.linear(latents, self.keys), self.key_norm, self.config.eps)
        else:
            return
        transform = self.config.hadamard
        self.ops.write_entries(keys, batch, self.layer.ratio, self.rope, cache.index_keys, transform=transform)

    def forward(self, x: Tensor, q_latent: Tensor, batch: Batch, cache: LayerCache, above: Index | None) -> Index:
        """Select entries for rows x [T, D] with normed query latents [T, q_rank]; `above` is the last source's."""
        ratio, config = self.layer.ratio, self.config
        if ratio in dense_ratios(config, batch.max_context):
            return Index(self.ops.everything(batch, ratio))
        assert cache.index_keys is not None
        query = self.ops.linear(q_latent, self.queries).unflatten(1, (config.index_heads, config.index_dim))
        blocks = -(-(batch.max_context // ratio) // config.candidate_block_size)
        keeps = self.layer.candidates == "source" and blocks > config.candidate_blocks
        request = IndexRequest(
            query=query,
            weights=self.ops.linear(x, self.weights, wide=True) * self.factor,
            keys=cache.index_keys,
            rope=self.rope,
            ratio=ratio,
            top_k=config.index_top_k,
            block_size=config.candidate_block_size,
            candidates=above.candidates if above is not None and self.layer.candidates == "reader" else None,
            keep_blocks=config.candidate_blocks if keeps else 0,
            transform=config.hadamard,
        )
        selection, kept = self.ops.select_entries(request, batch)
        passed_on = above.candidates if above is not None and self.layer.candidates == "reader" else None
        return Index(selection, kept if keeps else passed_on)
