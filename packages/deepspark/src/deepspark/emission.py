"""Emission: owns what reaches the user of a step's tokens: where a stop or a limit cuts, and which log-probs go along.

All of it is a function of the emitted stream, so it cannot change the stream's law (DSpark specification, 3.7 and 3.8).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepspark.errors import InputError

__all__ = ["Cut", "TokenLogprobs", "cut", "longest_draft", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The tokens kept of a step, and why the request ended with them (None: it goes on)."""

    kept: tuple[int, ...]
    finish: Literal["stop", "length"] | None


def cut(emitted: Sequence[int], stop: Collection[int], max_new: int | None, n_before: int) -> Cut:
    """Cut a step's tokens at the first stop token (kept) or at the length limit, whichever comes first.

    n_before: tokens emitted before this step; max_new: limit over all steps (None: no limit).  A stop token that is
    also the last allowed one ends the request as 'stop'.  Later accepted drafts and the extra token are dropped.
    """
    kept: list[int] = []
    for token in emitted:
        if max_new is not None and n_before + len(kept) >= max_new:
            return Cut(tuple(kept), "length")
        kept.append(token)
        if token in stop:
            return Cut(tuple(kept), "stop")
    reached = max_new is not None and n_before + len(kept) >= max_new
    return Cut(tuple(kept), "length" if reached else None)


def longest_draft(width: int, position: int, n_before: int, max_new: int | None, max_context: int | None) -> int:
    """Return the most drafts worth verifying: tokens emitted must fit the limit, rows fed the context.

    position: the anchor's absolute position; a step feeds positions up to position + ell and emits up to ell + 1
    tokens.  A limit is known before any draft is drawn, so this cut is always admissible.
    """
    room = width
    if max_new is not None:
        room = min(room, max_new - n_before - 1)
    if max_context is not None:
        room = min(room, max_context - position - 1)
    return max(room, 0)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log-probability of each emitted token, and the `top` alternatives as (token, log-prob), best
    first.
    """

    logprobs: list[float]
    top: list[list[tuple[int, float]]]


def token_logprobs(P: Tensor, emitted: Sequence[int], top: int = 0) -> TokenLogprobs:
    """Return log-probs of a request's emitted tokens: emitted token i comes from row i of P [k+1.., V].

    P are the target's processed laws, or `softmax` of raw logits where the API reports raw ones; never the draft's law
    nor the residual's.  Ties among alternatives go to the lower token.
    """
    if len(emitted) > P.shape[0]:
        raise InputError(f"{len(emitted)} emitted tokens need as many target rows, got {P.shape[0]}")
    logs = P[: len(emitted)].to(torch.float64).log()
    values, tokens = logs.sort(dim=-1, descending=True, stable=True)
    chosen = logs.gather(1, torch.tensor(emitted, dtype=torch.int64, device=P.device)[:, None])[:, 0].tolist()
    best = [
        list(zip(t, v, strict=True)) for t, v in zip(tokens[:, :top].tolist(), values[:, :top].tolist(), strict=True)
    ]
    return TokenLogprobs(chosen, best)
