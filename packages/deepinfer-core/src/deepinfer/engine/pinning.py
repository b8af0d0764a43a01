"""Prompts whose cached blocks stay on the device whatever else needs room: `Pins`.

What is cached of a text, and what a request needs to go on from it, is `prefix_cache.py`'s.
"""

import numpy as np

from deepinfer.accelerator.batch import BLOCK_TOKENS
from deepinfer.engine.block_pool import Cached, Node, labels
from deepinfer.engine.pins import Pin
from deepinfer.engine.prefix_cache import PrefixCache
from deepinfer.engine.request import Request
from deepinfer.errors import RequestError


class Pins:
    """What is pinned in one engine: at most `blocks` and `windows`, so that the longest sequence still fits beside."""

    def __init__(self, prefixes: PrefixCache, *, blocks: int, windows: int) -> None:
        self._prefixes = prefixes
        self._blocks, self._windows = blocks, windows

    def add(self, request: Request, decoder_replay: int | None) -> Pin:
        """Hold what the cache has of the prompt of a request that has just ended, and what goes on from it needs.

        Raises RequestError, and holds nothing, when it has nothing of it or too little room would be left.
        """
        prefixes, tokens = self._prefixes, np.asarray(request.prompt_token_ids, dtype=np.int64)
        mode = request.prefix_cache or prefixes.mode
        wanted = [] if mode == "off" else labels(tokens)
        found = prefixes.walk(prefixes.tree.root(request.cache_salt), wanted, rough=mode == "replay")
        if not found:
            raise RequestError(
                f"nothing of this prompt of {len(tokens)} tokens is in the prefix cache: what is pinned must have at "
                f'least one whole block of {BLOCK_TOKENS} tokens, and must not say prefix_cache="off"'
            )
        windows, tails = set[Cached](), set[Cached]()
        if mode == "exact":
            windows, tails = self._snapshots([node for node, _ in found], len(tokens), decoder_replay)
        self._check_room({cached.block for _, cached in found}, {cached.block for cached in windows})
        pin = Pin(
            found[-1][0].end,
            tuple([prefixes.blocks.share(cached) for _, cached in found]),
            tuple([prefixes.windows.share(cached) for cached in windows]),
            tuple([prefixes.tails.share(cached) for cached in tails]),
        )
        prefixes.pinned.append(pin)
        return pin

    def remove(self, pin: Pin) -> None:
        """Let a pin go: its blocks stay cached as long as nothing else needs them. Raises RequestError for no pin."""
        prefixes = self._prefixes
        if pin not in prefixes.pinned:
            raise RequestError(f"{pin!r} is not pinned: it was unpinned before, or an interrupt emptied the cache")
        prefixes.pinned.remove(pin)
        prefixes.blocks.give(reversed(pin.blocks))
        prefixes.windows.give(pin.windows)
        prefixes.tails.give(pin.tails)

    def _snapshots(self, nodes: list[Node], length: int, decoder_replay: int | None) -> tuple[set[Cached], set[Cached]]:
        """Window blocks and tails of the snapshots at the last borders.

        A longer prompt goes on behind the last one of all; the same one, whose decoder half begins `decoder_replay`
        tokens before its end, behind the last one before that.
        """
        prefixes, windows, tails = self._prefixes, set[Cached](), set[Cached]()
        anchor = length - (decoder_replay or 1)
        for node in reversed(nodes):
            parts = [[cached for cached in part.windows.values() if cached] for part in prefixes.span(node)]
            if all(parts) and (node.tail or not prefixes.needs_stops):
                windows |= {cached for part in parts for cached in part}
                tails |= {node.tail} if node.tail else set()
                if node.end <= anchor:
                    break
        if not windows:
            raise RequestError(
                "no snapshot of this prompt could be kept, without which nothing goes on from it: other pins hold them "
                "all; unpin one, or give the cache more memory (memory_fraction)"
            )
        return windows, tails

    def _check_room(self, blocks: set[int], windows: set[int]) -> None:
        """Raise RequestError when these blocks and those of all pins would be too many."""
        for pin in self._prefixes.pinned:
            blocks, windows = blocks | set(pin.blocks), windows | set(pin.windows)
        if len(blocks) > self._blocks or len(windows) > self._windows:
            raise RequestError(
                f"with this prompt {len(blocks)} blocks of {BLOCK_TOKENS} tokens and {len(windows)} of window KV would "
                f"be pinned, and at most {self._blocks} and {self._windows} may be, so that the longest sequence still "
                "fits beside them: unpin another prompt, lower max_model_len, or raise memory_fraction"
            )
