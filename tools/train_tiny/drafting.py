"""The draft stages as they are trained: blocks at many anchors of a row at once, and their loss.

What the stages are is the model card's (DSpark drafter), the loss is DSpark's: cross-entropy, the distance to the
target's law, and the confidence head's own; training rows are text that the target wrote.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from network import Flow, Network

DECAY = 4.0
CROSS_ENTROPY, DISTANCE = 0.1, 0.9


@dataclass(frozen=True)
class Blocks:
    """Anchors of B rows: places [B, A], and which of their W drafts [B, A, W] have a token to be held against."""

    places: Tensor
    valid: Tensor


@dataclass(frozen=True)
class DraftLoss:
    """loss, and what it is made of; agreement [W] = mean 1 - TV by place; expected = tokens a round by these."""

    loss: Tensor
    cross_entropy: Tensor
    agreement: Tensor
    expected: Tensor


def draw_blocks(written: Tensor, starts: Tensor, count: int, width: int) -> Blocks:
    """Draw `count` anchors a row among the places where this and the next token were written by the target."""
    length = written.shape[1]
    following = F.pad(written, (0, width))
    begun = F.pad(starts, (0, width), value=-1)
    steps = torch.arange(1, width + 1, device=written.device)
    ahead = torch.arange(length, device=written.device).unsqueeze(1) + steps
    good = following[:, ahead] & (begun[:, ahead] == starts.unsqueeze(2)) & written.unsqueeze(2)
    good = good.cumprod(2).bool()
    score = torch.rand(written.shape, device=written.device) * good[..., 0]
    places = torch.topk(score, count, 1).indices
    return Blocks(places, good.gather(1, places.unsqueeze(2).expand(-1, -1, width)))


def draft_rows(network: Network, tokens: Tensor, starts: Tensor, taps: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Run the stages over all blocks: collapsed rows [B, A, W, D], before and behind the last norm."""
    draft, config = network.draft, network.config
    width = draft.block_size
    rows, anchors = blocks.places.shape
    length = tokens.shape[1]
    where = torch.arange(length, device=tokens.device)
    context = network.norm(network.linear(taps, "mtp.0.main_proj"), "mtp.0.main_norm.weight")
    ids = torch.full((rows, anchors, width), draft.noise_token_id, device=tokens.device)
    ids[..., 0].copy_(tokens.gather(1, blocks.places))
    places = (blocks.places.unsqueeze(2) + torch.arange(width, device=tokens.device)).flatten(1)
    anchor = blocks.places.repeat_interleave(width, 1).unsqueeze(2)
    begun = starts.gather(1, blocks.places).repeat_interleave(width, 1).unsqueeze(2)
    seen = (where < anchor) & (where >= anchor - config.window) & (where >= begun)
    block = torch.arange(anchors, device=tokens.device).repeat_interleave(width)
    own = (block.unsqueeze(1) == block).expand(rows, -1, -1)
    bias = network.bias([seen, own])
    at_context, at_block = network.turns(where)["plain"], network.turns(places)["plain"]
    flow = network.begin(ids.flatten(1))
    for stage in range(draft.stages):
        prefix = f"mtp.{stage}"
        x, written, pre = network.enter(flow, prefix, "attn")
        q, own_keys = network.queries(f"{prefix}.attn", x, at_block)
        old_keys = network.keys(f"{prefix}.attn", network.linear(context, f"{prefix}.attn.wkv"), at_context)
        out = network.attend(f"{prefix}.attn", q, torch.cat((old_keys, own_keys), 1), bias)
        y = network.output(f"{prefix}.attn", out, at_block)
        flow = Flow(network.pieces.leave(flow.streams, y, written), pre, {})
        x, written, pre = network.enter(flow, prefix, "ffn")
        y, _ = network.experts(f"{prefix}.ffn", x, draft.top_k)
        flow = Flow(network.pieces.leave(flow.streams, y, written), pre, {})
    hidden = network.collapse(flow)
    normed = network.norm(hidden, f"mtp.{draft.stages - 1}.norm.weight")
    shape = (rows, anchors, width, -1)
    return hidden.view(shape), normed.view(shape)


def draft_logits(network: Network, hidden: Tensor, normed: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, A, W, V] and confidence logits [B, A, W] when the tokens `before` [B, A, W] precede the rows."""
    last = f"mtp.{network.draft.stages - 1}"
    embedded = F.embedding(before, network.weight(f"{last}.markov_head.embed.weight"))
    bias = F.linear(embedded.to(network.dtype), network.weight(f"{last}.markov_head.head.weight").to(network.dtype))
    read = torch.cat((hidden.float(), embedded), -1)
    confidence = F.linear(read, network.weight(f"{last}.confidence_head.proj.weight")).squeeze(-1)
    return network.head(normed).float() + bias.float(), confidence


def draft_loss(network: Network, tokens: Tensor, starts: Tensor, written: Tensor, anchors: int) -> DraftLoss:
    """Train on `anchors` blocks of each of the rows [B, T] that the target wrote where `written` [B, T] says so."""
    width = network.draft.block_size
    with torch.no_grad():
        target = network(tokens, starts)
        blocks = draw_blocks(written, starts, anchors, width)
        steps = blocks.places.unsqueeze(2) + torch.arange(width, device=tokens.device)
        steps = steps.clamp_max(tokens.shape[1] - 2)
        picked = steps.flatten(1).unsqueeze(2).expand(-1, -1, target.hidden.shape[2])
        law = torch.softmax(network.head(target.hidden.gather(1, picked)).float(), -1).unflatten(1, steps.shape[1:])
        before = tokens.gather(1, steps.flatten(1)).view(steps.shape)
        label = tokens.gather(1, steps.flatten(1) + 1).view(steps.shape)
    hidden, normed = draft_rows(network, tokens, starts, target.taps, blocks)
    logits, confidence = draft_logits(network, hidden, normed, before)
    crossed = F.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none").view(label.shape)
    distance = (torch.softmax(logits, -1) - law).abs().sum(-1)
    agreement = (1 - distance.detach() / 2).clamp(0, 1)
    confident = F.binary_cross_entropy_with_logits(confidence, agreement, reduction="none")
    valid = blocks.valid.float()
    weights = valid * torch.exp(-torch.arange(width, device=tokens.device) / DECAY)
    total = weights.sum() + 1e-6
    loss = ((CROSS_ENTROPY * crossed + DISTANCE * distance + confident) * weights).sum() / total
    by_place = (agreement * valid).sum((0, 1)) / (valid.sum((0, 1)) + 1e-6)
    expected = 1 + ((agreement.cumprod(-1) * valid).sum((0, 1)) / (valid.sum((0, 1)) + 1e-6)).sum()
    return DraftLoss(loss, (crossed * weights).sum().detach() / total, by_place, expected)
