"""Rounds weights, activations and cached keys to their formats in the forward pass; gradients pass straight through.

The formats are those of `deepinfer.accelerator.ops.number_formats`, written without host tensors so that a step can be
captured as a CUDA graph; a test holds both against each other.
"""

from typing import Any, override

import torch
from torch import Tensor

from deepinfer.accelerator.ops.number_formats import E4M3_MAX, FP8_FLOOR, power_of_two, power_of_two_bytes

GROUP = 32
E2M1_MAX = 6.0


def _grouped(x: Tensor, size: int) -> Tensor:
    groups: Tensor = x.detach().float().unflatten(-1, (-1, size))
    return groups


class _Straight(torch.autograd.Function):
    """The rounded value forward, the gradient as it comes backward."""

    @staticmethod
    @override
    def forward(_context: Any, x: Tensor, rounded: Tensor) -> Tensor:
        """`rounded`, in the dtype of `x`."""
        return rounded.to(x.dtype)

    @staticmethod
    @override
    def backward(_context: Any, *gradients: Any) -> Any:
        """All of it goes to `x`."""
        return gradients[0], None


def _straight(x: Tensor, rounded: Tensor) -> Tensor:
    made: Tensor = _Straight.apply(x, rounded)
    return made


def _to_e4m3(x: Tensor, amax: Tensor) -> Tensor:
    scale = power_of_two(power_of_two_bytes(amax.clamp_min(FP8_FLOOR) * (1.0 / E4M3_MAX)))
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def _to_e2m1(x: Tensor, scale: Tensor) -> Tensor:
    scaled = x / scale
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((scaled / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX) * scale


def fp8_rows(x: Tensor) -> Tensor:
    """FP8 in groups of 32 along the last dimension: activations, window keys, Engram rows."""
    groups = _grouped(x, GROUP)
    return _straight(x, _to_e4m3(groups, groups.abs().amax(-1, keepdim=True)).flatten(-2))


def fp8_blocks(weight: Tensor) -> Tensor:
    """FP8 with a scale per block of 32 x 32: weights [..., out, in], whole blocks."""
    blocks = weight.detach().float().unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    rounded = _to_e4m3(blocks, blocks.abs().amax((-3, -1), keepdim=True))
    return _straight(weight, rounded.flatten(-4, -3).flatten(-2))


def fp4_rows(weight: Tensor) -> Tensor:
    """FP4 with a power of two per 32 columns: routed experts."""
    groups = _grouped(weight, GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    return _straight(weight, _to_e2m1(groups, power_of_two(power_of_two_bytes(amax / E2M1_MAX))).flatten(-2))


def fp4_entries(x: Tensor) -> Tensor:
    """FP4 with an E4M3 scale per 16: compressed entries."""
    groups = _grouped(x, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    return _straight(x, _to_e2m1(groups, scale).flatten(-2))
