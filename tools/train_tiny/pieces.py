"""The element-wise parts of the network as functions of tensors alone, plain or compiled.

On a GPU these are most of a step, because streams are four times as wide as anything else; compiled, each is one or two
kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rounding import fp4_entries, fp8_rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent pairs of the last channels of x [..., C] by angles whose cos and sin broadcast against it."""
    width = 2 * cos.shape[-1]
    plain, tail = x[..., :-width], x[..., -width:].float().unflatten(-1, (-1, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with float32 statistics, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def inverse_size(x: Tensor, eps: float) -> Tensor:
    """One over the root mean square of the last dimension, float32."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def mixing(z: Tensor, base: Tensor, scale: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """From z [..., S * (S + 2)]: how the next sub-layer reads [..., S], and how this one writes [..., S, S + 1].

    The last column of the second belongs to the sub-layer's output, the others to the streams.  Rows and columns of the
    doubly normalised part are written out number by number, which a compiler turns into one kernel.
    """
    count = int((z.shape[-1] + 1) ** 0.5) - 1
    pre = torch.sigmoid(z[..., :count] * scale[0] + base[:count]) + eps
    post = 2 * torch.sigmoid(z[..., count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = z[..., 2 * count :] * scale[2] + base[2 * count :]
    soft = torch.softmax(logits.unflatten(-1, (count, count)), -1) + eps
    comb = [[soft[..., row, column] for column in range(count)] for row in range(count)]
    for turn in range(2 * iterations - 1):
        for line in range(count):
            cells = [(place, line) if turn % 2 == 0 else (line, place) for place in range(count)]
            total = sum((comb[row][column] for row, column in cells[1:]), comb[cells[0][0]][cells[0][1]]) + eps
            for row, column in cells:
                comb[row][column] = comb[row][column] / total
    columns = [torch.stack([comb[row][column] for row in range(count)], -1) for column in range(count)]
    return pre, torch.cat((torch.stack(columns, -2), post.unsqueeze(-1)), -1)


def leave(streams: Tensor, y: Tensor, written: Tensor) -> Tensor:
    """Streams [..., S, D] after a sub-layer's output y [..., D] is written back as `mixing` says."""
    count = streams.shape[-2]
    total = written[..., count].unsqueeze(-1) * y.float().unsqueeze(-2)
    for source in range(count):
        total = total + written[..., source].unsqueeze(-1) * streams[..., source, :].float().unsqueeze(-2)
    return total.to(streams.dtype)


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """Read streams [..., S, D] with a mix [..., S]."""
    return (streams.float() * mix.unsqueeze(-1)).sum(-2).to(streams.dtype)


def swiglu(gate: Tensor, up: Tensor, shares: Tensor, limit: float) -> Tensor:
    """Hidden rows [..., E, I] of all experts, each times its share [..., E]."""
    hidden = F.silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)
    experts: Tensor = hidden.unflatten(-1, (shares.shape[-1], -1))
    return (experts * shares.unsqueeze(-1)).to(gate.dtype)


def gate_memory(streams: Tensor, memory: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Add an n-gram memory [..., S + 1, D], keys of the streams and the value, to streams [..., S, D]."""
    wide, keys, values = streams.float(), memory[..., :-1, :].float(), memory[..., -1:, :].float()
    sizes = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (wide * keys * weights).sum(-1) * sizes * wide.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp_min(1e-6).sqrt())
    return (wide + gate.unsqueeze(-1) * values).to(streams.dtype)


@dataclass(frozen=True)
class Pieces:
    """The functions of this module, as a network calls them."""

    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    inverse_size: Callable[[Tensor, float], Tensor] = inverse_size
    mixing: Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]] = mixing
    leave: Callable[[Tensor, Tensor, Tensor], Tensor] = leave
    collapse: Callable[[Tensor, Tensor], Tensor] = collapse
    swiglu: Callable[[Tensor, Tensor, Tensor, float], Tensor] = swiglu
    gate_memory: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gate_memory
    fp8_rows: Callable[[Tensor], Tensor] = fp8_rows
    fp4_entries: Callable[[Tensor], Tensor] = fp4_entries


def compiled() -> Pieces:
    """All pieces through torch.compile, for the shapes that they meet."""
    torch._dynamo.config.recompile_limit = 64  # a piece meets a dozen shapes, with and without gradients
    plain = Pieces()
    return Pieces(**{name: torch.compile(getattr(plain, name), dynamic=False) for name in Pieces.__annotations__})
