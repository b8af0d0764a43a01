"""A disk without room, as a writer meets it."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ROOM = 1000
"""Bytes that a file may still have."""


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond `ROOM` bytes: writing more fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
