"""`Pin`: what a pinned prompt holds. How one is made and let go is `pinning.py`'s."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A pinned prompt: `tokens` of it, in whole blocks of 128, and the numbers of what it holds for that."""

    tokens: int
    blocks: tuple[int, ...] = field(repr=False)
    windows: tuple[int, ...] = field(repr=False)
    tails: tuple[int, ...] = field(repr=False)
