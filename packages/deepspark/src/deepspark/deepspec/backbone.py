"""A DeepSpec-style drafter as a `DraftBackbone`: owns the context cache of every sequence slot.

The layers are `model`'s; which rows were accepted is the caller's knowledge, who feeds them.
"""

import torch
from torch import Tensor

from deepspark.backbone import BlockRows
from deepspark.deepspec.model import Context, DeepSpecModel
from deepspark.errors import InputError

__all__ = ["DeepSpecBackbone"]


class DeepSpecBackbone:
    """Keeps keys and values of up to `max_context` positions for `num_slots` sequences, layers x (K, V) a token.

    Rows are written by absolute position: rows of rejected drafts may be fed and are overwritten by the next step's.
    """

    def __init__(self, model: DeepSpecModel, num_slots: int, max_context: int) -> None:
        config = model.config
        shape = (config.num_hidden_layers, num_slots, max_context, config.num_key_value_heads, config.head_dim)
        weight = model.fc.weight
        self.model = model
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self._first = [0] * num_slots
        self._fed = [0] * num_slots

    @property
    def block_size(self) -> int:
        """g: rows of a block."""
        return self.model.config.block_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    def begin(self, slot: int, first: int = 0) -> None:
        """Give `slot` to a new sequence whose context starts at position `first`.

        A prefix-cache hit without draft context begins there: exact, with shorter accepted drafts at first.
        """
        self._first[slot] = self._fed[slot] = first

    @torch.no_grad()
    def feed(self, slot: int, features: Tensor, start: int) -> None:
        """Store tapped activations [N, taps * D] of positions start..start+N-1; they may overwrite, not leave a
        hole.
        """
        end = start + features.shape[0]
        if not self._first[slot] <= start <= self._fed[slot]:
            raise InputError(
                f"slot {slot} holds context {self._first[slot]}..{self._fed[slot] - 1}; feeding from {start} would "
                "leave a hole"
            )
        if end > self.keys.shape[2]:
            raise InputError(
                f"context of {end} positions does not fit max_context {self.keys.shape[2]}; make the backbone larger"
            )
        expected = self.model.fc.in_features
        if features.shape[-1] != expected:
            raise InputError(
                f"tapped activations must be {expected} wide (taps x hidden size), got {features.shape[-1]}"
            )
        positions = torch.arange(start, end, device=features.device)
        keys, values = self.model.context_rows(features, positions)
        self.keys[:, slot, start:end] = keys
        self.values[:, slot, start:end] = values
        self._fed[slot] = end

    @torch.no_grad()
    def draft_block(self, anchors: Tensor, positions: Tensor, slots: Tensor) -> BlockRows:
        """Run blocks over the slots' contexts of positions below the anchors'; see `DraftBackbone`."""
        ends, chosen = positions.tolist(), slots.tolist()
        for slot, end in zip(chosen, ends, strict=True):
            if not self._first[slot] <= end <= self._fed[slot]:
                raise InputError(
                    f"slot {slot} was fed up to position {self._fed[slot]}, the anchor stands at {end}: feed the rows "
                    "that the target ate before drafting"
                )
        length = max(ends)
        context = Context(
            keys=self.keys[:, slots, :length],
            values=self.values[:, slots, :length],
            visible=self._visible(
                positions, torch.tensor([self._first[slot] for slot in chosen], device=positions.device), length
            ),
        )
        return self.model.block(anchors, positions, context)

    def _visible(self, positions: Tensor, first: Tensor, length: int) -> Tensor:
        return visible_context(positions, first, length, self.model.config.attention_window)


def visible_context(positions: Tensor, first: Tensor, length: int, window: int) -> Tensor:
    """Return [R, length] bool: which context positions a block with its anchor at `positions` [R] sees (window 0:
    all).
    """
    index = torch.arange(length, device=positions.device)
    seen = (index < positions[:, None]) & (index >= first[:, None])
    return seen & (index >= positions[:, None] - window) if window else seen
