"""The parallel part of a DeepSpec-style drafter: owns its layers as pure functions of context, block and positions.

Caches are `backbone`'s, the sequential heads `deepspark.heads`', weights `checkpoint`'s.
Source: DSpark specification, sections 1.1 and 1.2.  Shapes: R requests, N context tokens, g block rows, L layers.
"""

from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor, nn

from deepspark.backbone import BlockRows
from deepspark.deepspec.config import DeepSpecConfig
from deepspark.heads import SequentialHeads

__all__ = ["Context", "DeepSpecModel", "rotate"]


@dataclass(frozen=True, slots=True)
class Context:
    """What blocks see of the past: keys and values [L, R, N, kv heads, head_dim], and visible [R, N] bool."""

    keys: Tensor
    values: Tensor
    visible: Tensor


class RMSNorm(nn.Module):
    """weight * x / rms(x), statistics in float32 at least; `weighted=False` leaves the weight out."""

    def __init__(self, width: int, eps: float, *, weighted: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if weighted else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return normed if self.weight is None else self.weight * normed


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary embedding over the whole head [..., heads, head_dim] at `positions` [...]; pairs (t, t +
    head_dim/2).
    """
    half = x.shape[-1] // 2
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angles = positions[..., None, None].to(wide) * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Grouped attention of a block over its context and, without order, over itself."""

    def __init__(self, config: DeepSpecConfig) -> None:
        super().__init__()
        self.config = config
        width, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = (
            None if config.attention_k_eq_v else nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        )
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.v_norm = RMSNorm(dim, config.rms_norm_eps, weighted=False) if config.family == "gemma" else None
        self.scale = 1.0 if config.family == "gemma" else dim**-0.5

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [..., kv heads, head_dim] of rows `x` [..., D] at `positions` [...]."""
        raw = self.k_proj(x).unflatten(-1, (self.config.num_key_value_heads, -1))
        values = raw if self.v_proj is None else self.v_proj(x).unflatten(-1, (self.config.num_key_value_heads, -1))
        if self.v_norm is not None:
            values = self.v_norm(values)
        return rotate(self.k_norm(raw), positions, self.config.rope_theta), values

    @override
    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Attend from block rows `x` [R, g, D] to context [R, N, kv heads, head_dim], `visible` [R, N], and to the
        block.
        """
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (self.config.num_attention_heads, -1)))
        queries = rotate(queries, positions, self.config.rope_theta)
        block_keys, block_values = self.keys_values(x, positions)
        mask = torch.cat([visible, visible.new_ones(visible.shape[0], x.shape[1])], 1)
        out = nn.functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            torch.cat([keys, block_keys], 1).transpose(1, 2),
            torch.cat([values, block_values], 1).transpose(1, 2),
            attn_mask=mask[:, None, None, :],
            scale=self.scale,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)); SiLU for qwen3, tanh-GELU for gemma."""

    def __init__(self, config: DeepSpecConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = nn.GELU("tanh") if config.family == "gemma" else nn.SiLU()

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Apply to rows [..., D]."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One draft layer; context rows never pass it, they only give keys and values."""

    def __init__(self, config: DeepSpecConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.gemma = config.family == "gemma"
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        if self.gemma:
            self.pre_feedforward_layernorm = RMSNorm(width, eps)
            self.post_feedforward_layernorm = RMSNorm(width, eps)
            self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    @override
    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Run block rows [R, g, D] over one layer's context."""
        attended = self.self_attn(self.input_layernorm(x), positions, keys, values, visible)
        if not self.gemma:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class DeepSpecModel(nn.Module):
    """The whole drafter: projection of the taps, draft layers, last norm, sequential heads; embedding and head are the
    target's.
    """

    def __init__(self, config: DeepSpecConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.heads = SequentialHeads(config.heads)

    def context_rows(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [L, ..., kv heads, head_dim] of tapped activations [..., taps * D] at `positions`
        [...].

        Context rows skip the layers' input norm.
        """
        z = self.hidden_norm(self.fc(features))
        pairs = [layer.self_attn.keys_values(z, positions) for layer in self.layers]  # type: ignore[operator, union-attr]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def block(self, anchors: Tensor, positions: Tensor, context: Context) -> BlockRows:
        """Run blocks [anchor, noise, ...] of R requests: anchors [R], positions [R] of the anchors."""
        width = self.config.block_size
        ids = torch.full((anchors.shape[0], width), self.config.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        rows = positions[:, None] + torch.arange(width, device=positions.device)
        x = self.embed_tokens(ids)
        if self.config.family == "gemma":
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, context.keys[index], context.values[index], context.visible)
        normed = self.norm(x)
        return BlockRows(hidden=x, normed=normed, base=self.base_logits(normed))

    def base_logits(self, normed: Tensor) -> Tensor:
        """Return lm_head's logits [..., V] in float32 (float64 stays), soft-capped where the configuration says so."""
        logits = self.lm_head(normed)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)
