"""Hyper-connections on the device, for four streams of at most 8,192 channels; everything else is the reference."""

from collections.abc import Mapping
from typing import override

from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.stream_mixing import Mix, MixSettings
from deepinfer.accelerator.parameters import MixParameters
from deepinfer_kernels_cuda.kernel_ops import KernelOps
from deepinfer_kernels_cuda.kernels.mixing import BLOCKS, LOGITS, STREAMS, logit_parts, mix_in, mix_out
from deepinfer_kernels_cuda.kernels.sums import collapse


class MixingKernels(KernelOps, Ops):
    """`mix_in`, `mix_out` and `collapse`."""

    def _mixes(self, streams: Tensor) -> bool:
        known = streams.shape[1] == STREAMS and streams.shape[2] <= BLOCKS[-1] and streams.shape[2] % 16 == 0
        return self.no_kernels is None and known and streams.dtype == self.dtype and streams.is_contiguous()

    @override
    def mix_in(
        self,
        streams: Tensor,
        incoming: Tensor | None,
        parameters: MixParameters,
        settings: MixSettings,
        norm: Tensor,
    ) -> tuple[Tensor, Mix]:
        if not self._mixes(streams) or parameters.fn.shape[0] != LOGITS:
            return super().mix_in(streams, incoming, parameters, settings, norm)
        parts = logit_parts(streams, parameters.fn, steady=self.steady)
        given = None if incoming is None else incoming.contiguous()
        constants = (settings.iterations, settings.eps, settings.norm_eps)
        x, pre, post, comb = mix_in(streams, given, parts, (parameters.base, parameters.scale, norm), constants)
        return x, Mix(pre, post, comb)

    @override
    def mix_out(self, streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
        if not self._mixes(streams) or y.dtype != self.dtype:
            return super().mix_out(streams, y, mix)
        return mix_out(streams, y.contiguous(), mix.post.contiguous(), mix.comb.contiguous())

    @override
    def collapse(self, streams: Tensor, weights: Tensor) -> Tensor:
        takes = streams.is_contiguous() and streams.dtype == self.dtype and weights.dtype == self.wide
        if self.no_kernels or not takes:
            return super().collapse(streams, weights)
        return collapse(streams, weights.contiguous())

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        limits = super().limits(shapes)
        hidden, streams = shapes.get("hidden", 1024), shapes.get("streams", STREAMS)
        if streams != STREAMS or hidden > BLOCKS[-1] or hidden % 16:
            reason = f"kernels mix 4 streams of at most {BLOCKS[-1]} channels, a multiple of 16"
            limits = {**dict.fromkeys(("mix_in", "mix_out"), reason), **limits}
        return limits
