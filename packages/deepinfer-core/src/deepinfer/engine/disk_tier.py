"""Cached pieces in a folder: bounded, checked, written by a thread of its own, whole after any end of the process.

What a piece is and who needs it is `cache_tiers.py`'s; the format of a file is `block_file.py`'s.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections import OrderedDict, deque
from pathlib import Path

from torch import Tensor

from deepinfer.engine.block_file import HEADER_BYTES, KEY_BYTES, Damaged, Piece, read_piece, write_piece
from deepinfer.errors import ConfigError

SUFFIX = ".piece"
UNFINISHED = ".unfinished"
QUEUE_BYTES = 1 << 28
"""Pieces that wait to be written; what comes while so many wait is not kept on disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger(__name__)


class DiskTier:
    """Pieces by key, at most `limit` bytes of files in `folder`, the longest unused go first.

    A piece is acknowledged (`saved` counts it) once its file is complete under its own name and the folder is
    synchronised; a process that ends before leaves a file that the next start removes.  What cannot be written or read
    is as if it had never been there, with one warning of each kind.  One process at a time owns a folder; raises
    ConfigError for one that is taken or cannot be used.
    """

    def __init__(self, folder: Path, limit: int, layout: bytes) -> None:
        self.folder = folder
        self.saved = 0
        self._limit = limit
        self._layout = layout
        self._owner = _own(folder)
        self._files: OrderedDict[bytes, int] = _scan(folder)
        self._bytes = sum(self._files.values())
        self._queue: deque[tuple[bytes, Tensor]] = deque()
        self._queued: dict[bytes, Tensor] = {}
        self._queued_bytes = 0
        self._warned: set[str] = set()
        self._changed = threading.Condition()
        self._closing = False
        with self._changed:
            self._make_room(0, limit)
        self._writer = threading.Thread(target=self._write_all, name="deepinfer-disk-tier", daemon=True)
        self._writer.start()

    def has(self, key: bytes) -> bool:
        """Whether the piece is there, or on its way."""
        return key in self._files or key in self._queued

    def get(self, key: bytes) -> Tensor | None:
        """Read a piece; None when it is not there or not as it was written."""
        with self._changed:
            waiting = self._queued.get(key)
            if waiting is not None or key not in self._files:
                return waiting
            self._files.move_to_end(key)
        path = self._path(key)
        try:
            piece = read_piece(path.read_bytes())
            if (piece.key, piece.layout) != (key, self._layout):
                raise Damaged("it holds another piece than its name says")
            os.utime(path)
        except (OSError, Damaged) as error:
            self._warn("read", f"{path}: a cached piece cannot be used and is removed: {error}")
            with self._changed:
                self._remove(key)
            return None
        return piece.data

    def put(self, key: bytes, data: Tensor) -> None:
        """Queue a piece to be written; returns at once."""
        with self._changed:
            if self.has(key) or self._closing or self._queued_bytes + data.nbytes > QUEUE_BYTES:
                return
            self._queue.append((key, data))
            self._queued[key] = data
            self._queued_bytes += data.nbytes
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything that was put is written or given up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queued)

    def close(self) -> None:
        """Write what waits, and leave the folder to others."""
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join()
        os.close(self._owner)

    def _write_all(self) -> None:
        """The writer thread: one piece after the other, acknowledged when it is safe."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                key, data = self._queue.popleft()
                self._make_room(data.nbytes + HEADER_BYTES, self._limit)
            size = self._write(key, data)
            with self._changed:
                if size:
                    self._files[key] = size
                    self._bytes += size
                    self.saved += 1
                del self._queued[key]
                self._queued_bytes -= data.nbytes
                self._changed.notify_all()

    def _write(self, key: bytes, data: Tensor) -> int:
        """Write one file, in place of older ones where the disk is full; return its size, 0 when that failed."""
        path = self._path(key)
        try:
            file = write_piece(Piece(key, self._layout, data))
            if len(file) > self._limit:
                return 0
            try:
                _write_whole(path, file)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with self._changed:
                    self._make_room(len(file), min(self._bytes, self._limit))
                _write_whole(path, file)
        except Exception as error:  # noqa: BLE001 - who closes the folder waits for this thread, so it must not die
            self._warn("write", f"{path}: cannot keep cached pieces on disk: {error}; the engine goes on without them")
            return 0
        return len(file)

    def _make_room(self, size: int, limit: int) -> None:
        """Remove the longest unused until `size` bytes more are at most `limit`."""
        while self._files and self._bytes + size > limit:
            self._remove(next(iter(self._files)))

    def _remove(self, key: bytes) -> None:
        self._bytes -= self._files.pop(key, 0)
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", text)


def _own(folder: Path) -> int:
    """Make the folder and lock it for this process; the lock ends with it, however it ends."""
    try:
        for number in range(256):
            (folder / f"{number:02x}").mkdir(parents=True, exist_ok=True)
        owner = os.open(folder / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"prefix_cache_dir={str(folder)!r} cannot be used: {error}; choose another folder") from error
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(owner)
        raise ConfigError(
            f"prefix_cache_dir={str(folder)!r} is in use by another engine: give each engine a folder of its own"
        ) from error
    return owner


def _scan(folder: Path) -> OrderedDict[bytes, int]:
    """Sizes of the files by key, the longest unused first; what was not finished is removed."""
    found: list[tuple[int, bytes, int]] = []
    for path in folder.glob(f"*/*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            path.unlink()
    for path in folder.glob(f"*/*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):
            key, status = bytes.fromhex(path.stem), path.stat()
            if len(key) == KEY_BYTES:
                found.append((status.st_mtime_ns, key, status.st_size))
    return OrderedDict((key, size) for _, key, size in sorted(found))


def _write_whole(path: Path, file: bytes) -> None:
    """Write a file that is there whole or not at all, and survives a loss of power; raises OSError."""
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with unfinished.open("wb") as opened:
            opened.write(file)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(path)
        _synchronise(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _synchronise(folder: Path) -> None:
    """Make a rename in `folder` survive a loss of power."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
