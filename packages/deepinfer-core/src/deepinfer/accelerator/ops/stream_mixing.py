"""Hyper-connections: the parallel residual streams, how a sub-layer reads them and writes back.

Source: the sections on mHC and on V4's head of the model card. Streams are [T, S, D], S = 4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.accelerator.ops.projection import ProjectionOps
from deepinfer.accelerator.parameters import MixParameters


@dataclass(frozen=True)
class Mix:
    """One sub-layer's mixing, wide: pre [T, S] (how to read), post [T, S] and comb [T, S, S] (how to write back)."""

    pre: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True)
class MixSettings:
    """Constants of the mixing: Sinkhorn iterations (the first column pass included) and epsilons."""

    iterations: int
    eps: float
    norm_eps: float


class StreamMixingOps(ProjectionOps):
    """Reference mixing, statistics and Sinkhorn in the wide dtype."""

    def mix_in(
        self,
        streams: Tensor,
        incoming: Tensor | None,
        parameters: MixParameters,
        settings: MixSettings,
        norm: Tensor,
    ) -> tuple[Tensor, Mix]:
        """Read a sub-layer's input from the streams and compute its mixing.

        x = rms(sum_k a_k S_k; norm) with a = `incoming` (V4.1: the previous sub-layer's pre, shifted) or, when that is
        None, this sub-layer's own pre (V4).  Returns x [T, D] in the activation dtype and the mixing computed from S.
        """
        mix = self.mixing(self.mix_logits(streams, parameters, settings), parameters, settings)
        x = self.collapse(streams, mix.pre if incoming is None else incoming)
        return self.rms_norm(x, norm, settings.norm_eps), mix

    def mix_logits(self, streams: Tensor, parameters: MixParameters, settings: MixSettings) -> Tensor:
        """Z = (fn . flat(S)) / sqrt(mean(flat(S)^2) + eps), wide [T, rows of fn]."""
        flat = self.widen(streams.flatten(1))
        scale = torch.rsqrt(flat.square().mean(1, keepdim=True) + settings.norm_eps)
        return functional.linear(flat, parameters.fn) * scale

    def mixing(self, z: Tensor, parameters: MixParameters, settings: MixSettings) -> Mix:
        """Turn z [T, 2 S + S * S] into pre, post and the doubly normalised comb."""
        count = int((z.shape[1] + 1) ** 0.5) - 1
        base, scale = parameters.base, parameters.scale
        pre = torch.sigmoid(z[:, :count] * scale[0] + base[:count]) + settings.eps
        post = 2 * torch.sigmoid(z[:, count : 2 * count] * scale[1] + base[count : 2 * count])
        logits = (z[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count))
        comb = torch.softmax(logits, 2) + settings.eps
        comb = comb / (comb.sum(1, keepdim=True) + settings.eps)
        for _ in range(settings.iterations - 1):
            comb = comb / (comb.sum(2, keepdim=True) + settings.eps)
            comb = comb / (comb.sum(1, keepdim=True) + settings.eps)
        return Mix(pre, post, comb)

    def mix_out(self, streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
        """Write a sub-layer's output y [T, D] back: S'_k = post_k y + sum_j comb[j, k] S_j, one rounding."""
        added = torch.bmm(mix.post.unsqueeze(2), self.widen(y).unsqueeze(1))
        return self.narrow(torch.baddbmm(added, mix.comb.transpose(1, 2), self.widen(streams)))

    def collapse(self, streams: Tensor, weights: Tensor) -> Tensor:
        """sum_k a_k S_k: streams [T, S, D], weights [T, S] wide -> [T, D] in the activation dtype."""
        return self.narrow(torch.bmm(weights.unsqueeze(1), self.widen(streams)).squeeze(1))

    def head_weights(self, streams: Tensor, parameters: MixParameters, settings: MixSettings) -> Tensor:
        """V4's final collapse weights [T, S]: sigmoid(z * scale + base) + eps."""
        z = self.mix_logits(streams, parameters, settings)
        return torch.sigmoid(z * parameters.scale[0] + parameters.base) + settings.eps
