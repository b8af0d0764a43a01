"""The sampling transform: owns the one map from logits to the law a token is drawn from, for target and draft alike.

Penalties and bans that depend on the emitted prefix are `penalties`' business; drawing is left to `proposing` and
`verify`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepspark.errors import ConfigError, InputError

__all__ = [
    "GREEDY_BELOW",
    "FilterOrder",
    "SamplingSettings",
    "SettingsTable",
    "argmax",
    "one_hot",
    "transform",
    "transform_rows",
]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: a one-hot law, filters ignored."""

FilterOrder = Literal["p_k", "k_p"]
"""Whether top-p comes before top-k or after; it changes the law, so it must be the engine's plain-decoding order."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one request samples; the same settings must make p and q if acceptance is to be high (exactness needs only
    p).
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    order: FilterOrder = "p_k"
    ban: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must be >= 0 (0 is greedy), got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be >= 0 (0 keeps every token), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.order not in ("p_k", "k_p"):
            raise ConfigError(f"order must be 'p_k' or 'k_p', got {self.order!r}")

    @property
    def greedy(self) -> bool:
        """Whether the law is the one-hot argmax."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """The settings of T rows as tensors [T], so that a mixed batch is one transform."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    order: FilterOrder

    @classmethod
    def of(cls, settings: Sequence[SamplingSettings], device: torch.device | None = None) -> "SettingsTable":
        """Lay one row for each entry of `settings`; all must share one filter order.  Bans are applied as masks."""
        orders = {each.order for each in settings}
        if len(orders) != 1:
            raise ConfigError(
                f"one batch needs one filter order, got {sorted(orders)}; the order is the engine's, not a request's"
            )

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=column([each.temperature for each in settings], torch.float64),
            top_k=column([each.top_k for each in settings], torch.int64),
            top_p=column([each.top_p for each in settings], torch.float64),
            min_p=column([each.min_p for each in settings], torch.float64),
            order=orders.pop(),
        )


def argmax(rows: Tensor) -> Tensor:
    """Return the index of the largest entry of each row [..., V] -> [...]; ties go to the lowest index on every
    device.
    """
    vocab_size = rows.shape[-1]
    indices = torch.arange(vocab_size, device=rows.device).expand(rows.shape)
    tied = rows == rows.amax(-1, keepdim=True)
    return torch.where(tied, indices, vocab_size - 1).amin(-1)


def one_hot(tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Return the one-hot laws [..., V] of `tokens` [...]."""
    return torch.nn.functional.one_hot(tokens, vocab_size).to(dtype)


def _keep_top_p(probs: Tensor, ranked: Tensor, ranks: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of largest tokens whose mass reaches top_p (the crossing token included)."""
    mass = ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    kept = (before < top_p[:, None] * mass) | (top_p[:, None] >= 1)
    return torch.where(kept.gather(-1, ranks), probs, 0)


def _filtered(probs: Tensor, table: SettingsTable) -> Tensor:
    """Apply top-p, top-k and min-p to laws [T, V]; each filter sees the renormalised output of the one before."""
    order = probs.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    limit = torch.where(table.top_k > 0, table.top_k, probs.shape[-1])
    within = ranks < limit[:, None]
    if table.order == "k_p":
        probs = torch.where(within, probs, 0)
    probs = _keep_top_p(probs, probs.gather(-1, order), ranks, table.top_p)
    if table.order == "p_k":
        probs = torch.where(within, probs, 0)
    # min-p is relative to the largest probability, which every filter keeps: its place in the order is free.
    return torch.where(probs >= table.min_p[:, None] * probs.amax(-1, keepdim=True), probs, 0)


def transform_rows(logits: Tensor, table: SettingsTable, allowed: Tensor | None = None) -> Tensor:
    """Turn logits [T, V] into laws [T, V] under per-row settings; the result has the logits' dtype (at least float32).

    allowed: [T, V] or [V] bool, the grammar or ban mask (None allows all).  A row that allows no token raises
    InputError.
    Order: mask, temperature, filters, renormalise; greedy rows are the one-hot argmax of the masked logits.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if allowed is not None:
        if not bool(allowed.any(-1).all()):
            raise InputError("a sampling mask allows no token in at least one row; a grammar must leave one way on")
        logits = logits.masked_fill(~allowed, float("-inf"))
    greedy = table.temperature < GREEDY_BELOW
    scale = torch.where(greedy, torch.ones_like(table.temperature), table.temperature).to(logits.dtype)
    probs = torch.softmax(logits / scale[:, None], dim=-1)
    if bool(((table.top_k > 0) | (table.top_p < 1) | (table.min_p > 0)).any()):
        probs = _filtered(probs, table)
        probs = probs / probs.sum(-1, keepdim=True)
    if bool(greedy.any()):
        probs = torch.where(greedy[:, None], one_hot(argmax(logits), logits.shape[-1], probs.dtype), probs)
    return probs


def transform(logits: Tensor, settings: SamplingSettings, allowed: Tensor | None = None) -> Tensor:
    """Turn logits [..., V] into laws [..., V] under one request's settings; `allowed` [..., V] or [V] as in
    `transform_rows`.
    """
    vocab_size = logits.shape[-1]
    if settings.ban:
        outside = [token for token in settings.ban if not 0 <= token < vocab_size]
        if outside:
            raise InputError(f"banned tokens must lie in 0..{vocab_size - 1}, got {outside}")
        banned = torch.zeros(vocab_size, dtype=torch.bool, device=logits.device)
        banned[list(settings.ban)] = True
        allowed = ~banned if allowed is None else allowed & ~banned
    rows = logits.reshape(-1, vocab_size)
    mask = None if allowed is None else allowed.expand(logits.shape).reshape(-1, vocab_size)
    table = SettingsTable.of([settings] * rows.shape[0], logits.device)
    return transform_rows(rows, table, mask).reshape(logits.shape)
