"""The disk tier keeps what it acknowledged and never hands out what is not as it was written, whatever happens."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.engine import disk_tier
from deepinfer.engine.block_file import HEADER_BYTES, Damaged, Piece, read_piece, write_piece
from deepinfer.engine.disk_tier import DiskTier
from deepinfer.errors import ConfigError

from .checker import EXAMPLES
from .full_disk import full_disk

LAYOUT = bytes(range(32))
LIMIT = 1 << 24


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def data(number: int, size: int = 3000) -> Tensor:
    return torch.from_numpy(np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8))


@given(size=st.integers(0, 400), number=st.integers(0, 99), place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_file_reads_as_it_was_written_or_not_at_all(size: int, number: int, place: int, flip: int) -> None:
    file = write_piece(Piece(key(number), LAYOUT, data(number, size)))
    assert len(file) == HEADER_BYTES + size
    piece = read_piece(file)
    assert (piece.key, piece.layout) == (key(number), LAYOUT)
    assert torch.equal(piece.data, data(number, size))
    damaged = bytearray(file)
    damaged[place % len(file)] ^= flip
    with pytest.raises(Damaged):
        read_piece(bytes(damaged))
    with pytest.raises(Damaged):
        read_piece(file[: place % len(file)])
    with pytest.raises(Damaged):
        read_piece(file + b"x")


def test_pieces_survive_the_process(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT, LAYOUT)
    for number in range(5):
        tier.put(key(number), data(number))
    tier.close()
    assert tier.saved == 5
    again = DiskTier(tmp_path, LIMIT, LAYOUT)
    for number in range(5):
        assert again.has(key(number))
        found = again.get(key(number))
        assert found is not None
        assert torch.equal(found, data(number))
    assert again.get(key(9)) is None
    again.close()


@settings(max_examples=EXAMPLES // 10)
@given(order=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_the_folder_stays_below_its_size_and_the_longest_unused_go(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[bool, int]]
) -> None:
    folder = tmp_path_factory.mktemp("tier")
    limit = 4 * (3000 + HEADER_BYTES)
    tier = DiskTier(folder, limit, LAYOUT)
    wanted: list[int] = []
    for writes, number in order:
        if writes:
            tier.put(key(number), data(number))
            tier.flush()
            if number not in wanted:
                wanted = [*wanted, number][-4:]
        elif tier.get(key(number)) is not None:
            wanted = [*(other for other in wanted if other != number), number]
    assert sorted(wanted) == [number for number in range(10) if tier.has(key(number))]
    tier.close()
    assert sum(path.stat().st_size for path in folder.glob("*/*")) <= limit


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "exchange", "delete", "other layout"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, LIMIT, LAYOUT)
    for number in (1, 2):
        tier.put(key(number), data(number))
    tier.flush()
    path, other = tier._path(key(1)), tier._path(key(2))
    file = bytearray(path.read_bytes())
    if harm == "flip":
        file[200] ^= 1
        path.write_bytes(bytes(file))
    elif harm in ("cut", "empty"):
        path.write_bytes(bytes(file[: 150 if harm == "cut" else 0]))
    elif harm == "exchange":
        path.write_bytes(other.read_bytes())
    elif harm == "other layout":
        path.write_bytes(write_piece(Piece(key(1), bytes(32), data(1))))
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert tier.get(key(1)) is None
        assert tier.get(key(1)) is None
    assert not tier.has(key(1))
    assert not path.exists()
    assert len(caplog.records) == 1
    assert tier.get(key(2)) is not None
    tier.put(key(1), data(1))
    tier.flush()
    assert tier.get(key(1)) is not None
    tier.close()


def test_where_no_file_may_grow_what_is_there_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path, LIMIT, LAYOUT)
    for number in range(3):
        tier.put(key(number), data(number))
    tier.flush()
    with full_disk(), caplog.at_level(logging.WARNING):
        for number in range(3, 6):
            tier.put(key(number), data(number))
        tier.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot keep cached pieces on disk" in caplog.text
    assert not list(tmp_path.glob("*/*.unfinished"))
    tier.put(key(9), data(9))
    tier.flush()
    assert [number for number in range(10) if tier.has(key(number))] == [0, 1, 2, 9]
    tier.close()


def test_on_a_full_disk_newer_pieces_take_the_place_of_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk with room for four pieces, then for none, then for four again."""
    room = 4 * (3000 + HEADER_BYTES)
    synchronise = os.fsync

    def full(number: int) -> None:
        if sum(path.stat().st_size for path in tmp_path.glob("*/*")) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        synchronise(number)

    monkeypatch.setattr(disk_tier.os, "fsync", full)
    tier = DiskTier(tmp_path, LIMIT, LAYOUT)
    for number in range(7):
        tier.put(key(number), data(number))
        tier.flush()
    assert not caplog.records
    assert [number for number in range(10) if tier.has(key(number))] == [3, 4, 5, 6]
    room = 0
    for number in range(7, 13):
        tier.put(key(number), data(number))
        tier.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not any(tier.has(key(number)) for number in range(13))
    room = 4 * (3000 + HEADER_BYTES)
    for number in range(20, 26):
        tier.put(key(number), data(number))
        tier.flush()
    assert [number for number in range(30) if tier.has(key(number))] == [22, 23, 24, 25]
    assert not list(tmp_path.glob("*/*.unfinished"))
    tier.close()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT, LAYOUT)
    with pytest.raises(ConfigError, match="in use by another engine"):
        DiskTier(tmp_path, LIMIT, LAYOUT)
    tier.close()
    DiskTier(tmp_path, LIMIT, LAYOUT).close()
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskTier(occupied, LIMIT, LAYOUT)


WRITERS = """
import os, sys
from pathlib import Path
import numpy as np, torch
from deepinfer.engine.disk_tier import DiskTier
for line in sys.stdin:
    folder, number = sys.argv[1], int(line)
    if writer := os.fork():
        os.waitpid(writer, 0)
        os.write(1, b"ended\\n")
        continue
    tier = DiskTier(Path(folder), 1 << 24, bytes(range(32)))
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        data = np.random.default_rng(number).integers(0, 256, 3000, dtype=np.uint8)
        tier.put(number.to_bytes(32, "big"), torch.from_numpy(data))
        number += 1
        tier.flush()
        os.write(1, b"%d\\n" % (number - 1))
"""
"""Starts a process for each number that it reads, which writes piece after piece; imports what that needs once.

Lines go out by one call each: a kill cuts none in two.
"""


def check_kills(folder: Path, kills: int) -> None:
    """Let processes write, kill each after a while, and look at what they acknowledged."""
    generator = np.random.default_rng(kills)
    command = [sys.executable, "-c", WRITERS, str(folder)]
    first, acknowledged = 0, 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for _ in range(kills):
            print(first, file=writers.stdin, flush=True)
            writer = int(writers.stdout.readline())
            time.sleep(float(generator.uniform(0, 0.3)))
            os.kill(writer, signal.SIGKILL)
            numbers = [int(line) for line in iter(writers.stdout.readline, "ended\n")]
            check_folder(folder, first, numbers)
            first, acknowledged = first + len(numbers) + 2, acknowledged + len(numbers)
        writers.stdin.close()
    assert acknowledged > 0


def check_folder(folder: Path, first: int, acknowledged: list[int]) -> None:
    """What was acknowledged is there; what else was begun is there as it was meant, or not at all."""
    tier = DiskTier(folder, 1 << 24, LAYOUT)
    for number in acknowledged:
        found = tier.get(key(number))
        assert found is not None, f"piece {number} was acknowledged and is lost"
        assert torch.equal(found, data(number))
    for number in range(first, first + len(acknowledged) + 2):
        found = tier.get(key(number))
        assert found is None or torch.equal(found, data(number))
    assert not list(folder.glob("*/*.unfinished"))
    tier.close()


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    check_kills(tmp_path, 5)


def test_kill_9_many_times(tmp_path: Path, soak_s: float) -> None:
    assert soak_s > 0
    check_kills(tmp_path, 200)
