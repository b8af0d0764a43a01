"""The gate: scores of all experts, the best of them for each row, and their weights, in two launches.

The logits are products with float32 parameters, cut into parts of 256 columns that are added in order; see `mixing.py`
for how they are multiplied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernels.mixing import exact_dot
from deepinfer_kernels_cuda.kernels.variants import Variant

MOST_EXPERTS, MOST_PICKS = 512, 16
EXPERT_TILE, PART_COLUMNS, COLUMN_BLOCK = 64, 256, 64
TOKEN_TILES = (16, 64)


@triton.jit
def _gate_logits(
    x, gate, parts, tokens, width, stride, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Parts [parts, tokens, experts] of x [tokens, width] times gate [experts, width]."""
    part = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    known = tl.minimum(token, tokens - 1).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    acc = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for first in range(0, 256, BLOCK):
        column = part * 256 + first + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + known[:, None] * stride + column[None, :], mask=inside[None, :], other=0.0)
        kept = (expert < experts)[:, None] & inside[None, :]
        weight = tl.load(gate + expert[:, None] * width + column[None, :], mask=kept, other=0.0)
        acc = exact_dot(value, weight, acc)
    at = (part * tokens + token).to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(parts + at, acc, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit
def _log1p(x):
    """log(1 + x) of x in 0 .. 1, also where 1 + x would lose x."""
    return tl.where(x < 0.001, x - x * x * 0.5 + x * x * x * 0.33333334, tl.log(1.0 + x))


@triton.jit
def _choose(
    parts,
    bias,
    given,
    picks,
    weights,
    tokens,
    experts,
    count,
    top_k,
    bias_stride,
    scale,
    BIASED: tl.constexpr,
    GIVEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PICKS: tl.constexpr,
):
    """One row: sum its parts, score, take the best top_k (or those given) and weigh them."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    known = expert < experts
    part = tl.arange(0, 32)[:, None]
    at = (part * tokens + token) * experts + expert[None, :]
    logit = tl.sum(tl.load(parts + at, mask=(part < count) & known[None, :], other=0.0), 0)
    score = tl.sqrt_rn(tl.maximum(logit, 0.0) + _log1p(tl.exp(-tl.abs(logit))))
    ranked = score
    if BIASED:
        ranked += tl.load(bias + token * bias_stride + expert, mask=known, other=0.0)
    ranked = tl.where(known, ranked, float("-inf"))
    place = tl.arange(0, PICKS)
    chosen = tl.zeros((PICKS,), tl.int32)
    share = tl.zeros((PICKS,), tl.float32)
    for k in range(top_k):
        if GIVEN:
            best = tl.load(given + token * top_k + k).to(tl.int32)
        else:
            best = tl.min(tl.where(ranked == tl.max(ranked, 0), expert, EXPERTS), 0)
            ranked = tl.where(expert == best, float("-inf"), ranked)
        chosen = tl.where(place == k, best, chosen)
        share = tl.where(place == k, tl.sum(tl.where(expert == best, score, 0.0), 0), share)
    if NORMALISE:
        share = share / (tl.sum(share, 0) + 1e-20)
    kept = place < top_k
    tl.store(weights + token * top_k + place, share * scale, mask=kept)
    if not GIVEN:
        tl.store(picks + token * top_k + place, chosen.to(tl.int64), mask=kept)


GATE_LOGITS = {
    tokens: Variant(
        name=f"gate_logits {tokens} tokens",
        kernel=_gate_logits,
        types={"x": "*bf16", "gate": "*fp32", "parts": "*fp32"}
        | dict.fromkeys(("tokens", "width", "stride", "experts"), "i32"),
        constants={"TOKENS": tokens, "EXPERTS": EXPERT_TILE, "BLOCK": COLUMN_BLOCK},
        stages=3,
        unaligned=("tokens", "experts"),
    )
    for tokens in TOKEN_TILES
}


def _choose_variant(*, biased: bool, given: bool, normalise: bool) -> Variant:
    return Variant(
        name=f"choose{' biased' if biased else ''}{' given' if given else ''}{' normalised' if normalise else ''}",
        kernel=_choose,
        types={"parts": "*fp32", "bias": "*fp32", "given": "*i64", "picks": "*i64", "weights": "*fp32"}
        | dict.fromkeys(("tokens", "experts", "count", "top_k", "bias_stride"), "i32")
        | {"scale": "fp32"},
        constants={"BIASED": biased, "GIVEN": given, "NORMALISE": normalise, "EXPERTS": 512, "PICKS": MOST_PICKS},
        warps=8,
        unaligned=("tokens", "experts", "count", "top_k", "bias_stride"),
    )


CHOOSE = {
    (biased, given, normalise): _choose_variant(biased=biased, given=given, normalise=normalise)
    for biased in (False, True)
    for given in (False, True)
    for normalise in (False, True)
    if not (biased and given)
}
VARIANTS = (*GATE_LOGITS.values(), *CHOOSE.values())


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    given: Tensor | None,
    settings: tuple[int, bool, float],
    *,
    steady: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return picks int64 and weights float32 [T, k] of x [T, D] (bfloat16); gate [E, D], bias [E] or [T, E] float32.

    settings: k, whether weights are normalised, and their factor.  steady: one tile, however many rows there are.
    """
    tokens, width, experts = x.shape[0], x.shape[1], gate.shape[0]
    top_k, normalise, scale = settings
    count = -(-width // PART_COLUMNS)
    parts = torch.empty((count, tokens, experts), dtype=torch.float32, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    picks = torch.empty((tokens, top_k), dtype=torch.int64, device=x.device) if given is None else given
    tile = TOKEN_TILES[0] if steady or tokens <= 128 else TOKEN_TILES[1]
    grid = (-(-tokens // tile), -(-experts // EXPERT_TILE), count)
    GATE_LOGITS[tile].launch(grid, x, gate, parts, tokens, width, x.stride(0), experts)
    variant = CHOOSE[bias is not None and given is None, given is not None, normalise]
    shift = weights if bias is None else bias
    stride = experts if bias is not None and bias.ndim == 2 else 0
    variant.launch((tokens,), parts, shift, picks, picks, weights, tokens, experts, count, top_k, stride, scale)
    return picks, weights
