"""Hyper-connections on the CPU: a row's mixing is three hundred small sums, one call for all of them."""

import ctypes
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.cpu_ops.arrays import HostOps
from deepinfer.accelerator.ops.stream_mixing import Mix, MixSettings, StreamMixingOps
from deepinfer.accelerator.parameters import MixParameters, Precision

MOST_STREAMS = 8
"""As in `c/common.h`."""


class _Mixing(ctypes.Structure):
    """`struct mixing` of `c/mixing.c`: what does not change from step to step."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("streams", "width", "iterations", "bfloat16")),
        *((name, ctypes.c_double) for name in ("eps", "norm_eps")),
        *((name, ctypes.c_void_p) for name in ("fn", "scale", "base", "norm")),
    )


class CpuMixing(HostOps, StreamMixingOps):
    """Mixing in C: at one row a twentieth of the reference's time."""

    def __init__(self, device: torch.device, precision: Precision) -> None:
        super().__init__(device, precision)
        self._laid: dict[int, tuple[MixParameters, int, _Mixing]] = {}

    @override
    def mix_in(
        self,
        streams: Tensor,
        incoming: Tensor | None,
        parameters: MixParameters,
        settings: MixSettings,
        norm: Tensor,
    ) -> tuple[Tensor, Mix]:
        rows, count, width = streams.shape
        if self.kernels is None or count > MOST_STREAMS:
            return super().mix_in(streams, incoming, parameters, settings, norm)
        streams = self.wide_rows(streams)
        pre, post, x = self.empty(rows, count), self.empty(rows, count), self.empty(rows, width)
        comb = self.empty(rows, count, count)
        self.bodies.mix_in(
            *(self._address(parameters, settings, norm), rows, streams.data_ptr()),
            *(0 if incoming is None else incoming.data_ptr(), pre.data_ptr(), post.data_ptr()),
            *(comb.data_ptr(), x.data_ptr()),
        )
        return self.narrow(x), Mix(pre, post, comb)

    @override
    def mix_out(self, streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
        if self.kernels is None:
            return super().mix_out(streams, y, mix)
        out = self.empty(*streams.shape)
        streams, y = self.wide_rows(streams), self.wide_rows(y)
        self.bodies.mix_out(
            *streams.shape, streams.data_ptr(), y.data_ptr(), mix.post.data_ptr(), mix.comb.data_ptr(), out.data_ptr()
        )
        return self.narrow(out)

    @override
    def head_weights(self, streams: Tensor, parameters: MixParameters, settings: MixSettings) -> Tensor:
        rows, count, _ = streams.shape
        if self.kernels is None:
            return super().head_weights(streams, parameters, settings)
        streams, weights = self.wide_rows(streams), self.empty(rows, count)
        address = self._address(parameters, settings, None)
        self.kernels.head_weights(address, rows, streams.data_ptr(), weights.data_ptr())
        return weights

    def _address(self, parameters: MixParameters, settings: MixSettings, norm: Tensor | None) -> int:
        """Where the constants of one mixing, or of the head's, lie; laid out once, as long as these ops live."""
        found = self._laid.get(id(parameters))
        if found is None:
            rows, columns = parameters.fn.shape
            streams = rows if norm is None else int((rows + 1) ** 0.5) - 1
            laid = _Mixing(streams, columns // streams, settings.iterations, self.rounds)
            laid.eps, laid.norm_eps = settings.eps, settings.norm_eps
            laid.fn, laid.scale = parameters.fn.data_ptr(), parameters.scale.data_ptr()
            laid.base, laid.norm = parameters.base.data_ptr(), 0 if norm is None else norm.data_ptr()
            found = self._laid[id(parameters)] = (parameters, ctypes.addressof(laid), laid)
        return found[1]
