"""Going on from cached text without window KV: one window before its end runs again, with window keys from there on.

Approximate, as the model was trained for.  How a request goes on exactly is `prefix_cache.py`'s.
Source: model card, bounded replay and prefill truncation.
"""

from dataclasses import dataclass

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.block_pool import BlockPool, Cached, Hit, Node, nearest
from deepinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """The model's `window`, and the tokens that a hit is a multiple of: every group of `granule` tokens is whole."""

    window: int
    granule: int


def replayed(sequence: Sequence, found: list[tuple[Node, Cached]], rule: ReplayRule, pool: BlockPool) -> Hit:
    """Find where `sequence` goes on behind the blocks `found`, the first tokens of one more block included.

    Holds the blocks in `pool`.  Decoder rows begin behind the first token that runs again, and so do wanted logits.
    """
    trail = sequence.trail
    assert trail is not None
    whole, length = len(found) * BLOCK_TOKENS, len(sequence.tokens) - 1
    child, common = nearest(found[-1][0] if found else trail.root, sequence.tokens[whole:length][:BLOCK_TOKENS])
    more = child.entries(rough=True) if child is not None else None
    end = whole + (common if more is not None else 0)
    if sequence.decoder_start:
        end = min(end, sequence.decoder_start + rule.window)
    if sequence.wants_prompt_rows:
        end = min(end, (sequence.prompt_rows or 0) + rule.window)
    end -= end % rule.granule
    shared, rest = divmod(end, BLOCK_TOKENS)
    used = found[: shared + (1 if rest else 0)]
    if child is not None and more is not None and rest and shared == len(found):
        used.append((child, more))
    blocks = [pool.share(cached) for _, cached in used]
    start = max(end - rule.window, 0)
    behind = start // BLOCK_TOKENS
    trail.node = found[behind - 1][0] if behind else trail.root
    return Hit(
        start=start,
        written=end,
        blocks=tuple(blocks[:shared]),
        partial=blocks[-1] if rest else -1,
        window_base=behind,
        window_start=start,
        rough=start > 0 or any(cached is not node.exact for node, cached in used),
    )
