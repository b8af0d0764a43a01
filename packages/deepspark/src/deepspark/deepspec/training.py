"""Training a drafter: owns the choice of anchors, the teacher-forced forward pass and the loss; optimisers are the
caller's.

Source: DSpark specification, section 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspark.deepspec.backbone import visible_context
from deepspark.deepspec.model import Context, DeepSpecModel
from deepspark.errors import InputError

__all__ = ["Anchors", "LossSettings", "Losses", "TrainingRows", "choose_anchors", "drafter_loss", "training_rows"]


@dataclass(frozen=True, slots=True)
class Anchors:
    """Training blocks of one sequence.

    positions: [A] ascending; keep: [A] bool, unused slots are False.  labels: [A, g] token t+1+k (the sequence's last
    one beyond its end).  valid: [A, g] bool, every label up to here is supervised.
    """

    positions: Tensor
    keep: Tensor
    labels: Tensor
    valid: Tensor


def choose_anchors(ids: Tensor, loss_mask: Tensor, uniforms: Tensor, num_anchors: int, block_size: int) -> Anchors:
    """Choose up to `num_anchors` anchors without replacement: the eligible positions of smallest `uniforms` [T-1].

    ids: [T]; loss_mask: [T], nonzero where supervised.  Position t is eligible iff t and t+1 are supervised.
    """
    supervised = loss_mask > 0
    eligible = supervised[:-1] & supervised[1:]
    if uniforms.shape != eligible.shape:
        raise InputError(
            f"uniforms must be [{eligible.shape[0]}], one a position with a successor, got {list(uniforms.shape)}"
        )
    ranked = torch.where(eligible, uniforms, torch.inf).argsort(stable=True)[:num_anchors]
    chosen = ranked[eligible[ranked]].sort().values
    positions = torch.zeros(num_anchors, dtype=torch.int64, device=ids.device)
    positions[: chosen.shape[0]] = chosen
    keep = torch.arange(num_anchors, device=ids.device) < chosen.shape[0]
    at = positions[:, None] + 1 + torch.arange(block_size, device=ids.device)
    inside = at.clamp_max(ids.shape[0] - 1)
    valid = ((at < ids.shape[0]) & supervised[inside]).to(torch.int64).cumprod(-1).bool() & keep[:, None]
    return Anchors(positions, keep, ids[inside], valid)


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Draft logits [A, g, V] and confidence logits [A, g] (None without that head) of teacher-forced blocks."""

    logits: Tensor
    confidence_logits: Tensor | None


def training_rows(model: DeepSpecModel, ids: Tensor, features: Tensor, anchors: Anchors) -> TrainingRows:
    """Run all blocks of one sequence: a block at t sees context positions < t and itself; row k is fed the true token
    t+k.

    ids: [T]; features: [T, taps * D], the target's tapped activations.
    """
    length, count = ids.shape[0], anchors.positions.shape[0]
    keys, values = model.context_rows(features, torch.arange(length, device=ids.device))
    first = torch.zeros_like(anchors.positions)
    context = Context(
        keys=keys[:, None].expand(-1, count, -1, -1, -1),
        values=values[:, None].expand(-1, count, -1, -1, -1),
        visible=visible_context(anchors.positions, first, length, model.config.attention_window),
    )
    start = ids[anchors.positions]
    rows = model.block(start, anchors.positions, context)
    previous = torch.cat([start[:, None], anchors.labels[:, :-1]], 1)
    return TrainingRows(*model.heads.teacher_forced(rows.hidden, rows.normed, rows.base, previous))


@dataclass(frozen=True, slots=True)
class LossSettings:
    """decay: delta of the position weights exp(-k / delta); a_ce, a_tv, a_conf: factors of the three terms."""

    decay: float = 4.0
    a_ce: float = 0.1
    a_tv: float = 0.9
    a_conf: float = 1.0


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss and its parts; tau is the accepted length that the training rows predict, extra token counted (no
    gradient).
    """

    loss: Tensor
    ce: Tensor
    l1: Tensor
    conf: Tensor | None
    tau: Tensor


def drafter_loss(rows: TrainingRows, anchors: Anchors, target_logits: Tensor, settings: LossSettings) -> Losses:
    """Return a_ce CE(draft, token) + a_tv |softmax(draft) - softmax(target)|_1 + a_conf BCE(confidence, 1 - TV).

    target_logits: [T, V] of the sequence; row k of a block at t is compared with row t+k.  Means are weighted over all
    valid slots; the confidence's label is detached.
    """
    width = anchors.labels.shape[1]
    offsets = torch.arange(width, device=anchors.labels.device)
    at = (anchors.positions[:, None] + offsets).clamp_max(target_logits.shape[0] - 1)
    weights = anchors.valid * torch.exp(-offsets / settings.decay)

    def mean(values: Tensor) -> Tensor:
        return (weights * values).sum() / (weights.sum() + 1e-6)

    draft_log = torch.log_softmax(rows.logits, -1)
    distance = (draft_log.exp() - torch.softmax(target_logits[at], -1)).abs().sum(-1)
    ce = mean(-draft_log.gather(-1, anchors.labels[..., None])[..., 0])
    l1 = mean(distance)
    agreement = (1 - distance / 2).detach()
    loss = settings.a_ce * ce + settings.a_tv * l1
    conf = None
    if rows.confidence_logits is not None:
        conf = mean(
            torch.nn.functional.binary_cross_entropy_with_logits(rows.confidence_logits, agreement, reduction="none")
        )
        loss = loss + settings.a_conf * conf
    survival = torch.where(anchors.valid, agreement, 0).cumprod(-1).sum(-1)
    tau = 1 + survival[anchors.keep].mean()
    return Losses(loss, ce, l1, conf, tau)
