"""Where pieces of cache memory lie outside of the device: host memory, bounded, and behind it a folder.

Files are `disk_tier.py`'s; which pieces come and go is `cache_tiers.py`'s.
"""

from collections import OrderedDict
from pathlib import Path

from torch import Tensor

from deepinfer.engine.disk_tier import DiskTier


class HostTier:
    """Pieces in host memory, at most `limit` bytes, the longest unused go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._pieces: OrderedDict[bytes, Tensor] = OrderedDict()

    def has(self, key: bytes) -> bool:
        """Whether the piece is there."""
        return key in self._pieces

    def get(self, key: bytes) -> Tensor | None:
        """Return a piece, which counts as used."""
        found = self._pieces.get(key)
        if found is not None:
            self._pieces.move_to_end(key)
        return found

    def put(self, key: bytes, data: Tensor) -> None:
        """Keep a piece, if it fits at all."""
        if key in self._pieces or data.nbytes > self._limit:
            return
        self._pieces[key] = data
        self._bytes += data.nbytes
        while self._bytes > self._limit:
            self._bytes -= self._pieces.popitem(last=False)[1].nbytes


class PieceStore:
    """Host memory of `host_bytes`, and `disk_bytes` of files in `folder` (None = none).

    layout  32 bytes that tell engines apart whose pieces mean different things
    Raises ConfigError for a folder that is taken or cannot be used.
    """

    def __init__(self, *, host_bytes: int, folder: Path | None, disk_bytes: int, layout: bytes) -> None:
        self._host = HostTier(host_bytes)
        self.disk = None if folder is None else DiskTier(folder, disk_bytes, layout)

    def has(self, key: bytes) -> bool:
        """Whether a piece is there."""
        return self._host.has(key) or (self.disk is not None and self.disk.has(key))

    def get(self, key: bytes) -> Tensor | None:
        """Return a piece, from disk by way of host memory; None when it is not there or damaged."""
        found = self._host.get(key)
        if found is None and self.disk is not None:
            found = self.disk.get(key)
            if found is not None:
                self._host.put(key, found)
        return found

    def put(self, key: bytes, data: Tensor) -> None:
        """Keep a piece; its file is written by another thread."""
        self._host.put(key, data)
        if self.disk is not None:
            self.disk.put(key, data)

    def close(self) -> None:
        """Finish writing and leave the folder to others."""
        if self.disk is not None:
            self.disk.close()
