"""Books of one pool of cache blocks: which are free, which are held.

The memory itself is `model/kv_cache.py`'s; who holds a block, and for which tokens, is the `Scheduler`'s.
"""

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers 0 .. size - 1, each to one holder at a time.

    The engine has two: one for entries and index keys, one for window KV.  `name` appears in messages.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has seen that as many are free."""
        assert 0 <= count <= len(self._free), f"{self.name}: {count} blocks taken, {len(self._free)} free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back; their content is lost."""
        self._free.extend(blocks)

    def check(self, held: Iterable[int]) -> None:
        """Re-add the books: every block is either free or among `held`, once.

        Raises AssertionError with the culprits.
        """
        counts = Counter(self._free)
        counts.update(held)
        wrong = {block: count for block, count in counts.items() if count != 1 or not 0 <= block < self.size}
        lost = sorted(set(range(self.size)) - counts.keys())
        assert not wrong, f"{self.name}: blocks held or free more than once, or unknown: {wrong}"
        assert not lost, f"{self.name}: blocks neither free nor held: {lost}"
