"""The model: embedding, blocks, final collapse and head. One class runs V4.1 and V4, told apart by configuration.

Letters, here and in every op:  T rows (tokens) of a step, Td of them in the decoder half, L rows with logits,
R sequences, H heads, D hidden or head size, S residual streams, E experts, k picks, V vocabulary, N or K entries.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch, Rope
from deepinfer.accelerator.ops import Ops
from deepinfer.model.attention import Attention
from deepinfer.model.config import LayerConfig, ModelConfig
from deepinfer.model.engram import Engram
from deepinfer.model.hyper_connection import HyperConnection, mix_parameters, mix_settings
from deepinfer.model.indexer import Index
from deepinfer.model.kv_cache import KVCache, LayerCache
from deepinfer.model.layers import dense_ratios, make_ropes
from deepinfer.model.moe import MoE
from deepinfer.model.weights import Weights


@dataclass(frozen=True)
class ModelOutput:
    """logits [L, V] wide; hidden [Td, taps * D] in the activation dtype: what a drafter reads (None without one)."""

    logits: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class Flow:
    """What passes from block to block: streams [T, S, D], the mix to read them with [T, S], the last index source's."""

    streams: Tensor
    mix: Tensor
    index: Index | None = None

    def pick(self, rows: Tensor) -> "Flow":
        """The flow of some rows; the index is dropped, the first decoder layer makes its own."""
        return Flow(self.streams.index_select(0, rows), self.mix.index_select(0, rows))


class Block:
    """One layer: Engram where it has one, attention, MoE, each inside its hyper-connection."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, weights: Weights, ops: Ops, rope: Rope, prefix: str
    ) -> None:
        self.layer = layer
        self.engram = Engram(config, layer.engram, weights, ops, f"{prefix}.engram") if layer.engram else None
        self.attention_mix = HyperConnection(config, weights, ops, prefix, "attn")
        self.attention = Attention(config, layer, weights, ops, f"{prefix}.attn", rope)
        self.ffn_mix = HyperConnection(config, weights, ops, prefix, "ffn")
        self.ffn = MoE(config, weights, ops, f"{prefix}.ffn", hashed=layer.hash_routing)

    def recall(self, flow: Flow, batch: Batch) -> Flow:
        """Add the n-gram memory to the streams, where this layer has one."""
        return flow if self.engram is None else replace(flow, streams=self.engram.forward(flow.streams, batch))

    def publish(self, flow: Flow, batch: Batch, cache: LayerCache) -> None:
        """Only write this layer's compressed KV and index keys, for rows that do not go on."""
        x, _ = self.attention_mix.enter(flow.streams, flow.mix)
        self.attention.publish(x, batch, cache)

    def forward(self, flow: Flow, batch: Batch, cache: LayerCache) -> Flow:
        """Run attention and MoE."""
        x, mix = self.attention_mix.enter(flow.streams, flow.mix)
        y, index = self.attention.forward(x, batch, cache, flow.index)
        streams = self.attention_mix.leave(flow.streams, y, mix)
        x, after = self.ffn_mix.enter(streams, mix.pre)
        streams = self.ffn_mix.leave(streams, self.ffn.forward(x, batch), after)
        return Flow(streams, after.pre, index)


class DeepSeek:
    """The whole text model over one accelerator's ops."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        wide = ops.precision.wide
        self.config, self.ops = config, ops
        self.ropes = make_ropes(config.rope, ops.device)
        self.embedding = weights.vector("embed.weight")
        self.blocks = [
            Block(config, layer, weights, ops, self.ropes[1 if layer.ratio else 0], f"layers.{layer.index}")
            for layer in config.layers
        ]
        self.norm = weights.vector("norm.weight", wide)
        self.head = weights.linear("head")
        self.collapse = None if config.hc_shifted else mix_parameters(weights, ops, "hc_head")
        self.taps = config.draft.target_layers if config.draft else ()

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        """Run one step: write cache memory for every row, return logits of `batch.logit_rows` and drafter features."""
        flow, batch = self.embed(batch), self._prepare(batch)
        taps: dict[int, Tensor] = {}
        for block in self.blocks:
            index = block.layer.index
            flow = block.recall(flow, batch)
            if index == self.config.first_decoder_layer and batch.decoder_rows is not None:
                block.publish(flow, batch, cache.layer(index))
                taps = {layer: tap.index_select(0, batch.decoder_rows) for layer, tap in taps.items()}
                flow, batch = flow.pick(batch.decoder_rows), self._prepare(batch.narrow())
            if flow.streams.shape[0] == 0:
                return self._nothing()
            if index in self.taps:
                taps[index] = flow.streams.to(self.ops.precision.wide).mean(1).to(self.ops.precision.dtype)
            flow = block.forward(flow, batch, cache.layer(index))
        hidden = torch.cat([taps[layer] for layer in self.taps], 1) if self.taps else None
        return ModelOutput(self._logits(flow, batch), hidden)

    def _nothing(self) -> ModelOutput:
        """The output of a step whose rows all stop before the decoder half (or that has none)."""
        config, ops = self.config, self.ops
        logits = torch.zeros((0, config.vocab_size), dtype=ops.precision.wide, device=ops.device)
        width = len(self.taps) * config.hidden
        hidden = torch.zeros((0, width), dtype=ops.precision.dtype, device=ops.device) if self.taps else None
        return ModelOutput(logits, hidden)

    def _prepare(self, batch: Batch) -> Batch:
        dense = dense_ratios(self.config, batch.max_context)
        return self.ops.prepare(batch, self.config.window, self.ropes, dense)

    def embed(self, batch: Batch) -> Flow:
        """All streams start as the embedding; the first sub-layer reads the first stream."""
        x = self.ops.embed(batch.token_ids, self.embedding)
        if batch.image_rows is not None and batch.image_features is not None:
            x = torch.where(batch.image_rows.unsqueeze(1), batch.image_features.to(x.dtype), x)
        mix = torch.zeros((x.shape[0], self.config.streams), dtype=self.ops.precision.wide, device=x.device)
        mix[:, 0] = 1.0
        return Flow(x.unsqueeze(1).repeat(1, self.config.streams, 1), mix)

    def _logits(self, flow: Flow, batch: Batch) -> Tensor:
        rows = flow.streams.index_select(0, batch.logit_rows)
        weights = flow.mix.index_select(0, batch.logit_rows)
        if self.collapse is not None:
            weights = self.ops.head_weights(rows, self.collapse, mix_settings(self.config))
        x = self.ops.rms_norm(self.ops.collapse(rows, weights), self.norm, self.config.eps)
        return self.ops.linear(x, self.head, wide=True)
