"""How logits become tokens: adjustments, masks, filters, counter-based noise, log-probabilities.

The order is that of most engines: adjustments (penalties, bias, banned tokens), mask, temperature, top_k, top_p, min_p.

Noise is an integer hash of (request seed, purpose, position, vocabulary index): no state, the same numbers on every
device and in every batch.  Which rows are sampled with which parameters is the engine's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.ops.settings import OpsSettings

GREEDY_TEMPERATURE = 1e-5
"""Below this a row takes its best token, the lowest index among equals, and its filters are ignored."""

PURPOSE_SAMPLE = 0
"""Noise for the token at a position; other uses of randomness have other purposes, so that none meets another's."""

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_NOISE_BITS = 52  # as many as leave room for the half that keeps a uniform number off 0 and 1 in float64


@dataclass(frozen=True)
class SamplingRows:
    """How each row of logits is sampled, on the device; `filtered` says whether any row uses top_k, top_p or min_p.

    temperature, top_p, min_p [L]  float64
    top_k [L]                      int64, 0 = all
    seeds, positions [L]           int64: the request's seed and the absolute position of the token that is drawn
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    filtered: bool


@dataclass(frozen=True)
class TokenAdjustments:
    """Logits that change before temperature, on the device; no logit is named twice.

    rows, tokens [N]  int64: which logit
    repetition [N]    float64, above 0: a positive logit is divided by it, any other multiplied
    addend [N]        float64: added afterwards; -inf bans the token
    """

    rows: Tensor
    tokens: Tensor
    repetition: Tensor
    addend: Tensor


class SamplingOps(OpsSettings):
    """Sampling and log-probabilities."""

    def adjust(self, logits: Tensor, adjustments: TokenAdjustments) -> Tensor:
        """Return logits [L, V] with `adjustments` made, each in the logits' own dtype; the given ones stay."""
        place = (adjustments.rows, adjustments.tokens)
        old = logits[place]
        repetition, addend = adjustments.repetition.to(logits.dtype), adjustments.addend.to(logits.dtype)
        new = torch.where(old > 0, old / repetition, old * repetition) + addend
        return logits.index_put(place, new)

    def mask_tokens(self, logits: Tensor, bitmask: Tensor) -> Tensor:
        """Return logits [L, V] with -inf where `bitmask` int32 [L, ceil(V / 32)] has a 0; the given ones stay.

        Bit v % 32 of word v // 32 stands for token v, from the lowest bit on; a row of -1 allows every token.
        """
        # Byte by byte, the lowest first: what lies between is a quarter as large as for whole words.
        bits = 1 << torch.arange(8, dtype=torch.uint8, device=bitmask.device)
        banned = (bitmask.view(torch.uint8).unsqueeze(-1) & bits) == 0
        return logits.masked_fill(banned.flatten(1)[:, : logits.shape[1]], -torch.inf)

    def greedy(self, logits: Tensor) -> Tensor:
        """Return the best token of each row of logits [L, V], the lowest index among equals: int64 [L]."""
        return logits.argmax(-1)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Draw one token from each row of logits [L, V]: int64 [L].

        The order is temperature, top_k, top_p, min_p; each filter works on what the one before left, renormalised.
        The draw is the largest of (scaled logit + Gumbel noise), which samples the filtered distribution exactly, so
        a token depends on its row, its request's seed and its position alone.
        """
        is_greedy = rows.temperature < GREEDY_TEMPERATURE
        noise = gumbel_noise(rows.seeds, PURPOSE_SAMPLE, rows.positions, logits.shape[1])
        return torch.where(is_greedy, self.greedy(logits), (_shaped(logits, rows) + noise).argmax(-1))

    def shape_logits(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Return the logits [L, V] that `sample` draws from: scaled, -inf where filtered; greedy rows as they are."""
        is_greedy = rows.temperature < GREEDY_TEMPERATURE
        return torch.where(is_greedy.unsqueeze(1), logits, _shaped(logits, rows))

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-softmax of each row of logits [L, V], float32."""
        return torch.log_softmax(logits, -1).to(torch.float32)

    def best(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return (values, ids) [L, count] of each row's best tokens, best first."""
        return torch.topk(log_probs, count, -1)


def law_of(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the laws [L, V] that `SamplingOps.sample` draws from, wide; one-hot where a row can give one token only.

    That is a greedy row, and one whose logits are all -inf.
    """
    certain = (rows.temperature < GREEDY_TEMPERATURE) | (logits.amax(-1) == -torch.inf)
    scaled = _shaped(logits, rows)
    best = torch.zeros_like(scaled).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(certain.unsqueeze(1), best, torch.softmax(scaled, -1))


def _shaped(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Divide by temperature and filter; greedy rows are only filtered."""
    scale = rows.temperature.masked_fill(rows.temperature < GREEDY_TEMPERATURE, 1.0).to(logits.dtype)
    scaled = logits / scale.unsqueeze(1)
    return filter_logits(scaled, rows) if rows.filtered else scaled


def filter_logits(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Set what top_k, top_p and min_p leave out to -inf; equal logits count in the order of their index.

    top_p keeps the tokens before which less than top_p of the mass lies, so the best one always stays.
    """
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    ranks = torch.arange(scaled.shape[1], device=scaled.device)
    top_k = rows.top_k.unsqueeze(1)
    keep = (ranks < top_k) | (top_k == 0)
    mass = torch.softmax(ordered.masked_fill(~keep, -torch.inf).to(torch.float64), -1)
    before = mass.cumsum(-1) - mass
    top_p = rows.top_p.unsqueeze(1)
    keep &= (before < top_p) | (top_p >= 1) | (ranks == 0)
    keep &= mass >= rows.min_p.unsqueeze(1) * mass[:, :1]
    return torch.full_like(scaled, -torch.inf).scatter(1, order, ordered.masked_fill(~keep, -torch.inf))


def gumbel_noise(seeds: Tensor, purpose: int, positions: Tensor, size: int) -> Tensor:
    """Return standard Gumbel noise float64 [L, size], a function of (seed, purpose, position, index) alone."""
    keys = _mix(_mix(_mix(seeds + _GOLDEN) + purpose) + positions)
    index = torch.arange(1, size + 1, device=seeds.device)
    bits = _shift(_mix(keys.unsqueeze(1) + index * _GOLDEN), 64 - _NOISE_BITS)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-_NOISE_BITS
    return -torch.log(-torch.log(uniform))


def derive_seed(seed: int, index: int) -> int:
    """Return the seed 0 .. 2^63 - 1 of request `index` of a call to an engine of `seed`."""
    mixed = _mix(_mix(torch.tensor([seed]) + _GOLDEN) + index)
    return int(mixed.item()) & (2**63 - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, which wraps as unsigned arithmetic does."""
    x = (x ^ _shift(x, 30)) * _FACTORS[0]
    x = (x ^ _shift(x, 27)) * _FACTORS[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right as unsigned: int64's own shift would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
