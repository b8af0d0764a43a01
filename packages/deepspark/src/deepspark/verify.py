"""Verification: owns the acceptance rules as pure functions of laws, drafts and explicit noise.

Which rows exist is the scheduler's decision, where the noise comes from is `noise`'s, what a stop token cuts is
`emission`'s.  Every rule emits `accepted` drafts and exactly one more token.  Source: DSpark specification, section
3.2.

Exactness needs q to be the law x was drawn from, p the law of plain decoding, and a cut that `admissibility` allows.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import torch
from torch import Tensor

from deepspark.errors import ConfigError, InputError
from deepspark.transform import argmax

__all__ = ["RULES", "Kind", "Noise", "Rows", "Rule", "Verdict", "VerifyKernels", "draw", "verify", "verify_rows"]

Rule = Literal["greedy", "chain", "coupled", "block", "match"]
"""`coupled` is the chain rule that judges the first unverified draft against the last row instead of drawing afresh
there:
same cost and tokens, and it admits cuts that depend on the draft itself (DSpark specification, section 3.3)."""

RULES: tuple[Rule, ...] = ("greedy", "chain", "coupled", "block", "match")


class Kind(IntEnum):
    """Where the last token of a step came from."""

    BONUS = 0
    """Drawn from the row behind the last verified draft, all of which were accepted."""
    RESIDUAL = 1
    """Drawn from what the target has and the draft lacks, after a rejection."""
    COUPLED = 2
    """The first unverified draft, accepted by the coupled last row."""


class VerifyKernels(Protocol):
    """The vocabulary-wide work of verification; a device implements these two, `ReferenceKernels` defines them."""

    def draw_excess(
        self, target: Tensor, draft: Tensor, target_scale: Tensor, draft_scale: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Draw [R] tokens from max(target_scale * p - draft_scale * q, 0), from p where that is empty; rows [R, V]."""

    def excess(self, target: Tensor, draft: Tensor, target_scale: Tensor) -> Tensor:
        """Return the mass [R] of max(target_scale * p - q, 0); rows [R, V]."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The random numbers of one verification; a rule reads only its own.

    accept: [R, g] uniforms (chain, block).  extra: [R] uniforms of the last token (chain, block).  match: Gumbel noise
    [T, V], or uniforms [T] for an engine that draws by inverse CDF; T is the number of target rows.
    """

    accept: Tensor | None = None
    extra: Tensor | None = None
    match: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Target rows of a ragged batch and the drafts they judge.

    P: [T, V] target laws (raw logits are enough for `greedy`), flat.  start: [R] first row of each request; row start+i
    judges draft i.  ell: [R] verified drafts; request r owns rows start..start+ell.  x: [R, g] drafts.
    Q: [S, g, V] draft laws as stored at draft time, or None when each draft was certain (one-hot q).
    slot: [R] where in Q a request's block lies (never the flat row).
    """

    P: Tensor
    start: Tensor
    ell: Tensor
    x: Tensor
    Q: Tensor | None
    slot: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step emits: `accepted` [R] drafts, then `token` [R]; `kind` [R] says where that token came from."""

    accepted: Tensor
    token: Tensor
    kind: Tensor

    def emitted(self, x: Tensor) -> list[list[int]]:
        """Return each request's tokens of this step as host lists; `x` [R, g] are the drafts that were judged."""
        drafts = x.tolist()
        counts = self.accepted.tolist()
        return [[*drafts[r][: counts[r]], token] for r, token in enumerate(self.token.tolist())]


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index a row by inverse CDF: the first whose running sum exceeds u * total.  [R, V], [R] -> [R] int64.

    Sums run in float64; an index of weight 0 is never returned, however the last sum was rounded.
    """
    cdf = weights.to(torch.float64).cumsum(-1)
    total = cdf[:, -1:]
    index = torch.searchsorted(cdf, uniforms.to(torch.float64)[:, None] * total, right=True)
    last = torch.searchsorted(cdf, total.contiguous(), right=False)
    return torch.minimum(index, last)[:, 0]


class ReferenceKernels:
    """The definition of the vocabulary-wide work, in plain PyTorch."""

    def draw_excess(
        self, target: Tensor, draft: Tensor, target_scale: Tensor, draft_scale: Tensor, uniforms: Tensor
    ) -> Tensor:
        """Draw from the excess of the scaled target over the scaled draft; see `VerifyKernels`."""
        weights = (target_scale[:, None] * target - draft_scale[:, None] * draft).clamp_min(0)
        # q = p to rounding leaves nothing to draw from; the law there is p itself.
        empty = weights.sum(-1, keepdim=True) <= 0
        return draw(torch.where(empty, target, weights), uniforms)

    def excess(self, target: Tensor, draft: Tensor, target_scale: Tensor) -> Tensor:
        """Return the mass of the excess; see `VerifyKernels`."""
        return (target_scale[:, None] * target - draft).clamp_min(0).sum(-1)


class _Judge:
    """Gathers the few numbers that the rules compare; holds one call's tensors and nothing beyond it."""

    def __init__(self, rows: Rows, kernels: VerifyKernels) -> None:
        self.rows = rows
        self.kernels = kernels
        self.width = rows.x.shape[1]
        offsets = torch.arange(self.width, device=rows.x.device)
        self.judged = offsets < rows.ell[:, None]
        # Offsets past a request's last row read that last row: defined memory, and never looked at.
        self.row_of = rows.start[:, None] + torch.minimum(offsets, rows.ell[:, None])
        self.p_x = rows.P[self.row_of, rows.x]
        if rows.Q is None:
            self.q_x = torch.ones_like(self.p_x)
        else:
            self.q_x = rows.Q[rows.slot[:, None], offsets, rows.x].to(self.p_x.dtype)

    def target(self, offset: Tensor) -> Tensor:
        """Return the target laws [R, V] at `offset` [R] of each block."""
        return self.rows.P[self.rows.start + offset]

    def draft(self, offset: Tensor) -> Tensor:
        """Return the draft laws [R, V] at `offset` [R] (clamped to the block) of each block."""
        offset = offset.clamp_max(self.width - 1)
        if self.rows.Q is not None:
            return self.rows.Q[self.rows.slot, offset].to(self.rows.P.dtype)
        law = torch.zeros(offset.shape[0], self.rows.P.shape[1], dtype=self.rows.P.dtype, device=self.rows.P.device)
        return law.scatter_(1, self.rows.x.gather(1, offset[:, None]), 1)

    def passes(self, uniforms: Tensor) -> Tensor:
        """Return [R, g]: u < min(1, p(x) / q(x)), without the division that q(x) = 0 would spoil."""
        return (uniforms * self.q_x < self.p_x) | ((self.p_x >= self.q_x) & (self.p_x > 0))


def _leading(ok: Tensor) -> Tensor:
    """Count the leading true entries of each row [R, g] -> [R]."""
    return ok.to(torch.int64).cumprod(-1).sum(-1)


def _chain(judge: _Judge, noise: Noise, *, couple: bool) -> Verdict:
    uniforms, extra = _need(noise.accept, "accept"), _need(noise.extra, "extra")
    ell = judge.rows.ell
    passed = judge.passes(uniforms.to(judge.p_x.dtype))
    accepted = _leading(passed & judge.judged)
    finished = accepted == ell
    coupled = finished & (ell < judge.width) & couple
    at_last = ell.clamp_max(judge.width - 1)[:, None]
    kept = coupled & passed.gather(1, at_last)[:, 0]
    scale = torch.ones_like(judge.p_x[:, 0])
    from_target = finished & ~coupled
    token = judge.kernels.draw_excess(
        judge.target(accepted), judge.draft(accepted), scale, torch.where(from_target, 0.0, scale), extra
    )
    token = torch.where(kept, judge.rows.x.gather(1, at_last)[:, 0], token)
    kind = torch.where(from_target, int(Kind.BONUS), torch.where(kept, int(Kind.COUPLED), int(Kind.RESIDUAL)))
    return Verdict(accepted, token, kind)


def _block(judge: _Judge, noise: Noise) -> Verdict:
    uniforms, extra = _need(noise.accept, "accept").to(judge.p_x.dtype), _need(noise.extra, "extra")
    ell = judge.rows.ell
    weight = torch.ones_like(judge.p_x[:, 0])
    accepted, weight_at = torch.zeros_like(ell), weight
    for offset in range(judge.width):
        # w_i = min(1, w_{i-1} p / q); q(x) = 0 cannot be drawn, and counts as certain acceptance where p > 0.
        ratio = torch.where(judge.q_x[:, offset] > 0, judge.p_x[:, offset] / judge.q_x[:, offset], torch.inf)
        weight = torch.where(judge.p_x[:, offset] > 0, (weight * ratio).clamp_max(1), 0)
        here = torch.full_like(ell, offset + 1)
        inside = torch.minimum(here, ell)
        gain = judge.kernels.excess(judge.target(inside), judge.draft(inside), weight)
        denominator = gain + 1 - weight
        # w = 1 and nothing in excess: the limit of the ratio is 1, and such a position is never the last one.
        threshold = torch.where(denominator > 0, gain / denominator, 1.0)
        threshold = torch.where(here == ell, weight, threshold)
        better = (here <= ell) & (uniforms[:, offset] < threshold)
        accepted = torch.where(better, here, accepted)
        weight_at = torch.where(better, weight, weight_at)
    bonus = accepted == ell
    target_scale = torch.where(bonus, 1.0, weight_at)
    draft_scale = torch.where(bonus, 0.0, torch.ones_like(weight_at))
    token = judge.kernels.draw_excess(judge.target(accepted), judge.draft(accepted), target_scale, draft_scale, extra)
    return Verdict(accepted, token, torch.where(bonus, int(Kind.BONUS), int(Kind.RESIDUAL)))


def _follow(rows: Rows, plain: Tensor) -> Verdict:
    """Accept while a draft equals what plain decoding emits at its row; `plain` [T] are those tokens."""
    offsets = torch.arange(rows.x.shape[1], device=rows.x.device)
    row_of = rows.start[:, None] + torch.minimum(offsets, rows.ell[:, None])
    accepted = _leading((plain[row_of] == rows.x) & (offsets < rows.ell[:, None]))
    kind = torch.where(accepted == rows.ell, int(Kind.BONUS), int(Kind.RESIDUAL))
    return Verdict(accepted, plain[rows.start + accepted], kind)


def _match(rows: Rows, noise: Noise) -> Verdict:
    numbers = _need(noise.match, "match")
    if numbers.dim() == 1:
        return _follow(rows, draw(rows.P, numbers))
    return _follow(rows, argmax(rows.P.log() + numbers))


def _need(noise: Tensor | None, name: str) -> Tensor:
    if noise is None:
        raise InputError(f"this rule needs Noise.{name}; draw it with deepspark.noise under the request's seed")
    return noise


def _check(rows: Rows, rule: Rule) -> None:
    if rule not in RULES:
        raise ConfigError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    requests, width = rows.x.shape
    if width == 0:
        raise InputError("drafts x must be [R, g] with g >= 1, got g = 0; without drafts sample from P directly")
    if rows.ell.shape != (requests,) or rows.start.shape != (requests,) or rows.slot.shape != (requests,):
        raise InputError(f"ell, start and slot must be [{requests}] as x has {requests} requests")
    if rows.Q is not None and rows.Q.shape[1:] != (width, rows.P.shape[1]):
        raise InputError(f"Q must be [slots, {width}, {rows.P.shape[1]}] to fit x and P, got {tuple(rows.Q.shape)}")


def verify_rows(rows: Rows, noise: Noise, rule: Rule = "chain", kernels: VerifyKernels | None = None) -> Verdict:
    """Judge the drafts of a ragged batch; see `Rows` for layouts.  Pure: equal arguments give equal verdicts.

    kernels: a device's `VerifyKernels`, None the reference.  ell may not exceed g (not checked: it lives on the
    device).
    """
    _check(rows, rule)
    if rule == "greedy":
        return _follow(rows, argmax(rows.P))
    if rule == "match":
        return _match(rows, noise)
    judge = _Judge(rows, kernels or ReferenceKernels())
    return _block(judge, noise) if rule == "block" else _chain(judge, noise, couple=rule == "coupled")


def verify(P: Tensor, Q: Tensor | None, x: Tensor, ell: Tensor, noise: Noise, rule: Rule = "chain") -> Verdict:
    """Judge padded blocks: P [R, g+1, V], Q [R, g, V] or None (one-hot at x), x [R, g], ell [R]; noise as in `Noise`.

    Match noise is [R, g+1, V] or [R, g+1].  Everything else as in `verify_rows`.
    """
    requests, width = x.shape
    if P.shape[:2] != (requests, width + 1):
        raise InputError(
            f"P must be [{requests}, {width + 1}, V] for drafts [{requests}, {width}], got {tuple(P.shape)}"
        )
    index = torch.arange(requests, device=x.device)
    rows = Rows(P=P.flatten(0, 1), start=index * (width + 1), ell=ell, x=x, Q=Q, slot=index)
    flat = None if noise.match is None else noise.match.flatten(0, 1)
    return verify_rows(rows, Noise(noise.accept, noise.extra, flat), rule)
