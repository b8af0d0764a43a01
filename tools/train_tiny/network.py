"""The demo model as it is trained: V4.1's layers over whole rows of tokens, with dense masks and stacked experts.

It computes what `deepinfer.model` computes for the same weights (a test compares both); caches, index selection and
batches of requests are the engine's.  Rows are short enough that an index would select every entry, so indexers have no
part here and their weights stay as they were drawn.

Letters: B rows, T tokens, D hidden size, S streams, H heads, E experts, K keys.
"""

from dataclasses import dataclass
from typing import cast, override

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepinfer.model.config import LayerConfig, ModelConfig
from deepinfer.model.engram import make_hash
from deepinfer.model.inventory import TensorSpec, inventory
from deepinfer.model.layers import make_ropes
from pieces import Pieces
from rounding import fp4_rows, fp8_blocks, fp8_rows

SPARE_KEYS = 8
"""Keys behind all others: the first is the attention sink; so many, because fast attention wants whole eights."""
STACKED = ("w1", "w3", "w2")


@dataclass
class Flow:
    """What passes between layers: streams [B, T, S, D], the mix to read them with [B, T, S], entries by their owner."""

    streams: Tensor
    mix: Tensor
    entries: dict[int, Tensor]


@dataclass(frozen=True)
class Places:
    """Where tokens stand: cos and sin by kind of layer [T, rope / 2], and the bias of keys by ratio [B, 1, T, K]."""

    turns: dict[str, tuple[Tensor, Tensor]]
    bias: dict[int, Tensor]


@dataclass(frozen=True)
class Output:
    """hidden [B, T, D] behind the last norm; taps [B, T, taps * D]; loads: how often experts were picked, by layer."""

    hidden: Tensor
    taps: Tensor
    loads: dict[str, Tensor]


def document_starts(tokens: Tensor, bos: int) -> Tensor:
    """The place of the beginning of each token's document: [B, T]."""
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return torch.where(tokens == bos, places, 0).cummax(1).values


class Network(nn.Module):
    """All parameters by their names in a checkpoint ("/" for "."), and the forward pass.

    rounded   pass weights, activations and keys through their formats
    dtype     of activations and of what is multiplied
    pieces    the element-wise parts, plain or compiled
    """

    def __init__(
        self, config: ModelConfig, ids: Tensor, dtype: torch.dtype, seed: int, pieces: Pieces | None = None
    ) -> None:
        """`config` must be the one without quantisation; `ids` [V] are the compressed ids of the tokens."""
        super().__init__()
        assert config.draft is not None
        self.config, self.draft = config, config.draft
        self.dtype, self.rounded, self.pieces = dtype, False, pieces or Pieces()
        self.specs = inventory(config)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in _initial(self.specs, config, generator).items():
            trained = ".indexer." not in name and not name.endswith(("bias", "bias_vl"))
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor, requires_grad=trained))
        cpu = torch.device("cpu")
        self.hashes = {
            layer.index: make_hash(config, layer.engram.order, ids, cpu)
            for layer in config.layers
            if layer.engram is not None
        }
        # Buffers, because a graph may not copy from the host.
        self.register_buffer("ids", ids)
        for index, hashing in self.hashes.items():
            self.register_buffer(f"primes_{index}", hashing.primes)
            self.register_buffer(f"offsets_{index}", hashing.offsets)
        for rope in make_ropes(config.rope, cpu):
            self.register_buffer(rope.name, rope.frequencies)

    def weight(self, name: str) -> Tensor:
        """A parameter, in float32."""
        return cast(Tensor, self.get_parameter(name.replace(".", "/")))

    def fp8(self, name: str) -> Tensor:
        """A weight that is stored in FP8, in the dtype of products."""
        weight = self.weight(f"{name}.weight")
        return (fp8_blocks(weight) if self.rounded else weight).to(self.dtype)

    def linear(self, x: Tensor, *names: str) -> Tensor:
        """X times the FP8 weights of these names, one behind the other; inputs pass through FP8."""
        weights = [self.fp8(name) for name in names]
        return F.linear(self.activation(x), torch.cat(weights) if len(weights) > 1 else weights[0])

    def activation(self, x: Tensor) -> Tensor:
        """The input of a weight in FP8 or FP4."""
        return self.pieces.fp8_rows(x) if self.rounded else x

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm with the weight `name`."""
        return self.pieces.norm(x, self.weight(name), self.config.eps)

    def places(self, starts: Tensor) -> Places:
        """Masks and turns of rows whose documents start at `starts` [B, T]."""
        count = starts.shape[1]
        where = torch.arange(count, device=starts.device)
        same = starts.unsqueeze(2) == starts.unsqueeze(1)
        ago = where.unsqueeze(1) - where
        window = same & (ago >= 0) & (ago < self.config.window)
        seen = {0: [window]}
        for ratio in self.config.ratios:
            first = torch.arange(0, count - ratio + 1, ratio, device=starts.device)
            seen[ratio] = [window, same[:, :, first] & (first + ratio - 1 <= where.unsqueeze(1))]
        bias = {ratio: self.bias(masks) for ratio, masks in seen.items()}
        return Places(self.turns(where), bias)

    def bias(self, masks: list[Tensor]) -> Tensor:
        """What is added to scores: masks [B, T, keys] one behind the other, then the sink and the spare keys."""
        sink = torch.zeros((*masks[0].shape[:2], SPARE_KEYS), dtype=torch.bool, device=masks[0].device)
        sink[..., 0].fill_(True)
        shown = torch.cat((*masks, sink), -1)
        return (
            torch.zeros(shown.shape, dtype=self.dtype, device=shown.device)
            .masked_fill_(~shown, -torch.inf)
            .unsqueeze(1)
        )

    def turns(self, places: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cos and sin at `places` [...] for both kinds of layers: [..., rope / 2]."""
        made = {}
        for name in ("plain", "compressed"):
            angles = places.unsqueeze(-1).float() * self.get_buffer(name)
            made[name] = angles.cos(), angles.sin()
        return made

    @override
    def forward(self, tokens: Tensor, starts: Tensor) -> Output:
        """Run the layers over rows [B, T]."""
        places = self.places(starts)
        flow = self.begin(tokens)
        taps: dict[int, Tensor] = {}
        loads: dict[str, Tensor] = {}
        for layer in self.config.layers:
            prefix = f"layers.{layer.index}"
            if layer.engram is not None:
                flow.streams = self.recall(f"{prefix}.engram", layer, flow.streams, self.grams(tokens, starts))
            if layer.index in self.draft.target_layers:
                taps[layer.index] = flow.streams.float().mean(2).to(self.dtype)
            x, written, pre = self.enter(flow, prefix, "attn")
            y = self.attention(f"{prefix}.attn", layer, x, places, flow.entries)
            flow.streams, flow.mix = self.pieces.leave(flow.streams, y, written), pre
            x, written, pre = self.enter(flow, prefix, "ffn")
            y, loads[prefix] = self.experts(f"{prefix}.ffn", x, self.config.top_k)
            flow.streams, flow.mix = self.pieces.leave(flow.streams, y, written), pre
        hidden = self.norm(self.collapse(flow), "norm.weight")
        return Output(hidden, torch.cat([taps[layer] for layer in self.draft.target_layers], -1), loads)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed rows, in the dtype of products."""
        return F.linear(hidden, self.weight("head.weight").to(self.dtype))

    def begin(self, tokens: Tensor) -> Flow:
        """All streams start as the embedding; the first sub-layer reads the first of them."""
        x = F.embedding(tokens, self.weight("embed.weight").to(self.dtype))
        mix = torch.zeros((*tokens.shape, self.config.streams), device=x.device)
        mix[..., 0].fill_(1.0)
        return Flow(x.unsqueeze(2).expand(-1, -1, self.config.streams, -1), mix, {})

    def collapse(self, flow: Flow) -> Tensor:
        """Read the streams: [B, T, D]."""
        return self.pieces.collapse(flow.streams, flow.mix)

    def enter(self, flow: Flow, prefix: str, part: str) -> tuple[Tensor, Tensor, Tensor]:
        """A sub-layer's input, how its output is written back, and how the next one reads."""
        config = self.config
        fn, base, scale = (self.weight(f"{prefix}.hc_{part}_{name}") for name in ("fn", "base", "scale"))
        flat = flow.streams.flatten(2)
        z = F.linear(flat, fn.to(self.dtype)).float() * self.pieces.inverse_size(flat, config.eps)
        pre, written = self.pieces.mixing(z, base, scale, config.sinkhorn_iters, config.hc_eps)
        return self.norm(self.collapse(flow), f"{prefix}.{part}_norm.weight"), written, pre

    def queries(self, prefix: str, x: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, d] and window keys [B, T, d], turned; the keys as they are stored."""
        config = self.config
        down = self.linear(x, f"{prefix}.wq_a", f"{prefix}.wkv")
        latent = self.norm(down[..., : config.q_rank], f"{prefix}.q_norm.weight")
        q = self.linear(latent, f"{prefix}.wq_b").unflatten(-1, (config.heads, config.head_dim))
        q = self.pieces.rotate(q, turns[0].unsqueeze(-2), turns[1].unsqueeze(-2))
        return q, self.keys(prefix, down[..., config.q_rank :], turns)

    def keys(self, prefix: str, kv: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Window keys of the bare projection, as they are stored."""
        made = self.pieces.rotate(self.norm(kv, f"{prefix}.kv_norm.weight"), *turns)
        return self.pieces.fp8_rows(made) if self.rounded else made

    def attention(
        self, prefix: str, layer: LayerConfig, x: Tensor, places: Places, entries: dict[int, Tensor]
    ) -> Tensor:
        """Attend over the window and, where the layer reads them, compressed entries."""
        turns = places.turns["compressed" if layer.ratio else "plain"]
        q, window = self.queries(prefix, x, turns)
        keys = [window]
        if layer.owns_kv:
            whole = x.shape[1] // layer.ratio * layer.ratio
            first = turns[0][: whole : layer.ratio], turns[1][: whole : layer.ratio]
            name = f"{prefix}.compressor"
            pooled = self.pool(name, layer.ratio, *self.project(name, layer.ratio, x))
            entries[layer.index] = self.entry(pooled, first)
        if layer.kv_source is not None:
            keys.append(entries[layer.kv_source])
        return self.output(prefix, self.attend(prefix, q, torch.cat(keys, 1), places.bias[layer.ratio]), turns)

    def project(self, prefix: str, ratio: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """A compressor's values and gates [B, T, d], float32; without a gate its place is taken by the values."""
        values = F.linear(x, self.weight(f"{prefix}.wkv.weight").to(self.dtype)).float()
        if ratio == 1:
            return values, values
        return values, F.linear(x, self.weight(f"{prefix}.wgate.weight").to(self.dtype)).float()

    def pool(self, prefix: str, ratio: int, values: Tensor, gates: Tensor) -> Tensor:
        """Latents [B, T / ratio, d] of groups of tokens."""
        if ratio > 1:
            whole = values.shape[1] // ratio * ratio
            values, gates = (part[:, :whole].unflatten(1, (-1, ratio)) for part in (values, gates))
            values = (torch.softmax(gates, 2) * values).sum(2)
        return self.norm(values.to(self.dtype), f"{prefix}.norm.weight")

    def entry(self, latents: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Compressed keys of latents, as they are stored."""
        made = self.pieces.rotate(latents, *turns)
        return self.pieces.fp4_entries(made) if self.rounded else made

    def attend(self, prefix: str, q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
        """Attention from q [B, T, H, d] to keys [B, K, d], which are values too; the sink is a key of zeros.

        Its score is a head's own number: an extra channel, 1 in the sink's key and that number in the queries.
        """
        width = q.shape[-1]
        sink = self.weight(f"{prefix}.attn_sink") * width**0.5
        extra = F.pad(sink.view(-1, 1), (0, SPARE_KEYS - 1)).to(q.dtype)
        q = torch.cat((q, extra.expand(*q.shape[:2], -1, -1)), -1).transpose(1, 2)
        k = F.pad(keys, (0, SPARE_KEYS, 0, SPARE_KEYS))
        mark = torch.zeros_like(k[0])
        mark[keys.shape[1], width].fill_(1.0)
        k = (k + mark).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        mask = bias.expand(-1, q.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(q, k, k[..., :width], attn_mask=mask, scale=width**-0.5)
        return out.transpose(1, 2)

    def output(self, prefix: str, out: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Turn values [B, T, H, d] back and project them, group by group, then together."""
        config = self.config
        out = self.pieces.rotate(out, turns[0].unsqueeze(-2), -turns[1].unsqueeze(-2))
        grouped = out.flatten(2).unflatten(2, (config.o_groups, -1))
        down = self.fp8(f"{prefix}.wo_a").unflatten(0, (config.o_groups, -1))
        return self.linear(torch.einsum("btgk,grk->btgr", grouped, down).flatten(2), f"{prefix}.wo_b")

    def experts(self, prefix: str, x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Every expert works on every token, with a share of zero where it was not picked; the shared one last."""
        scores = F.softplus(F.linear(x.float(), self.weight(f"{prefix}.gate.weight"))).sqrt()
        picks = torch.topk(scores.detach() + self.weight(f"{prefix}.gate.bias"), top_k, -1).indices
        chosen = torch.zeros_like(scores).scatter_(-1, picks, 1.0)
        shares = scores * chosen
        if self.config.normalize_top_k and top_k > 1:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        shares = F.pad(shares * self.config.routed_scale, (0, 1), value=1.0)
        x = self.activation(x)
        gate, up, down = (self.stack(prefix, name) for name in STACKED)
        hidden = self.pieces.swiglu(F.linear(x, gate), F.linear(x, up), shares, self.config.swiglu_limit)
        return self.activation(hidden).flatten(-2) @ down, chosen.flatten(0, -2).mean(0)

    def stack(self, prefix: str, name: str) -> Tensor:
        """A matrix of all experts, the shared one last, its inner channels one behind the other: [(E + 1) * I, D]."""
        routed, shared = self.weight(f"{prefix}.experts.{name}"), self.weight(f"{prefix}.shared_experts.{name}.weight")
        if self.rounded:
            routed, shared = fp4_rows(routed), fp8_blocks(shared)
        stacked = torch.cat((routed, shared.unsqueeze(0)))
        return (stacked.transpose(1, 2) if name == "w2" else stacked).flatten(0, 1).to(self.dtype)

    def grams(self, tokens: Tensor, starts: Tensor) -> list[Tensor]:
        """Each token and its predecessors [B, T], the nearest first; -1 before the start of its document."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        found = [tokens]
        for ago in range(1, self.config.history + 1):
            earlier = F.pad(tokens, (ago, 0))[:, : tokens.shape[1]]
            found.append(torch.where(places - ago >= starts, earlier, -1))
        return found

    def recall(self, prefix: str, layer: LayerConfig, streams: Tensor, grams: list[Tensor]) -> Tensor:
        """Add the n-gram memory to the streams."""
        hashing = self.hashes[layer.index]
        ids, primes = self.get_buffer("ids"), self.get_buffer(f"primes_{layer.index}")
        hashed: Tensor | None = None
        columns: list[Tensor] = []
        for gram, multiplier in zip(grams, hashing.multipliers.tolist(), strict=True):
            product = torch.where(gram < 0, hashing.pad, ids[gram.clamp_min(0)]) * multiplier
            hashed = product if hashed is None else hashed ^ product
            columns.append(hashed)
        heads = primes.shape[0] // (len(columns) - 1)
        rows = torch.stack(columns[1:], -1).repeat_interleave(heads, -1) % primes + self.get_buffer(
            f"offsets_{layer.index}"
        )
        table = self.weight(f"{prefix}.embed.weight")
        found = F.embedding(rows, fp8_rows(table) if self.rounded else table).flatten(2).to(self.dtype)
        count, width = streams.shape[2:]
        memory = self.linear(found, f"{prefix}.wkv").unflatten(-1, (count + 1, width))
        weights = self.weight(f"{prefix}.q_weight") * self.weight(f"{prefix}.k_weight")
        return self.pieces.gate_memory(streams, memory, weights, self.config.eps)


def _initial(specs: dict[str, TensorSpec], config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw all parameters; matrices of experts are stacked."""
    made: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, spec in specs.items():
        tensor = _draw(name, spec.shape, config, generator)
        head, _, tail = name.partition(".experts.")
        if tail and ".shared_experts." not in name:
            stacks.setdefault(f"{head}.experts.{tail.split('.')[1]}", []).append(tensor)
        else:
            made[name] = tensor
    return made | {name: torch.stack(tensors) for name, tensors in stacks.items()}


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    last = name.rsplit(".", 1)[-1]
    if last.endswith("_scale"):
        return torch.full(shape, 0.3)
    if last.endswith("_base"):
        return _mixing_base(name, config.streams)
    if last in ("attn_sink", "bias", "bias_vl") or "markov_head.head" in name or "confidence_head" in name:
        return torch.zeros(shape)
    if "norm" in name or last in ("q_weight", "k_weight"):
        return torch.ones(shape)
    spread = float(shape[-1] ** -0.5)
    if name == "embed.weight" or ".embed." in name:
        spread = 0.5 if name == "embed.weight" else 0.1
    if name == "head.weight" or ".wo_b." in name or name.endswith(".w2.weight"):
        spread *= 0.3
    return torch.randn(shape, generator=generator) * spread


def _mixing_base(name: str, count: int) -> Tensor:
    """Sub-layers read one stream most, each the next one; all write to all, and streams keep to themselves."""
    parts = name.split(".")
    turn = (2 * int(parts[1]) + ("ffn" in parts[-1])) % count
    pre = torch.full((count,), -1.5)
    pre[turn] = 1.0
    return torch.cat((pre, torch.zeros(count), (3.0 * torch.eye(count)).flatten()))
