"""The V4.1 draft stages (`mtp.*`): blocks that read what the target's taps saw and a block of noise tokens.

Owns the stages, their context in window KV and the head parameters; turning hidden rows into draft tokens
(Markov and confidence heads, noise, verification) is deepspark's, which reaches the stages by their shape.
Source: the section on the DSpark drafter of the model card.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.model.config import LayerConfig
from deepinfer.model.deepseek import Block, DeepSeek
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.weights import Weights


@dataclass(frozen=True)
class DraftHeads:
    """Parameters of the sequential heads: markov_embed and markov_head [V, rank], confidence [1, D + rank], wide."""

    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class DraftOutput:
    """hidden [R * B, D]: collapsed streams; normed: the same behind the norm; logits [R * B, V] wide: the head's."""

    hidden: Tensor
    normed: Tensor
    logits: Tensor


class DraftStages:
    """The drafter's backbone. Shares embedding, head and rotation tables with its target."""

    def __init__(self, target: DeepSeek, weights: Weights) -> None:
        draft = target.config.draft
        assert draft is not None
        wide = target.ops.precision.wide
        last = f"mtp.{draft.stages - 1}"
        self.config = replace(target.config, experts=draft.experts, top_k=draft.top_k)
        self.draft, self.target, self.ops = draft, target, target.ops
        self.projection = weights.linear("mtp.0.main_proj")
        self.projection_norm = weights.vector("mtp.0.main_norm.weight", wide)
        self.blocks = [
            Block(self.config, _stage_layer(index), weights, self.ops, target.ropes[0], f"mtp.{index}")
            for index in range(draft.stages)
        ]
        self.norm = weights.vector(f"{last}.norm.weight", wide)
        self.heads = DraftHeads(
            markov_embed=weights.vector(f"{last}.markov_head.embed.weight", wide),
            markov_head=weights.vector(f"{last}.markov_head.head.weight", wide),
            confidence=weights.vector(f"{last}.confidence_head.proj.weight", wide),
        )

    def write_context(self, hidden: Tensor, batch: Batch, cache: KVCache) -> None:
        """Store the stages' context KV of a target step: `hidden` [Td, taps * D] as `DeepSeek.forward` returned it.

        `batch` is that step's batch.  No stage runs its feed-forward on context rows.
        """
        ops = self.ops
        batch = ops.prepare(batch.narrow(), self.config.window, self.target.ropes, ())
        context = ops.rms_norm(ops.linear(hidden, self.projection), self.projection_norm, self.config.eps)
        for index, block in enumerate(self.blocks):
            _, kv = ops.linear(context, block.attention.down).split((self.config.q_rank, self.config.head_dim), 1)
            block.attention.write_window(kv, batch, cache.stage(index))

    def forward(self, batch: Batch, cache: KVCache) -> DraftOutput:
        """Run a block of B rows for each sequence: the anchor token, then B - 1 noise tokens, right after its context.

        Rows see the window before the anchor and one another.  Their own KV goes to the window slots of their
        positions, where the next target step overwrites it.
        """
        ops = self.ops
        rows = batch.positions.shape[0] // batch.query_starts.shape[0]
        batch = ops.prepare(batch, self.config.window, self.target.ropes, (), block=rows)
        flow = self.target.embed(batch)
        for index, block in enumerate(self.blocks):
            flow = block.forward(flow, batch, cache.stage(index))
        hidden = ops.collapse(flow.streams, flow.mix)
        normed = ops.rms_norm(hidden, self.norm, self.config.eps)
        return DraftOutput(hidden, normed, ops.linear(normed, self.target.head, wide=True))

    def block_ids(self, anchors: Tensor) -> Tensor:
        """Token ids [R, B] of a block: each sequence's anchor [R], then noise."""
        noise = torch.full((anchors.shape[0], self.draft.block_size - 1), self.draft.noise_token_id)
        return torch.cat((anchors.unsqueeze(1), noise.to(anchors)), 1)


def _stage_layer(index: int) -> LayerConfig:
    """A stage as a layer: window only; its context begins where the decoder half began."""
    return LayerConfig(
        index=index,
        ratio=0,
        kv_source=None,
        index_source=None,
        owns_kv=False,
        owns_index=False,
        owns_index_keys=False,
        candidates=None,
        decoder=True,
        engram=None,
        hash_routing=False,
    )
