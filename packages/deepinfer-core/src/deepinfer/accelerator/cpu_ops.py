"""The ops of the CPU accelerator: the reference, with the few bodies that cost most on a host written for it.

A host has no launch to hide behind: a chain of small torch calls costs its call overhead, several microseconds each.
"""

from dataclasses import replace
from functools import cache
from typing import override

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import PackedExperts, swiglu
from deepinfer.accelerator.ops.sparse_attention import IndexRequest
from deepinfer.accelerator.ops.stream_mixing import Mix, MixSettings
from deepinfer.accelerator.parameters import MixParameters

PICKED_SHARE = 4
"""All experts run on all rows when there are at most this many of them for each pick of a row."""

FEW_ROWS = 64
"""Up to this many rows the cost of a mixing is that of its calls, not of its sums."""

FEW_NUMBERS = 1 << 15
"""The same bound for a norm, in elements."""

Floats = NDArray[np.floating]


class CpuOps(Ops):
    """Reference ops for a host; same numbers up to the order of sums."""

    @override
    def mix_in(
        self,
        streams: Tensor,
        incoming: Tensor | None,
        parameters: MixParameters,
        settings: MixSettings,
        norm: Tensor,
    ) -> tuple[Tensor, Mix]:
        """Few rows: the same sums in numpy, whose calls on a few numbers cost a third of torch's."""
        if streams.shape[0] > FEW_ROWS:
            return super().mix_in(streams, incoming, parameters, settings, norm)
        flat = self.widen(streams).flatten(1)
        z: Floats = torch.nn.functional.linear(flat, parameters.fn).numpy()
        numbers: Floats = flat.numpy()
        z *= 1 / np.sqrt(np.vecdot(numbers, numbers) / numbers.shape[1] + settings.norm_eps)[:, None]
        mix = _mixing(z, parameters, settings)
        x = self.collapse(streams, mix.pre if incoming is None else incoming)
        return self.rms_norm(x, norm, settings.norm_eps), mix

    @override
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if x.numel() > FEW_NUMBERS:
            return super().rms_norm(x, weight, eps)
        wide: Floats = self.widen(x).numpy()
        y = wide / np.sqrt(np.vecdot(wide, wide) / wide.shape[-1] + eps)[..., None]
        if weight is not None:
            y *= weight.numpy()
        return self.narrow(torch.from_numpy(y))

    @override
    def mixing(self, z: Tensor, parameters: MixParameters, settings: MixSettings) -> Mix:
        few = z.shape[0] <= FEW_ROWS
        return _mixing(z.numpy(), parameters, settings) if few else super().mixing(z, parameters, settings)

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """Where a row picks a quarter of all experts or more, every expert runs on every row.

        Unpicked ones have weight 0.  That is a handful of calls instead of a dozen for each expert.
        """
        if experts.w13 is None or experts.w2 is None or experts.count > PICKED_SHARE * picks.shape[1]:
            return super().experts(x, picks, weights, experts, limit)
        rows, count, width = x.shape[0], experts.count, experts.w2.shape[2]
        # Picks of -1 (elsewhere) land in a column of their own behind the last expert.
        shares = weights.new_zeros((rows, count + 1)).scatter_(1, picks % (count + 1), weights)[:, :count]
        gate_up = torch.nn.functional.linear(self._expert_input(x, experts), experts.w13.flatten(0, 1))
        hidden = swiglu(gate_up.view(rows * count, 2 * width), shares.reshape(-1, 1), limit)
        hidden = self._expert_input(hidden, experts).view(rows, count * width)
        return torch.nn.functional.linear(hidden, experts.w2.transpose(0, 1).flatten(1))

    @override
    def _index_scores(self, request: IndexRequest, query: Tensor, batch: Batch, rows: slice, count: int) -> Tensor:
        """Rows of one sequence share one copy of its keys; the reference gathers them again for every row."""
        sequences = batch.sequences[rows]
        first, last = int(sequences[0]), int(sequences[-1])
        if first != last:
            return super()._index_scores(request, query, batch, rows, count)
        entries = torch.arange(count).unsqueeze(0)
        one = replace(batch, sequences=sequences[:1])
        keys = self.read_records(request.keys, self.selection(one, entries, request.ratio).slots[0])
        return self._score(request, query[rows], keys, batch.positions[rows], rows)


def _mixing(z: Floats, parameters: MixParameters, settings: MixSettings) -> Mix:
    """pre, post and comb from z [T, 2 S + S * S]."""
    base, scale = parameters.base.numpy(), parameters.scale.numpy()
    rows, count = z.shape[0], int((z.shape[1] + 1) ** 0.5) - 1
    pre = 1 / (1 + np.exp(-(z[:, :count] * scale[0] + base[:count]))) + settings.eps
    post = 2 / (1 + np.exp(-(z[:, count : 2 * count] * scale[1] + base[count : 2 * count])))
    logits = (z[:, 2 * count :] * scale[2] + base[2 * count :]).reshape(rows, count, count)
    logits = np.exp(logits - logits.max(2, keepdims=True))
    comb = np.ones((rows, count * count + 1), z.dtype)
    comb[:, :-1] = (logits / logits.sum(2, keepdims=True) + settings.eps).reshape(rows, -1)
    by_row, by_column = _sums(count, settings.eps, z.dtype)
    total = np.empty_like(comb)
    divide, sums = np.divide, comb.dot
    divide(comb, sums(by_column, total), comb)
    for _ in range(settings.iterations - 1):
        divide(comb, sums(by_row, total), comb)
        divide(comb, sums(by_column, total), comb)
    matrix = torch.from_numpy(comb[:, :-1].reshape(rows, count, count))
    return Mix(torch.from_numpy(pre), torch.from_numpy(post), matrix)


@cache
def _sums(count: int, eps: float, dtype: np.dtype[np.floating]) -> tuple[Floats, Floats]:
    """Matrices that turn [comb, 1] into [sums over the row (or column) of each element plus eps, 1].

    One product then gives every divisor of a normalisation, and the last column stays 1.
    """
    place = np.arange(count * count)
    sums = []
    for line in (place // count, place % count):
        matrix = np.full((count * count + 1, count * count + 1), eps, dtype)
        matrix[:-1, :-1] = line[:, None] == line
        matrix[:, -1] = 0
        matrix[-1, -1] = 1
        sums.append(matrix)
    return sums[0], sums[1]
