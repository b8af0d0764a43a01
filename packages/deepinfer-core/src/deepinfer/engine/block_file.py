"""The file format of a cached piece: a header with key, layout and checksums, then the bytes of `KVCache.pack`.

Where such files lie and how long they are kept is `disk_tier.py`'s.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAGIC = b"DIKVCH01"
_HEADER = struct.Struct("<8s32s32sQI40x")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
KEY_BYTES = 32


class Damaged(Exception):
    """A file that is not what it says, or says nothing that can be believed; the text tells which."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a file holds: `key` of the content, `layout` of the engine that wrote it (32 bytes each), and the bytes."""

    key: bytes
    layout: bytes
    data: Tensor


def write_piece(piece: Piece) -> bytes:
    """Return the whole file: 128 bytes of header, then the data."""
    data = piece.data.numpy().tobytes()
    head = _HEADER.pack(MAGIC, piece.key, piece.layout, len(data), zlib.crc32(data))
    return head + _CHECK.pack(zlib.crc32(head)) + data


def read_piece(file: bytes) -> Piece:
    """Take a file apart; raises `Damaged` unless every byte is as it was written."""
    if len(file) < HEADER_BYTES:
        raise Damaged(f"{len(file)} bytes are less than its header")
    head = file[: _HEADER.size]
    if _CHECK.unpack_from(file, _HEADER.size)[0] != zlib.crc32(head):
        raise Damaged("the checksum of its header differs")
    magic, key, layout, size, checksum = _HEADER.unpack(head)
    if magic != MAGIC:
        raise Damaged(f"it begins with {magic!r}, expected {MAGIC!r}")
    if len(file) != HEADER_BYTES + size:
        raise Damaged(f"it has {len(file)} bytes, expected {HEADER_BYTES + size}")
    data = np.frombuffer(file, np.uint8, offset=HEADER_BYTES)
    if zlib.crc32(data) != checksum:
        raise Damaged("the checksum of its data differs")
    return Piece(key, layout, torch.from_numpy(data.copy()))
