"""Counter-based noise: owns the keys of every random number of speculative decoding, on any device, without state.

Who draws from which law is left to `proposing` (drafts) and `verify` (acceptance and residual).

Draft, acceptance and extra noise is keyed by (request seed, purpose, block start, offset), never by the token's own
position: a position is drafted again in the next step, and a verification budget computed from older confidences has
already seen the number that a position key would hand out again (DSpark specification, section 3.3).  The match rule is
the exception: it wants the number that plain decoding would use at a position, hence (request seed, position).
"""

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Purpose", "accept_uniforms", "draft_uniforms", "extra_uniforms", "match_gumbel", "match_uniforms"]

_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MANTISSA_BITS = 52


class Purpose(IntEnum):
    """What a random number decides; two purposes never share a number."""

    DRAFT = 1
    ACCEPT = 2
    EXTRA = 3
    MATCH = 4


def _signed(value: int) -> int:
    """Return the 64-bit pattern of `value` as the signed integer that an int64 tensor holds."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right without sign: int64 has no logical shift in torch."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _finish(bits: Tensor) -> Tensor:
    """Splitmix64's finaliser: a bijection of 64 bits that passes the usual batteries."""
    bits = (bits ^ _shift(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shift(bits, 27)) * _signed(_SECOND)
    return bits ^ _shift(bits, 31)


def _mix(bits: Tensor) -> Tensor:
    """One splitmix64 round."""
    return _finish(bits + _signed(_STEP))


def _keyed(seeds: Tensor, purpose: Purpose, *coordinates: Tensor) -> Tensor:
    """Hash a key into 64 bits; each coordinate passes its own round, so (1, 0) and (0, 1) never meet."""
    bits = _mix(_mix(seeds.to(torch.int64)) ^ int(purpose))
    for coordinate in coordinates:
        bits = _mix(bits ^ _mix(coordinate.to(torch.int64)))
    return bits


def _unit(bits: Tensor) -> Tensor:
    """Map 64 bits to the open interval (0, 1): 52 bits and a half, so that neither end can be reached by rounding."""
    return (_shift(bits, 64 - _MANTISSA_BITS).to(torch.float64) + 0.5) * 2.0**-_MANTISSA_BITS


def _block_uniforms(seeds: Tensor, purpose: Purpose, block_starts: Tensor, width: int) -> Tensor:
    offsets = torch.arange(width, device=seeds.device, dtype=torch.int64)
    return _unit(_keyed(seeds[:, None], purpose, block_starts[:, None], offsets[None, :]))


def draft_uniforms(seeds: Tensor, block_starts: Tensor, width: int) -> Tensor:
    """Return the uniforms [R, width] (float64, in (0, 1)) that draw a block's draft tokens.

    seeds: [R] int64, one a request; block_starts: [R] int64, the anchor's absolute position.
    """
    return _block_uniforms(seeds, Purpose.DRAFT, block_starts, width)


def accept_uniforms(seeds: Tensor, block_starts: Tensor, width: int) -> Tensor:
    """Return the uniforms [R, width] that accept or reject a block's drafts; shapes as in `draft_uniforms`.

    They are keyed by block, not position: the block rule looks at noise behind the cut point, so a position key would
    judge the same position twice with one number.
    """
    return _block_uniforms(seeds, Purpose.ACCEPT, block_starts, width)


def extra_uniforms(seeds: Tensor, block_starts: Tensor) -> Tensor:
    """Return the uniforms [R] that draw the residual or bonus token; independent of the draft's numbers by purpose."""
    return _block_uniforms(seeds, Purpose.EXTRA, block_starts, 1)[:, 0]


def match_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return one uniform for each (seed, absolute position); seeds and positions broadcast.

    For engines whose plain decoding draws by inverse CDF.  Acceptance collapses with it (section 3.2): prefer Gumbel.
    """
    return _unit(_keyed(seeds, Purpose.MATCH, positions))


def match_gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return Gumbel noise [..., V] (float64) for each (seed, absolute position of the token that is drawn).

    It is plain decoding's own noise: a token is `argmax(log p + noise)`, and drafts that add the same noise to log q
    agree with chance >= (1-TV)/(1+TV).  An engine that samples so must use these very numbers; DeepInfer's does:
    key = f(f(f(seed + c) + 0) + position), bits = f(key + (token + 1) c), with splitmix64's constant c and finaliser f.
    """
    keys = _finish(_finish(_mix(seeds.to(torch.int64))) + positions.to(torch.int64))
    tokens = torch.arange(1, vocab_size + 1, device=positions.device, dtype=torch.int64)
    return -torch.log(-torch.log(_unit(_finish(keys[..., None] + tokens * _signed(_STEP)))))
