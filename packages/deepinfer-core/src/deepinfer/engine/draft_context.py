"""What draft stages remember of the text: written with each step of the target, or for several steps together.

What is written is `model/draft.py`'s; when drafts are proposed is the drafter's.
"""

from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.engine.sequence import Integers
from deepinfer.model.draft import DraftStages
from deepinfer.model.kv_cache import KVCache

HELD_STEPS, HELD_ROWS = 32, 256
"""Most steps, and rows of them, that are held back: less than a window, so that no block has been given away."""


class DraftContext:
    """Writes the stages' context of every step of the target.

    While nobody drafts, steps in which the same sequences decode are held back and written as one, which costs little
    more than one of them; `flush` writes what is held back, in front of whatever reads or overwrites it.
    """

    def __init__(self, stages: DraftStages, cache: KVCache) -> None:
        self._stages = stages
        self._cache = cache
        self._rows: Integers | None = None
        self._held: list[tuple[Tensor, Batch]] = []

    def take(self, hidden: Tensor, batch: Batch, rows: Integers, *, hold: bool) -> None:
        """Write the context of a step's `hidden` [Td, taps * D]; with `hold` perhaps later.

        rows: the table rows of its sequences, the same array as long as they are the same sequences.
        """
        count = batch.query_starts.shape[0]
        hold = hold and batch.positions.shape[0] == count and 2 * count <= HELD_ROWS
        if not hold or rows is not self._rows:
            self.flush()
        if not hold:
            self._stages.write_context(hidden, batch, self._cache)
            return
        self._rows = rows
        self._held.append((hidden.clone(), batch))
        if len(self._held) == HELD_STEPS or (len(self._held) + 1) * count > HELD_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held back."""
        held, self._held, self._rows = self._held, [], None
        if not held:
            return
        batches = [batch for _, batch in held]
        # The newest tables hold the blocks of all these rows: what a sequence has given back lies a window behind.
        merged = replace(
            batches[-1],
            token_ids=torch.cat([batch.token_ids for batch in batches]),
            positions=torch.cat([batch.positions for batch in batches]),
            sequences=torch.cat([batch.sequences for batch in batches]),
            history=torch.cat([batch.history for batch in batches]),
            groups={},
        )
        self._stages.write_context(torch.cat([hidden for hidden, _ in held]), merged, self._cache)
