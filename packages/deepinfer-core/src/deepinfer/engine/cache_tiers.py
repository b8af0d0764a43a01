"""Slower memory behind the prefix cache: what is published is copied there, and comes back when a prompt needs it.

What a request goes on from is `prefix_cache.py`'s; where the copies lie is `piece_store.py`'s.
"""

import logging
from collections import deque
from dataclasses import dataclass

from deepinfer.engine.block_pool import BlockPool, Cached, Node, Published, content_key, labels
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.piece_store import PieceStore
from deepinfer.engine.prefix_cache import PrefixCache
from deepinfer.engine.sequence import Sequence
from deepinfer.model.cache_pieces import CachePieces, Part

_log = logging.getLogger(__name__)

MOVES_A_STEP = 16
"""Pieces that a step saves, and blocks that it loads, while sequences run: these copies make them wait."""
MOST_WAITS = 8
"""Steps that a request waits for pieces beyond those that its length explains: others may take their blocks again."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A piece that is to be saved."""

    key: bytes
    part: Part
    cached: Cached


class CacheTiers:
    """Saves what `prefixes` publishes, and brings back what a waiting sequence can go on from.

    An exception while a piece is moved ends no request: the tiers are given up, with one warning, and what was to be
    saved is dropped; files that are complete stay.
    """

    def __init__(self, prefixes: PrefixCache, pieces: CachePieces, store: PieceStore) -> None:
        self._prefixes = prefixes
        self._pieces = pieces
        self._store = store
        self._journal: deque[Published] = deque()
        self._unsaved: deque[_Copy] = deque()
        self._moves_left = MOVES_A_STEP
        self._short = False
        self._given_up = False
        prefixes.journal = self._journal

    def end_step(self, *, busy: bool) -> None:
        """Copy what was published, all of it when nobody waits for the next step, as long as blocks still hold it."""
        try:
            self._save(busy=busy)
        except Exception as error:  # noqa: BLE001 - whatever a device or a store raises, requests go on without
            self._give_up("saved", error)

    def _save(self, *, busy: bool) -> None:
        while self._journal:
            self._unsaved += self._copies(self._journal.popleft())
        moves = MOVES_A_STEP if busy else len(self._unsaved)
        while self._unsaved and moves > 0:
            copy = self._unsaved.popleft()
            if copy.cached and not self._store.has(copy.key):
                self._store.put(copy.key, self._pieces.pack(copy.part, copy.cached.block))
                moves -= 1
        self._moves_left = MOVES_A_STEP if busy else 1 << 62

    def fetch(self, sequence: Sequence) -> bool:
        """Bring back what `sequence` can use and the device has not; False when more comes with the next step."""
        trail = self._prefixes.trail(sequence)
        if trail.mode == "off" or self._given_up:
            return True
        try:
            return self._bring_back(sequence)
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up("loaded", error)
            return True

    def close(self) -> None:
        """Save what is left and leave the folder to others."""
        self.end_step(busy=False)
        self._store.close()

    def _give_up(self, what: str, error: Exception) -> None:
        """Neither save nor load from here on; nothing is held for what was under way."""
        self._given_up = True
        self._prefixes.journal = None
        self._journal.clear()
        self._unsaved.clear()
        _log.warning(
            "a cached piece could not be %s (%s: %s): memory and disk behind the prefix cache are off from here on and "
            "requests go on without; start anew to use them again",
            what,
            type(error).__name__,
            error,
        )

    def _bring_back(self, sequence: Sequence) -> bool:
        trail = self._prefixes.trail(sequence)
        before, self._short = self._moves_left, False
        found = self._fetch_entries(sequence)
        if trail.mode == "exact" and not self._short:
            self._fetch_snapshot(sequence, found)
        trail.waits += 1
        return not (self._short and self._moves_left < before) or trail.waits > MOST_WAITS + len(found) // MOVES_A_STEP

    def _copies(self, published: Published) -> list[_Copy]:
        """The pieces of what was published."""
        node, cached, start = published.node, published.cached, published.decoder_start
        if published.kind != "windows":
            part: Part = "tails" if published.kind == "tail" else "entries"
            return [_Copy(_key(node.key, part, published.kind), part, cached)]
        parts = self._window_parts(node, start)
        return [_Copy(_key(node.key, part, variant), part, cached) for part, variant in parts]

    def _window_parts(self, node: Node, start: int) -> list[tuple[Part, str]]:
        """The pieces of a window block for a run whose decoder half begins at `start`."""
        parts: list[tuple[Part, str]] = [("encoder windows", "")]
        if start < node.end and self._pieces.size("decoder windows"):
            parts.append(("decoder windows", str(start)))
        return parts

    def _fetch_entries(self, sequence: Sequence) -> list[Node]:
        """The nodes of the blocks of a text that are on the device, those that were brought back included."""
        blocks, node = self._prefixes.blocks, self._prefixes.trail(sequence).root
        nodes, held = list[Node](), list[int]()
        try:
            for label in labels(sequence.tokens[: len(sequence.tokens) - 1]):
                child = self._fetch_child(node, label, rough=self._prefixes.trail(sequence).mode == "replay")
                if child is None:
                    break
                node, cached = child
                held.append(blocks.share(cached))
                nodes.append(node)
        finally:
            blocks.give(reversed(held))
        return nodes

    def _fetch_child(self, parent: Node, label: bytes, *, rough: bool) -> tuple[Node, Cached] | None:
        """The block with that label behind `parent`, brought back where the device has it not; None = not there."""
        prefixes, child = self._prefixes, parent.children.get(label)
        cached = None if child is None else child.entries(rough=rough)
        if child is not None and cached is not None:
            return child, cached
        child = child or prefixes.tree.unborn(parent, label)
        for kind in ("exact", "rough")[: 1 + rough]:
            cached = self._load(child, [("entries", kind)], prefixes.blocks)
            if cached is not None:
                child = prefixes.tree.add(parent, label)
                if kind == "exact":
                    child.exact = cached
                else:
                    child.rough = cached
                return child, cached
        return None

    def _fetch_snapshot(self, sequence: Sequence, nodes: list[Node]) -> None:
        """Bring back the last snapshot behind which `sequence` can go on, unless the device has it."""
        prefixes, limit = self._prefixes, sequence.resume_limit
        for node in reversed(nodes):
            if node.end > limit:
                continue
            if prefixes.fits(node, sequence) or self._load_snapshot(node, sequence) or self._short:
                return

    def _load_snapshot(self, node: Node, sequence: Sequence) -> bool:
        prefixes, start = self._prefixes, sequence.decoder_start
        if prefixes.needs_stops and not node.tail:
            node.tail = self._load(node, [("tails", "tail")], prefixes.tails)
            if node.tail is None:
                return False
        for part in prefixes.span(node):
            if prefixes.window(part, start) is None:
                cached = self._load(part, self._window_parts(part, start), prefixes.windows)
                if cached is None:
                    return False
                prefixes.file_window(part, start, cached)
        return prefixes.fits(node, sequence)

    def _load(self, node: Node, parts: list[tuple[Part, str]], pool: BlockPool) -> Cached | None:
        """Bring all `parts` of one block into a block of `pool`, idle at first; None when one of them is not there."""
        keys = [_key(node.key, part, variant) for part, variant in parts]
        if not pool.free or not all(self._store.has(key) for key in keys):
            return None
        if self._moves_left <= 0:
            self._short = True
            return None
        self._moves_left -= 1
        loaded = [(part, self._store.get(key)) for key, (part, _) in zip(keys, parts, strict=True)]
        whole = [(part, data) for part, data in loaded if data is not None and data.nbytes == self._pieces.size(part)]
        if len(whole) < len(parts):
            return None
        blocks = pool.take(1)
        try:
            for part, data in whole:
                self._pieces.unpack(part, blocks[0], data)
        except BaseException:
            pool.give(blocks)
            raise
        cached = pool.publish(blocks[0])
        pool.give(blocks)
        return cached


def _key(content: bytes, part: Part, variant: str) -> bytes:
    """Key of one piece of a block: of the content key, what the piece is, and which of several."""
    return content_key([(b"content", content), (b"part", part.encode()), (b"variant", variant.encode())])


def open_tiers(config: EngineConfig, prefixes: PrefixCache, pieces: CachePieces, layout: bytes) -> CacheTiers:
    """Make the tiers that `config` asks for; raises ConfigError for a folder that is taken or cannot be used."""
    store = PieceStore(
        host_bytes=config.prefix_cache_host_bytes,
        folder=config.prefix_cache_dir,
        disk_bytes=config.prefix_cache_disk_bytes,
        layout=layout,
    )
    return CacheTiers(prefixes, pieces, store)
