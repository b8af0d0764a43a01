"""deepspark's own loop as an audited engine: owns the adapters that put a `World` behind the public decoder.

It is also the worked example of `sampling.AuditedEngine`: another engine writes the same dozen lines.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepspark.audit.world import World
from deepspark.cost import CostTable
from deepspark.decode import GenerationSettings, SpeculativeDecoder, TargetRows
from deepspark.drafter import DrafterSettings, DSparkDrafter
from deepspark.proposing import Blocks, Chooser, Drafts, Law

__all__ = ["WorldEngine", "WorldSource", "WorldTarget"]

Tokens = tuple[int, ...]


class WorldTarget:
    """A world's target law as a model with one sequence a slot."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.texts: dict[int, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.world.vocab_size

    def begin(self, slot: int) -> None:
        """Forget the slot's text."""
        self.texts[slot] = []

    def forward(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> TargetRows:
        """Append, and return log-probabilities as logits."""
        rows = []
        for slot, fed, start in zip(slots, tokens, starts, strict=True):
            text = self.texts[slot][:start]
            for token in fed:
                text.append(token)
                rows.append(np.log(self.world.target(tuple(text))))
            self.texts[slot] = text
        return TargetRows(torch.from_numpy(np.stack(rows)))


class WorldSource:
    """A world's draft law as a source; it reads the target's text of the slot."""

    def __init__(self, target: WorldTarget, width: int) -> None:
        self._target = target
        self._width = width

    @property
    def width(self) -> int:
        """Drafts of a step."""
        return self._width

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._target.vocab_size

    def draft(self, block: Blocks, law: Law, choose: Chooser) -> Drafts:
        """Draft position by position over the batch."""
        world = self._target.world
        contexts = [
            (*self._target.texts[slot][:position], anchor)
            for slot, position, anchor in zip(
                block.slots.tolist(), block.positions.tolist(), block.anchors.tolist(), strict=True
            )
        ]
        prefixes: list[Tokens] = [() for _ in contexts]
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        scores: list[list[float]] = []
        for offset in range(self._width):
            rows = torch.from_numpy(np.log([world.draft(c, x) for c, x in zip(contexts, prefixes, strict=True)]))
            conf = np.array([world.confidence(c, x) for c, x in zip(contexts, prefixes, strict=True)])
            scores.append(np.log(conf / (1 - conf + 1e-12)).tolist())
            drawn, drawn_from = choose(law(rows, offset), offset)
            tokens.append(drawn)
            if drawn_from is not None:
                laws.append(drawn_from)
            prefixes = [(*x, token) for x, token in zip(prefixes, drawn.tolist(), strict=True)]
        return Drafts(
            torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None, torch.tensor(scores).T, torch.empty(0)
        )


class WorldEngine:
    """The public decoder over a world; settings None decodes plainly."""

    def __init__(
        self, world: World, width: int, settings: DrafterSettings | None, cost: CostTable, batch: int = 256
    ) -> None:
        self.world = world
        self._width = width
        self._settings = settings
        self._cost = cost
        self._batch = batch

    def sample(self, seeds: Sequence[int], num_tokens: int) -> list[Tokens]:
        """Decode after the prompt (0,), in batches that share a scheduler."""
        found: list[Tokens] = []
        for start in range(0, len(seeds), self._batch):
            chosen = list(seeds[start : start + self._batch])
            target = WorldTarget(self.world)
            drafter = None
            if self._settings is not None:
                drafter = DSparkDrafter(WorldSource(target, self._width), self._cost, len(chosen), self._settings)
            settings = [GenerationSettings(seed=seed, max_new=num_tokens) for seed in chosen]
            results = SpeculativeDecoder(target, drafter).generate([(0,)] * len(chosen), settings)
            found += [tuple(result.tokens) for result in results]
        return found
