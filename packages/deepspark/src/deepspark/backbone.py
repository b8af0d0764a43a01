"""The shape of a drafter's parallel part; owns the contract, and no model.

DeepSeek-V4.1's stages (in an engine) and `deepspec.DeepSpecBackbone` (here) both have this shape.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["BlockRows", "DraftBackbone"]


@dataclass(frozen=True, slots=True)
class BlockRows:
    """What one parallel pass gives for R blocks of g rows.

    hidden: [R, g, D] rows before the last norm.  normed: the same behind it.  base: [R, g, V] = lm_head(normed),
    float32, without any Markov bias.
    """

    hidden: Tensor
    normed: Tensor
    base: Tensor


class DraftBackbone(Protocol):
    """Runs the block [anchor, noise, ..., noise] of each sequence over the target activations that it has kept of it.

    The owner feeds the activations itself (inside the target's forward pass, or when accepted rows come back).
    """

    @property
    def block_size(self) -> int:
        """g: rows of a block, hence drafts of a step."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def draft_block(self, anchors: Tensor, positions: Tensor, slots: Tensor) -> BlockRows:
        """Run the blocks of R sequences: anchors [R] tokens, their absolute positions [R], the sequences' slots [R].

        Context of positions 0..position-1 must have been fed.  Leaves no trace: block keys and values are scratch.
        """
