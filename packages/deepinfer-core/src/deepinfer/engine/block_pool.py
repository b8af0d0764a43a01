"""What cache blocks hold: `BlockPool`, the books of one pool, and `PrefixTree`, the texts whose blocks can be found.

The memory itself is `model/kv_cache.py`'s; who holds a block for which tokens is the `Scheduler`'s, and which texts a
request may go on from is `PrefixCache`'s.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.request import CacheMode, CacheUse

LABEL_BYTES = 4 * BLOCK_TOKENS
"""A block's tokens as little-endian 32-bit numbers, with which its label begins; digests of images follow."""

COMPARED = 32
"""Most sisters that a block which was not found is compared with, newest first."""


class Cached:
    """A block whose content can be found again: `block` is its number, -1 once the pool has given it to another use."""

    __slots__ = ("block",)

    def __init__(self, block: int) -> None:
        self.block = block

    def __bool__(self) -> bool:
        return self.block >= 0


class BlockPool:
    """Hands out block numbers 0 .. size - 1, counts who holds each, and keeps published ones when nobody does.

    A block is free (content lost), held by one or more, or idle: published and held by nobody.  Idle blocks are given
    to a new use when no free one is left, the longest idle first.  `name` appears in messages.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Begin anew: all blocks are free, whoever held them."""
        self._free = list(range(self.size - 1, -1, -1))
        self._holders = [0] * self.size
        self._published: list[Cached | None] = [None] * self.size
        self._idle: dict[int, None] = {}

    @property
    def free(self) -> int:
        """How many blocks can be taken: nobody holds them."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """How many of these still have content that can be found."""
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks, free ones first, then the longest idle; the caller has seen that so many are."""
        assert 0 <= count <= self.free, f"{self.name}: {count} blocks taken, {self.free} free"
        for block in list(islice(self._idle, max(count - len(self._free), 0))):
            del self._idle[block]
            self._forget(block)
            self._free.append(block)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for block in taken:
            self._holders[block] = 1
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """End one hold of each block; without a holder a published block becomes idle, any other free."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._published[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def holders(self, cached: Cached) -> int:
        """How many hold a published block."""
        return self._holders[cached.block]

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that somebody holds once more."""
        for block in blocks:
            assert self._holders[block] > 0, f"{self.name}: nobody holds block {block}"
            self._holders[block] += 1

    def publish(self, block: int) -> Cached:
        """Say that a held block has its final content, which others may share; return what finds it."""
        assert self._published[block] is None, f"{self.name}: block {block} is published already"
        self._published[block] = cached = Cached(block)
        return cached

    def share(self, cached: Cached) -> int:
        """Hold a published block once more; return its number."""
        block = cached.block
        assert self._published[block] is cached, f"{self.name}: block {block} has another use by now"
        if self._holders[block] == 0:
            del self._idle[block]
        self._holders[block] += 1
        return block

    def retire(self, cached: Cached) -> None:
        """End the publication of a block: free when nobody holds it."""
        block = cached.block
        self._forget(block)
        if self._holders[block] == 0:
            del self._idle[block]
            self._free.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Re-add the books: every block is free, idle, or as often among `held` as it has holders.

        Raises AssertionError with the culprits.
        """
        counts, nobody = Counter(held), Counter([*self._free, *self._idle])
        wrong = {block: count for block, count in nobody.items() if count != 1 or not 0 <= block < self.size}
        wrong |= {block: counts[block] for block in counts if block in nobody or not 0 <= block < self.size}
        assert not wrong, f"{self.name}: blocks held and free, free more than once, or unknown: {wrong}"
        lost = sorted(set(range(self.size)) - counts.keys() - nobody.keys())
        assert not lost, f"{self.name}: blocks neither free nor held: {lost}"
        off = {block: (self._holders[block], count) for block, count in counts.items() if self._holders[block] != count}
        assert not off, f"{self.name}: blocks whose holders are counted wrongly (counted, found): {off}"
        stale = [b for b, cached in enumerate(self._published) if cached is not None and cached.block != b]
        stale += [block for block in self._free if self._published[block] is not None]
        stale += [block for block in self._idle if self._published[block] is None]
        assert not stale, f"{self.name}: blocks whose publication does not fit: {stale}"

    def _forget(self, block: int) -> None:
        cached = self._published[block]
        assert cached is not None
        cached.block = -1
        self._published[block] = None


@dataclass(slots=True, eq=False)
class Node:
    """One block of 128 tokens behind all blocks before it.

    label       its tokens, and the digests of images that lie in it
    key         content key: a hash over the root's parts and all labels up to this one
    depth       blocks up to and with this one; its last token is number 128 * depth - 1
    exact       its entries, as a cold run computes them
    rough       its entries as they came out behind a bounded replay
    windows     its window KV, by the decoder start of the run that wrote it; `NO_DECODER` = no decoder rows in it
    tail        the compressors' memory at its end, where a model needs that
    """

    parent: "Node | None"
    label: bytes
    key: bytes
    depth: int
    children: dict[bytes, "Node"] = field(default_factory=dict)
    exact: Cached | None = None
    rough: Cached | None = None
    windows: dict[int, Cached] = field(default_factory=dict)
    tail: Cached | None = None

    @property
    def end(self) -> int:
        """Tokens up to its end."""
        return self.depth * BLOCK_TOKENS

    def entries(self, *, rough: bool) -> Cached | None:
        """Its entries if they are there: exact ones, or with `rough` those of a replay where it has no others."""
        if self.exact:
            return self.exact
        return self.rough if rough and self.rough else None

    @property
    def alive(self) -> bool:
        """Whether anything of it is on the device."""
        return bool(self.exact or self.rough or self.tail or any(self.windows.values()))


NO_DECODER = -1
"""In place of a decoder start: the run that wrote the window KV had no decoder rows in that block."""


@dataclass(frozen=True, slots=True)
class Published:
    """Something that can be found from now on: which part of a node, and for windows the decoder start of the run."""

    node: Node
    kind: Literal["exact", "rough", "windows", "tail"]
    cached: Cached
    decoder_start: int = 0


@dataclass(frozen=True, slots=True)
class Border:
    """What a sequence had when it passed a border: the window block of each depth up to it, and a copy of its tail."""

    end: int
    windows: dict[int, int]
    tail: int = -1


@dataclass(frozen=True, slots=True)
class Hit:
    """What a sequence finds; its blocks are held for it until `adopt` or `give_back`.

    start         first position to compute; before it everything is there
    written       entries before this position are there and are not written again
    blocks        of entries, from the first token on
    partial       one more block, whose first tokens are copied; -1 = none
    windows       blocks of window KV that the row at `start` sees, and the number of the first
    window_start  first position whose window KV any row sees
    tail          memory of the compressors at `start`; -1 = none is needed
    rough         what is computed from here on is approximate
    """

    start: int = 0
    written: int = 0
    blocks: tuple[int, ...] = ()
    partial: int = -1
    windows: tuple[int, ...] = ()
    window_base: int = 0
    window_start: int = 0
    tail: int = -1
    rough: bool = False


NOTHING = Hit()


@dataclass(slots=True, eq=False)
class Trail:
    """Where one request stands in the tree.

    root, node  of its salt; the last block that it has published or found
    mode        how it uses the cache
    rough       whether what it computes is approximate
    branch      border at which its prompt left the tree: worth a snapshot, since others may leave it there too
    pending     windows and tails at borders that it has passed, in order, held until their blocks are published
    passed      how far it was looked at for borders
    kept        its own snapshots that later ones make superfluous, oldest first
    use         what it is told in the end; that of its first admission counts
    admitted    whether it has had a place
    waits       steps that it waited for blocks from slower memory
    """

    root: Node
    node: Node
    mode: CacheMode
    rough: bool = False
    branch: int = 0
    pending: deque["Border"] = field(default_factory=deque)
    passed: int = 0
    kept: deque[Node] = field(default_factory=deque)
    use: CacheUse | None = None
    admitted: bool = False
    waits: int = 0


class PrefixTree:
    """All nodes below the roots, one root a salt; remembers at most `most` nodes, the oldest without content go first.

    seed  what all keys have in common: the cache's layout, the model's weights, how its numbers are computed
    """

    def __init__(self, seed: bytes, most: int) -> None:
        self._seed = seed
        self._most = most
        self._roots: dict[str | None, Node] = {}
        self._order: deque[Node] = deque()

    def __len__(self) -> int:
        return len(self._order)

    def root(self, salt: str | None) -> Node:
        """The root of a salt."""
        found = self._roots.get(salt)
        if found is None:
            named = [] if salt is None else [(b"salt", salt.encode("utf-8", "surrogatepass"))]
            parts = [(b"seed", self._seed), *named]
            if len(self._roots) > 2 * self._most:  # of salts whose texts have all been forgotten, or never had a block
                self._roots = {known: root for known, root in self._roots.items() if root.children}
            found = self._roots[salt] = Node(None, b"", content_key(parts), 0)
        return found

    def add(self, parent: Node, label: bytes) -> Node:
        """The child of `parent` with that label, made where there is none."""
        found = parent.children.get(label)
        if found is None:
            found = parent.children[label] = self.unborn(parent, label)
            self._order.append(found)
            self._prune()
        return found

    def unborn(self, parent: Node, label: bytes) -> Node:
        """The node that `add` would make, which nobody finds."""
        return Node(parent, label, child_key(parent, label), parent.depth + 1)

    def elsewhere(self, root: Node, label: bytes) -> bool:
        """Whether a text that begins with that label is known under another salt."""
        return any(other is not root and label in other.children for other in self._roots.values())

    def emptied(self) -> "PrefixTree":
        """A tree without nodes whose keys are those of this one."""
        return PrefixTree(self._seed, self._most)

    def _prune(self) -> None:
        """Forget the oldest nodes without content and without children; look at a few, so that a call stays short."""
        for _ in range(min(4, len(self._order) - self._most)):
            node = self._order.popleft()
            if node.children or node.alive or node.parent is None:
                self._order.append(node)
                continue
            del node.parent.children[node.label]
            if node.parent.depth == 0 and not node.parent.children:
                self._roots = {salt: root for salt, root in self._roots.items() if root is not node.parent}


def content_key(parts: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Hash named parts; each is framed by its name and length, so that no two lists of parts read the same."""
    framed = b"".join(b"%d:%s:%d:%s" % (len(name), name, len(data), data) for name, data in parts)
    return hashlib.sha256(framed).digest()


def child_key(parent: Node, label: bytes) -> bytes:
    """Key of the block with that label behind `parent`."""
    tokens, images = label[:LABEL_BYTES], label[LABEL_BYTES:]
    parts = [(b"parent", parent.key), (b"tokens", tokens)]
    return content_key([*parts, (b"images", images)] if images else parts)


def labels(tokens: NDArray[np.int64]) -> list[bytes]:
    """Labels of the whole blocks of a text."""
    data = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS].astype("<i4").tobytes()
    return [data[start : start + LABEL_BYTES] for start in range(0, len(data), LABEL_BYTES)]


def nearest(parent: Node, tokens: NDArray[np.int64]) -> tuple[Node | None, int]:
    """The child of `parent` that shares most of its first tokens with `tokens`, and how many these are."""
    best: tuple[Node | None, int] = (None, 0)
    for _, child in zip(range(COMPARED), reversed(parent.children.values()), strict=False):
        theirs = np.frombuffer(child.label[:LABEL_BYTES], "<i4")[: len(tokens)]
        differs = np.flatnonzero(theirs != tokens[: len(theirs)])
        common = int(differs[0]) if len(differs) else len(theirs)
        if best[0] is None or common > best[1]:
            best = child, common
    return best
