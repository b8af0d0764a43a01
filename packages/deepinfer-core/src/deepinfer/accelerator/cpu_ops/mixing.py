"""Hyper-connections on the CPU: the same sums in numpy, for few rows.

The doubly normalised matrix is 39 passes over 16 numbers of each row: a pass is one product and one division here.
"""

from dataclasses import dataclass
from functools import cache
from typing import override

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import FEW_PRODUCTS, FEW_ROWS, Floats, HostOps, Ints
from deepinfer.accelerator.ops.stream_mixing import Mix, MixSettings, StreamMixingOps
from deepinfer.accelerator.parameters import MixParameters, Precision


@dataclass(frozen=True)
class _Laid:
    """Parameters of one mixing as its bodies take them; `source` keeps the key alive.

    scale, base [rows, 1]: gates enter with a minus, as their sigmoid takes them.
    """

    fn: Floats
    scale: Floats
    base: Floats
    source: MixParameters


class CpuMixing(HostOps, StreamMixingOps):
    """Mixing of few rows without torch's calls; many rows go to the reference."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        super().__init__(device, precision)
        self._laid: dict[int, _Laid] = {}

    @override
    def mix_in(
        self,
        streams: Tensor,
        incoming: Tensor | None,
        parameters: MixParameters,
        settings: MixSettings,
        norm: Tensor,
    ) -> tuple[Tensor, Mix]:
        """Few rows: a quarter of the reference's time."""
        if streams.shape[0] > FEW_ROWS:
            return super().mix_in(streams, incoming, parameters, settings, norm)
        numbers = self.array(streams)
        mix = _mixing(self._logits(numbers, parameters, settings), settings)
        weights = mix.pre if incoming is None else incoming
        x = self.rounded(_collapse(numbers, weights.numpy()))
        return self.result(self.norm(x, norm, settings.norm_eps)), mix

    @override
    def mix_out(self, streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
        """Few rows: half of the reference's time."""
        if streams.shape[0] > FEW_ROWS:
            return super().mix_out(streams, y, mix)
        out = np.matmul(mix.comb.numpy().transpose(0, 2, 1), self.array(streams))
        out += mix.post.numpy()[:, :, None] * self.array(y)[:, None, :]
        return self.result(out)

    @override
    def collapse(self, streams: Tensor, weights: Tensor) -> Tensor:
        """Few rows: half of the reference's time."""
        if streams.shape[0] > FEW_ROWS:
            return super().collapse(streams, weights)
        return self.result(_collapse(self.array(streams), weights.numpy()))

    @np.errstate(over="ignore")
    @override
    def head_weights(self, streams: Tensor, parameters: MixParameters, settings: MixSettings) -> Tensor:
        """Few rows: a third of the reference's time."""
        if streams.shape[0] > FEW_ROWS:
            return super().head_weights(streams, parameters, settings)
        e = np.exp(self._logits(self.array(streams), parameters, settings))
        e += 1
        np.divide(1, e, e)
        e += settings.eps
        return torch.from_numpy(e.T)

    def _logits(self, streams: Floats, parameters: MixParameters, settings: MixSettings) -> Floats:
        """Scaled and shifted logits [rows of fn, T]: those of `mix_logits`, row by row; gates with a minus."""
        laid = self._laid.get(id(parameters))
        if laid is None:
            laid = self._laid[id(parameters)] = _lay(parameters)
        flat = streams.reshape(streams.shape[0], parameters.fn.shape[1])
        if laid.fn.shape[0] * flat.size <= FEW_PRODUCTS:
            z: Floats = laid.fn.dot(flat.T)
        else:
            z = torch.mm(parameters.fn, torch.from_numpy(flat).t()).numpy()
        z *= self.inverse_root(flat, settings.norm_eps).T
        z *= laid.scale
        z += laid.base
        return z


def _lay(parameters: MixParameters) -> _Laid:
    scale, base, rows = parameters.scale.numpy(), parameters.base.numpy(), parameters.fn.shape[0]
    count = int((rows + 1) ** 0.5) - 1
    parts = [count, count, count * count] if len(scale) == 3 else [rows]
    sign = np.repeat(np.array((-1, -1, 1), scale.dtype)[: len(parts)], parts)
    return _Laid(parameters.fn.numpy(), (np.repeat(scale, parts) * sign)[:, None], (base * sign)[:, None], parameters)


def _collapse(streams: Floats, weights: Floats) -> Floats:
    """Sum of streams [T, S, D] by weights [T, S] -> [T, D]."""
    summed: Floats = np.matmul(weights[:, None, :], streams)[:, 0]
    return summed


@np.errstate(over="ignore")  # of exp: a sigmoid is then 0, as it should be
def _mixing(z: Floats, settings: MixSettings) -> Mix:
    """Turn `_logits` [2 S + S * S, T] into pre, post and comb, as `StreamMixingOps.mixing` defines them."""
    rows, count = z.shape[1], int((z.shape[0] + 1) ** 0.5) - 1
    constants = _constants(count, settings.eps, z.dtype)
    logits = z[2 * count :].reshape(count, count, rows)
    logits -= np.maximum.reduce(logits, 1, keepdims=True)
    np.exp(z, z)
    gates = z[: 2 * count]
    gates += 1
    np.divide(constants.tops, gates, gates)
    gates += constants.floors
    comb = np.empty((count * count + 1, rows), z.dtype)
    comb[:-1] = z[2 * count :]
    comb[-1] = 1
    by_row, by_column, total = constants.by_row.dot, constants.by_column.dot, np.empty_like(comb)
    divide = np.divide
    divide(comb, constants.softmax.dot(comb, total), comb)
    comb += constants.shift
    divide(comb, by_column(comb, total), comb)
    for _ in range(settings.iterations - 1):
        divide(comb, by_row(comb, total), comb)
        divide(comb, by_column(comb, total), comb)
    pre, post = gates[:count].T, gates[count:].T
    matrix = np.ascontiguousarray(comb[:-1].T).reshape(rows, count, count)
    return Mix(torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(matrix))


@dataclass(frozen=True)
class _Constants:
    """What turns exponentials [rows, T] into a mixing of S streams.

    tops, floors [2 S, 1]    pre = 1 / (1 + e) + eps, post = 2 / (1 + e)
    softmax, by_row, by_column [S * S + 1, S * S + 1]  of [comb, 1] they make [divisor of each element, 1]: the sum over
                             its row or column, plus eps but for the softmax; one product gives every divisor
    shift [S * S + 1, 1]     eps for each element of comb, 0 for the last place
    """

    tops: Floats
    floors: Floats
    softmax: Floats
    by_row: Floats
    by_column: Floats
    shift: Floats


@cache
def _constants(count: int, eps: float, dtype: np.dtype[np.floating]) -> _Constants:
    place = np.arange(count * count)

    def sums(line: Ints, added: float) -> Floats:
        matrix = np.full((count * count + 1, count * count + 1), added, dtype)
        matrix[:-1, :-1] = line[:, None] == line
        matrix[-1] = 0
        matrix[-1, -1] = 1
        return matrix

    return _Constants(
        tops=np.repeat(np.array((1, 2), dtype), count)[:, None],
        floors=np.repeat(np.array((eps, 0), dtype), count)[:, None],
        softmax=sums(place // count, 0),
        by_row=sums(place // count, eps),
        by_column=sums(place % count, eps),
        shift=np.append(np.full(count * count, eps, dtype), dtype.type(0))[:, None],
    )
