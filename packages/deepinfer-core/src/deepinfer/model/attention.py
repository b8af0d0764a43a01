"""Attention of one layer: queries, window KV, compressed KV with its index, the core, the grouped output.

Source: the section on attention of the model card.
"""

from torch import Tensor

from deepinfer.accelerator.batch import Batch, Rope
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sparse_attention import KeySources
from deepinfer.model.compressor import Compressor
from deepinfer.model.config import LayerConfig, ModelConfig
from deepinfer.model.indexer import Index, Indexer
from deepinfer.model.kv_cache import LayerCache
from deepinfer.model.weights import Weights


class Attention:
    """`prefix`.{wq_a, q_norm, wq_b, wkv, kv_norm, attn_sink, wo_a, wo_b}; `compressor` and `indexer` where owned."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, weights: Weights, ops: Ops, prefix: str, rope: Rope
    ) -> None:
        wide = ops.precision.wide
        self.config, self.layer, self.ops, self.rope = config, layer, ops, rope
        self.down = weights.stacked([f"{prefix}.wq_a", f"{prefix}.wkv"])
        self.q_norm = weights.vector(f"{prefix}.q_norm.weight", wide)
        self.q_up = weights.linear(f"{prefix}.wq_b")
        self.kv_norm = weights.vector(f"{prefix}.kv_norm.weight", wide)
        self.sink = weights.vector(f"{prefix}.attn_sink", wide)
        self.out_down = weights.grouped(f"{prefix}.wo_a", config.o_groups)
        self.out_up = weights.linear(f"{prefix}.wo_b")
        own = layer.owns_kv
        self.compressor = Compressor(config, weights, ops, f"{prefix}.compressor", layer.ratio) if own else None
        indexer = Indexer(config, layer, weights, ops, f"{prefix}.indexer", rope) if layer.owns_index else None
        self.indexer = indexer

    def write_window(self, kv: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Store window KV from the bare projection kv [T, D]."""
        self.ops.write_window(kv, self.kv_norm, self.config.eps, batch, self.rope, cache.window)

    def publish(self, x: Tensor, batch: Batch, cache: LayerCache) -> None:
        """Write the compressed KV and index keys that x's rows [T, D] complete, where this layer owns them."""
        if self.compressor is None or self.layer.ratio not in batch.groups:
            return
        assert cache.entries is not None
        latents = self.compressor.forward(x, batch, cache.tail)
        self.ops.write_entries(latents, batch, self.layer.ratio, self.rope, cache.entries)
        if self.indexer is not None:
            self.indexer.write_keys(x, latents, batch, cache)

    def forward(self, x: Tensor, batch: Batch, cache: LayerCache, index: Index | None) -> tuple[Tensor, Index | None]:
        """Attend for normed rows x [T, D]; returns y [T, D] and the index for the layers above."""
        ops, config = self.ops, self.config
        down = ops.linear(x, self.down)
        latent = ops.rms_norm(down[:, : config.q_rank], self.q_norm, config.eps)
        heads = ops.linear(latent, self.q_up).view(-1, config.heads, config.head_dim)
        q = ops.rotate_queries(heads, batch, self.rope, config.eps if config.q_head_norm else None)
        self.write_window(down[:, config.q_rank :], batch, cache)
        self.publish(x, batch, cache)
        if self.indexer is not None:
            index = self.indexer.forward(x, latent, batch, cache, index)
        elif self.layer.ratio and self.layer.index_source is None:
            index = Index(ops.everything(batch, self.layer.ratio))
        selection = index.selection if self.layer.ratio and index is not None else None
        keys = KeySources(cache.window, cache.entries, selection, self.layer.decoder)
        out = ops.attention(q, keys, self.sink, batch, self.rope)
        grouped = ops.grouped_linear(out.view(out.shape[0], config.o_groups, -1), self.out_down)
        return ops.linear(grouped, self.out_up), index
