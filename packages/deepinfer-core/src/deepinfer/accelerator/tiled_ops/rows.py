"""Ops that work on rows alone, by tiles: products, norms, mixing, experts, the Engram gate, sampling."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, override

from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import ExpertRoutingOps, PackedExperts, RouteSettings
from deepinfer.accelerator.ops.projection import PackedLinear
from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer.accelerator.ops.stream_mixing import Mix, MixSettings
from deepinfer.accelerator.parameters import MixParameters
from deepinfer.accelerator.tiled_ops.tiles import by_tiles


class TiledRows(Ops):
    """`tile_rows` rows and `tile_keys` keys a call: a multiple of 16 each, so that rows begin where vectors do."""

    tile_rows = 16
    tile_keys = 64

    @override
    def linear(self, x: Tensor, weight: PackedLinear, *, wide: bool = False) -> Tensor:
        base = super().linear
        (y,) = by_tiles(self.tile_rows, lambda x: (base(x, weight, wide=wide),), x.flatten(0, -2))
        return y.view(*x.shape[:-1], y.shape[-1])

    @override
    def grouped_linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        base = super().grouped_linear
        return by_tiles(self.tile_rows, lambda x: (base(x, weight),), x)[0]

    @override
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        base = super().rms_norm
        return by_tiles(self.tile_rows, lambda x: (base(x, weight, eps),), x)[0]

    @override
    def mix_in(
        self,
        streams: Tensor,
        incoming: Tensor | None,
        parameters: MixParameters,
        settings: MixSettings,
        norm: Tensor,
    ) -> tuple[Tensor, Mix]:
        base = super().mix_in

        def run(streams: Tensor, incoming: Tensor | None) -> tuple[Tensor, ...]:
            x, mix = base(streams, incoming, parameters, settings, norm)
            return x, mix.pre, mix.post, mix.comb

        x, *mix = by_tiles(self.tile_rows, run, streams, incoming)
        return x, Mix(*mix)

    @override
    def mix_out(self, streams: Tensor, y: Tensor, mix: Mix) -> Tensor:
        base = super().mix_out

        def run(streams: Tensor, y: Tensor, *parts: Tensor) -> tuple[Tensor]:
            return (base(streams, y, Mix(*parts)),)

        return by_tiles(self.tile_rows, run, streams, y, mix.pre, mix.post, mix.comb)[0]

    @override
    def collapse(self, streams: Tensor, weights: Tensor) -> Tensor:
        base = super().collapse
        return by_tiles(self.tile_rows, lambda *given: (base(*given),), streams, weights)[0]

    @override
    def head_weights(self, streams: Tensor, parameters: MixParameters, settings: MixSettings) -> Tensor:
        base = super().head_weights
        return by_tiles(self.tile_rows, lambda rows: (base(rows, parameters, settings),), streams)[0]

    @override
    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, picks: Tensor | None, settings: RouteSettings
    ) -> tuple[Tensor, Tensor]:
        base, shared = super().route, None if bias is None or bias.ndim == 2 else bias

        def run(x: Tensor, bias: Tensor | None, picks: Tensor | None) -> tuple[Tensor, Tensor]:
            return base(x, gate, bias if shared is None else shared, picks, settings)

        chosen, weights = by_tiles(self.tile_rows, run, x, bias if shared is None else None, picks)
        return chosen, weights

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        """As the reference, which adds to a row in the order of the experts; each expert runs by tiles."""
        return ExpertRoutingOps.experts(self, x, picks, weights, experts, limit)

    @override
    def _expert(self, x: Tensor, weight: Tensor | None, experts: PackedExperts, expert: int, limit: float) -> Tensor:
        base = super()._expert

        def run(x: Tensor, weight: Tensor | None) -> tuple[Tensor]:
            return (base(x, weight, experts, expert, limit),)

        return by_tiles(self.tile_rows, run, x, weight)[0]

    @override
    def shared_expert(self, x: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        base = super().shared_expert
        return by_tiles(self.tile_rows, lambda x: (base(x, experts, limit),), x)[0]

    @override
    def engram_gate(
        self,
        streams: Tensor,
        memory: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        image_rows: Tensor | None,
    ) -> Tensor:
        base = super().engram_gate

        def run(streams: Tensor, memory: Tensor, image_rows: Tensor | None) -> tuple[Tensor]:
            return (base(streams, memory, weights, eps, image_rows),)

        return by_tiles(self.tile_rows, run, streams, memory, image_rows)[0]

    @override
    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return _each_with(self.tile_rows, super().sample, logits, rows)

    @override
    def shape_logits(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return _each_with(self.tile_rows, super().shape_logits, logits, rows)

    @override
    def log_probs(self, logits: Tensor) -> Tensor:
        base = super().log_probs
        return by_tiles(self.tile_rows, lambda logits: (base(logits),), logits)[0]

    @override
    def best(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        base = super().best
        values, ids = by_tiles(self.tile_rows, lambda rows: base(rows, count), log_probs)
        return values, ids


def _each_with(size: int, base: Callable[[Tensor, SamplingRows], Tensor], logits: Tensor, rows: SamplingRows) -> Tensor:
    """Run on tiles of logits, each with its own rows of the sampling parameters."""
    parts = {name: column for name, column in vars(rows).items() if isinstance(column, Tensor)}

    def run(logits: Tensor, *own: Tensor) -> tuple[Tensor]:
        columns: dict[str, Any] = dict(zip(parts, own, strict=True))
        return (base(logits, replace(rows, **columns)),)

    return by_tiles(size, run, logits, *parts.values())[0]
