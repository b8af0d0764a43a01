"""Which computed blocks a request may go on from, and which are worth keeping: `PrefixCache`.

The books of memory and the tree of texts are `block_pool.py`'s.
Source: model card, bounded replay and prefill truncation.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain

import numpy as np

from deepinfer.accelerator.batch import BLOCK_TOKENS, ROLLBACK_TOKENS, tail_ring, tail_tokens
from deepinfer.engine.block_pool import (
    NO_DECODER,
    NOTHING,
    BlockPool,
    Border,
    Cached,
    Hit,
    Node,
    PrefixTree,
    Published,
    Trail,
    labels,
    nearest,
)
from deepinfer.engine.bounded_replay import ReplayRule, replayed
from deepinfer.engine.config import SNAPSHOT_SPACING, EngineConfig
from deepinfer.engine.pins import Pin
from deepinfer.engine.plan import Plan, Sampled
from deepinfer.engine.request import CacheUse
from deepinfer.engine.sequence import Integers, Sequence, SequenceTable
from deepinfer.model.cache_layout import OVERLAPPING
from deepinfer.model.config import ModelConfig
from deepinfer.model.kv_cache import KVCache

BORDERS = 2
"""Snapshots are kept at so many borders before the point where the same prompt must go on at the latest."""
LATE = tail_ring(OVERLAPPING) - tail_tokens(OVERLAPPING) // 2 - ROLLBACK_TOKENS
"""So many tokens behind a border the memory of compressors still has the group that ended there."""


class PrefixCache:
    """The cache of one engine, and with it the three pools of its memory; used by the `Scheduler` alone.

    "exact" goes on where a snapshot of the windows was kept: the numbers are those of a cold run.  "replay" runs the
    last window before the end of the found tokens again, with window keys from there on only; what it computes then is
    approximate, and exact requests never read it.  `journal`, where somebody keeps one, tells what was published.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, cache: KVCache, seed: bytes) -> None:
        self.blocks = BlockPool("blocks", config.blocks)
        self.windows = BlockPool("window blocks", config.window_blocks)
        self.tails = BlockPool("tails", cache.snapshots)
        self._cache = cache
        self.mode = config.prefix_cache
        self._window = model.window
        self._granule = max(model.ratios, default=1)
        self._replay = config.decoder_replay or 1
        self.tree = PrefixTree(seed, 4 * config.blocks + 1024)
        self._counted = ((-1, -1), 0)
        self.journal: deque[Published] | None = None
        self.pinned: list[Pin] = []

    @property
    def needs_stops(self) -> bool:
        """Whether a snapshot needs a step that ends at its border: compressors remember only the last tokens."""
        return self._cache.snapshots > 0

    def find(self, sequence: Sequence) -> Hit:
        """Find where a waiting sequence goes on, and hold what it needs for that."""
        trail = self.trail(sequence)
        if trail.mode == "off":
            trail.use = CacheUse("off", 0, 0, sequence.prompt_length, None, "prefix_cache is off")
            return NOTHING
        reusable = sequence.tokens[: len(sequence.tokens) - 1]
        found = self.walk(trail.root, labels(reusable), rough=trail.mode == "replay")
        if trail.mode == "exact":
            hit = self._resume(sequence, found)
        else:
            hit = replayed(sequence, found, ReplayRule(self._window, self._granule), self.blocks)
        if not trail.admitted:
            trail.use = self._told(sequence, hit, found, reusable)
        trail.passed = hit.start
        return hit

    def shared_by(self, sequence: Sequence) -> int:
        """How many blocks of a waiting sequence running ones hold already."""
        trail, state = self.trail(sequence), (sequence.id, self.blocks.free)
        if trail.mode == "off":
            return 0
        if state != self._counted[0]:
            found = self.walk(trail.root, labels(sequence.tokens[: len(sequence.tokens) - 1]), rough=False)
            self._counted = state, sum(self.blocks.holders(cached) > 0 for _, cached in found)
        return self._counted[1]

    def give_back(self, hit: Hit) -> None:
        """Let go of what a sequence found and has no room to use."""
        self.blocks.give(reversed(hit.blocks))
        self.windows.give(hit.windows)
        self._let_go(hit)

    def adopt(self, table: SequenceTable, row: int, hit: Hit) -> None:
        """Give a seated sequence the memory that it does not share: a partial block, the compressors' memory."""
        if hit.partial >= 0:
            self._cache.copy_block(hit.partial, int(table.blocks[row, len(hit.blocks)]))
        if hit.tail >= 0:
            self._cache.load_tail(hit.tail, row)
        self._let_go(hit)
        trail = self.trail(table[row])
        trail.rough, trail.admitted = hit.rough, True

    def passed(self, table: SequenceTable, plan: Plan) -> None:
        """Keep the windows at borders that a step given to the device passes, before they are given back."""
        crossed = table.computed[plan.rows] // BLOCK_TOKENS > plan.starts // BLOCK_TOKENS
        for row in plan.rows[crossed].tolist():
            self._keep_windows(table, row)

    def landed(self, table: SequenceTable, plan: Plan, sampled: Sampled) -> None:
        """Let others find what a step has completed."""
        ends = plan.starts + (plan.counts if plan.drafts is None else plan.counts - plan.drafts)
        ends[plan.samples] += sampled.counts - 1
        for i in np.flatnonzero(ends // BLOCK_TOKENS > plan.starts // BLOCK_TOKENS).tolist():
            row = int(plan.rows[i])
            if not (table[row].finished or row in sampled.lost):
                self._publish(table, row, int(ends[i]))

    def _keep_windows(self, table: SequenceTable, row: int) -> None:
        """Hold what a snapshot needs at each border that a sequence has passed, until `publish` comes so far."""
        sequence = table[row]
        trail = self.trail(sequence)
        computed = int(table.computed[row])
        if trail.mode != "exact":
            return
        while (end := (trail.passed // BLOCK_TOKENS + 1) * BLOCK_TOKENS) <= computed:
            trail.passed = end
            late = self.needs_stops and (computed - end > LATE or not self.tails.free)
            if late or not self._wanted(sequence, trail, end):
                continue
            base, depth = int(table.window_bases[row]), end // BLOCK_TOKENS
            first = max(max(end - self._window + 1, 0) // BLOCK_TOKENS, base)
            held = {place + 1: int(table.windows[row, place - base]) for place in range(first, depth)}
            self.windows.hold(held.values())
            tail = self.tails.take(1)[0] if self.needs_stops else -1
            if tail >= 0:
                self._cache.save_tail(row, tail)
            trail.pending.append(Border(end, held, tail))

    def _publish(self, table: SequenceTable, row: int, end: int) -> None:
        """Make what a sequence has computed up to its last whole block before `end` findable, with its snapshots."""
        sequence = table[row]
        trail = self.trail(sequence)
        if trail.mode == "off":
            return
        self._keep_windows(table, row)
        known = min(end, sequence.prompt_length + len(sequence.generated))
        while (stop := trail.node.end + BLOCK_TOKENS) <= known:
            node = trail.node = self.tree.add(trail.node, labels(sequence.ids(stop - BLOCK_TOKENS, stop))[0])
            if node.entries(rough=trail.rough) is None:
                cached = self.blocks.publish(int(table.blocks[row, node.depth - 1]))
                if trail.rough:
                    node.rough = cached
                else:
                    node.exact = cached
                self._tell(Published(node, "rough" if trail.rough else "exact", cached))
            while trail.pending and trail.pending[0].end <= stop:
                self._take_snapshot(sequence, trail, node, trail.pending.popleft())
        while trail.kept and trail.kept[0].end <= known - self._replay - BORDERS * BLOCK_TOKENS:
            self._drop_snapshot(trail.kept.popleft(), sequence.decoder_start)

    def leave(self, sequence: Sequence) -> None:
        """Let go of what is held for a sequence that loses its place."""
        if sequence.trail is not None:
            for border in sequence.trail.pending:
                self._let_border_go(border)
            sequence.trail.pending.clear()

    def cut(self, sequence: Sequence, start: int, count: int) -> int:
        """At most `count` tokens from `start` on, so that the step ends where a snapshot needs a step's end."""
        trail = self.trail(sequence)
        if not self.needs_stops or trail.mode != "exact":
            return count
        near = max(start, self._anchor(sequence) - BORDERS * BLOCK_TOKENS)
        stops = [start // SNAPSHOT_SPACING * SNAPSHOT_SPACING + SNAPSHOT_SPACING]
        stops.append(near // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS)
        if trail.branch > start:
            stops.append(trail.branch)
        return min(count, min(stops) - start)

    def clear(self) -> None:
        """Forget everything, whoever holds it."""
        for pool in (self.blocks, self.windows, self.tails):
            pool.clear()
        self.tree = self.tree.emptied()
        self.pinned.clear()

    def check(self, sequences: Iterable[Sequence]) -> tuple[list[int], list[int]]:
        """Re-add the books of the tails; return blocks and window blocks of pins and of snapshots of `sequences`."""
        borders = [border for one in sequences if one.trail is not None for border in one.trail.pending]
        pinned = [block for pin in self.pinned for block in pin.blocks]
        held = [*(border.windows.values() for border in borders), *(pin.windows for pin in self.pinned)]
        tails = [*([border.tail] for border in borders if border.tail >= 0), *(pin.tails for pin in self.pinned)]
        self.tails.check(chain.from_iterable(tails))
        return pinned, list(chain.from_iterable(held))

    def trail(self, sequence: Sequence) -> Trail:
        """Where a sequence stands; at its root at first."""
        if sequence.trail is None:
            root = self.tree.root(sequence.request.cache_salt)
            sequence.trail = Trail(root, root, sequence.request.prefix_cache or self.mode)
        return sequence.trail

    def walk(self, root: Node, wanted: list[bytes], *, rough: bool) -> list[tuple[Node, Cached]]:
        """The blocks of a text that are there, from its first on, without a gap."""
        node, found = root, []
        for label in wanted:
            child = node.children.get(label)
            if child is None:
                break
            cached = child.exact
            if cached is None or cached.block < 0:
                cached = child.entries(rough=rough)
                if cached is None:
                    break
            found.append((child, cached))
            node = child
        return found

    def _resume(self, sequence: Sequence, found: list[tuple[Node, Cached]]) -> Hit:
        """Go on behind the last block whose end has a snapshot that fits; entries behind it are shared all the same."""
        trail = self.trail(sequence)
        place = next(
            (
                i
                for i in range(len(found) - 1, -1, -1)
                if found[i][0].end <= sequence.resume_limit and self.fits(found[i][0], sequence)
            ),
            -1,
        )
        blocks = tuple([self.blocks.share(cached) for _, cached in found])
        written = len(blocks) * BLOCK_TOKENS
        trail.node, trail.branch = trail.root, written
        if place < 0:
            return Hit(written=written, blocks=blocks)
        node = trail.node = found[place][0]
        windows = tuple(self.windows.share(cached) for cached in self._windows_of(node, sequence.decoder_start))
        tail = self.tails.share(node.tail) if self.needs_stops and node.tail else -1
        base = node.depth - len(windows)
        return Hit(node.end, written, blocks, windows=windows, window_base=base, tail=tail)

    def _told(self, sequence: Sequence, hit: Hit, found: list[tuple[Node, Cached]], tokens: Integers) -> CacheUse:
        """What the request is told: how much was found, and where and why no more."""
        trail = self.trail(sequence)
        here = len(found) * BLOCK_TOKENS
        mode, replayed, computed = trail.mode, hit.written - hit.start, sequence.prompt_length - hit.start
        rest = tokens[here : here + BLOCK_TOKENS]
        if len(rest) < BLOCK_TOKENS:
            why = "" if here else f"shorter than a block of {BLOCK_TOKENS} tokens"
            return CacheUse(mode, hit.written, replayed, computed, None if here else 0, why)
        parent = found[-1][0] if found else trail.root
        label = labels(rest)[0]
        if label in parent.children:
            return CacheUse(mode, hit.written, replayed, computed, here, "evicted")
        if not found and self.tree.elsewhere(trail.root, label):
            return CacheUse(mode, hit.written, replayed, computed, 0, "other salt")
        child, common = nearest(parent, rest)
        if child is None:
            return CacheUse(mode, hit.written, replayed, computed, here, "never seen")
        return CacheUse(mode, hit.written, replayed, computed, here + common, f"token {here + common} differs")

    def _anchor(self, sequence: Sequence) -> int:
        """The latest position at which another request with the same prompt can go on."""
        return sequence.decoder_start or sequence.prompt_length - 1

    def _wanted(self, sequence: Sequence, trail: Trail, border: int) -> bool:
        near = border > self._anchor(sequence) - BORDERS * BLOCK_TOKENS
        return near or border % SNAPSHOT_SPACING == 0 or border == trail.branch

    def span(self, node: Node) -> list[Node]:
        """The nodes, ending with this one, in whose tokens the window of the row behind it lies."""
        nodes = [node]
        while nodes[-1].parent is not None and nodes[-1].end - BLOCK_TOKENS > max(node.end - self._window + 1, 0):
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def _windows_of(self, node: Node, decoder_start: int) -> list[Cached]:
        """The window blocks that the row behind `node` needs; none when one of them is not there."""
        found = [self.window(part, decoder_start) for part in self.span(node)]
        return [cached for cached in found if cached is not None] if None not in found else []

    def fits(self, node: Node, sequence: Sequence) -> bool:
        """Whether `sequence` can go on behind `node`."""
        if not node.windows or (self.needs_stops and not node.tail):
            return False
        return bool(self._windows_of(node, sequence.decoder_start))

    def window(self, node: Node, decoder_start: int) -> Cached | None:
        """Window KV of a block for a run whose decoder half begins at `decoder_start`.

        From there on the run must find the decoder half as its own cold run would have left it; before, nobody reads
        it.
        """
        if node.end <= decoder_start:
            return next((cached for cached in node.windows.values() if cached.block >= 0), None)
        return node.windows.get(decoder_start) or None

    def file_window(self, node: Node, decoder_start: int, cached: Cached) -> None:
        """Note the window KV of a block, of a run whose decoder half began at `decoder_start`."""
        node.windows = {run: held for run, held in node.windows.items() if held}  # dead ones of other lengths pile up
        node.windows[decoder_start if decoder_start < node.end else NO_DECODER] = cached

    def _take_snapshot(self, sequence: Sequence, trail: Trail, node: Node, border: Border) -> None:
        """Publish what was kept at the end of `node`, where it is not there already."""
        start = sequence.decoder_start
        if border.end == node.end and not self.fits(node, sequence):
            for part in self.span(node):
                if part.depth in border.windows and self.window(part, start) is None:
                    cached = self.windows.publish(border.windows[part.depth])
                    self.file_window(part, start, cached)
                    self._tell(Published(part, "windows", cached, start))
            if border.tail >= 0 and not node.tail:
                node.tail = self.tails.publish(border.tail)
                self._tell(Published(node, "tail", node.tail))
            if node.end > sequence.prompt_length and node.end % SNAPSHOT_SPACING:
                trail.kept.append(node)
        self._let_border_go(border)

    def _tell(self, published: Published) -> None:
        if self.journal is not None:
            self.journal.append(published)

    def _let_border_go(self, border: Border) -> None:
        self.windows.give(border.windows.values())
        if border.tail >= 0:
            self.tails.give([border.tail])

    def _drop_snapshot(self, node: Node, decoder_start: int) -> None:
        """Free a snapshot of generated text that later ones make superfluous."""
        of_run = decoder_start if decoder_start < node.end else NO_DECODER
        cached = node.windows.get(of_run)
        if cached and not self.windows.holders(cached):
            self.windows.retire(node.windows.pop(of_run))
        if node.tail and not self.tails.holders(node.tail):
            self.tails.retire(node.tail)

    def _let_go(self, hit: Hit) -> None:
        if hit.partial >= 0:
            self.blocks.give([hit.partial])
        if hit.tail >= 0:
            self.tails.give([hit.tail])
