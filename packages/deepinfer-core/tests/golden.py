"""The golden checkpoints as the repository keeps them: small, and unpacked to the byte.

The weights of these checkpoints are draws of `torch.randn` from one seed: Mersenne twister and Box-Muller, rounded to
the checkpoint's formats.  So a packed file says where the draws of each tensor begin and how far they spread, and holds
only the difference between its bits and those that the draws predict, which is nearly all zeros.  What was not drawn
(tables of results, norms) is held whole.  Differences and bits are kept byte plane by byte plane, for xz.

Where a machine rounds sines differently in float64, one float32 weight in ten million may differ in its last bit.
"""

import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = Path(__file__).parent / "data" / "golden"
PACKED = ".packed"
ITEM_BYTES = {"F32": 4, "I32": 4, "BF16": 2, "I16": 2, "I64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}

BLOCK = 16
"""torch.randn turns 16 uniform numbers at a time into 8 cosines and 8 sines."""


class Draw(NamedTuple):
    """Where a tensor's draws begin in the stream of uniform numbers, and their standard deviation."""

    start: int
    spread: float


def unpack_folder(archive: Path, root: Path) -> Path:
    """Unpack data/golden/NAME.tar.xz into `root` and return the folder NAME."""
    with tarfile.open(archive) as opened:
        opened.extractall(root, filter="data")
    folder = root / archive.name.removesuffix(".tar.xz")
    for packed in folder.glob(f"*{PACKED}"):
        packed.with_suffix("").write_bytes(unpack(packed.read_bytes()))
        packed.unlink()
    return folder


def unpack(packed: bytes) -> bytes:
    """Return the safetensors file that `pack` was given."""
    facts, header, planes = _split(packed)
    data = bytearray(_data_bytes(header))
    predicted = _predictions(json.loads(header[8:]), facts["seed"], facts["draws"])
    entries = _by_width(header)
    for width, part in zip(entries, _take_planes(planes, entries), strict=True):
        at = 0
        for name, (start, stop) in entries[width].items():
            count = (stop - start) // width
            bits = part[at : at + count]
            if name in predicted:
                bits = _unfold(bits) + predicted[name]
            data[start:stop] = bits.tobytes()
            at += count
    return header + bytes(data)


def pack(file: bytes, seed: int, draws: Mapping[str, Draw]) -> bytes:
    """Pack a safetensors file, of which the tensors in `draws` were drawn from `seed`."""
    length = 8 + int.from_bytes(file[:8], "little")
    header, data = file[:length], file[length:]
    predicted = _predictions(json.loads(header[8:]), seed, draws)
    planes = b""
    for width, entries in _by_width(header).items():
        parts = []
        for name, (start, stop) in entries.items():
            bits = np.frombuffer(data[start:stop], f"<u{width}")
            parts.append(_fold(bits - predicted[name]) if name in predicted else bits)
        planes += np.concatenate(parts).view(np.uint8).reshape(-1, width).T.tobytes()
    facts = json.dumps({"seed": seed, "draws": draws}).encode()
    return len(facts).to_bytes(8, "little") + facts + header + planes


def _split(packed: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    end = 8 + int.from_bytes(packed[:8], "little")
    facts = json.loads(packed[8:end])
    stop = end + 8 + int.from_bytes(packed[end : end + 8], "little")
    return facts, packed[end:stop], packed[stop:]


def _by_width(header: bytes) -> dict[int, dict[str, tuple[int, int]]]:
    """Byte ranges of all tensors, by the bytes of an element."""
    result: dict[int, dict[str, tuple[int, int]]] = {}
    for name, entry in json.loads(header[8:]).items():
        if name != "__metadata__":
            result.setdefault(ITEM_BYTES[entry["dtype"]], {})[name] = tuple(entry["data_offsets"])
    return dict(sorted(result.items()))


def _data_bytes(header: bytes) -> int:
    return max(stop for ranges in _by_width(header).values() for _, stop in ranges.values())


def _take_planes(planes: bytes, entries: Mapping[int, Mapping[str, tuple[int, int]]]) -> Iterator[NDArray[Any]]:
    """Elements of each width, put together from their byte planes."""
    at = 0
    for width, ranges in entries.items():
        size = sum(stop - start for start, stop in ranges.values())
        part = np.frombuffer(planes, np.uint8, size, at).reshape(width, -1)
        yield np.ascontiguousarray(part.T).view(f"<u{width}").reshape(-1)
        at += size


def _fold(difference: NDArray[Any]) -> NDArray[Any]:
    """Small differences of either sign as small unsigned numbers: 0, -1, 1, -2 ... become 0, 1, 2, 3 ..."""
    signed = difference.view(f"<i{difference.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def _unfold(folded: NDArray[Any]) -> NDArray[Any]:
    one = folded.dtype.type(1)
    return (folded >> one) ^ (~(folded & one) + one)


def _predictions(header: Mapping[str, Any], seed: int, draws: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Bits of every drawn tensor, and of the scales that belong to it."""
    if not draws:
        return {}
    drawn = {name: Draw(*draw) for name, draw in draws.items()}
    stream = _uniform(seed, max(d.start + _elements(header[name]) for name, d in drawn.items()))
    result = {}
    for name, draw in drawn.items():
        count = _elements(header[name])
        rows = header[name]["shape"][0]
        values = torch.from_numpy(_normal(stream[draw.start : draw.start + count])).float().mul(draw.spread)
        result.update(_encode(name, header, values.reshape(rows, -1)))
    return result


def _elements(entry: Mapping[str, Any]) -> int:
    return int(np.prod(entry["shape"])) * (2 if entry["dtype"] == "I8" else 1)


def _uniform(seed: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) that torch takes from its generator, which is numpy's RandomState: 24 bits each."""
    words = np.random.RandomState(seed).randint(0, 2**32, count, dtype=np.uint32)
    return (words & 0xFFFFFF).astype(np.float64) * 2.0**-24


def _normal(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = uniform.reshape(-1, 2, BLOCK // 2).transpose(1, 0, 2)
    radius, angle = np.sqrt(-2 * np.log1p(-low)), 2 * np.pi * high
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), 1).reshape(-1)


def _encode(name: str, header: Mapping[str, Any], values: Tensor) -> dict[str, NDArray[Any]]:
    """Round values to the format of a tensor; returns its bits, and those of its scales."""
    dtype = header[name]["dtype"]
    if dtype == "F32":
        return {name: values.numpy().view("<u4").reshape(-1)}
    if dtype == "BF16":
        return {name: values.bfloat16().view(torch.uint16).numpy().reshape(-1)}
    scale = f"{name.removesuffix('.weight')}.scale"
    rows, columns = header[scale]["shape"]
    height = -(-values.shape[0] // rows)
    padded = torch.zeros(rows * height, columns * 32)
    padded[: values.shape[0], : values.shape[1]] = values
    blocks = padded.view(rows, height, columns, 32)
    limit, code = (448.0, _e4m3) if dtype == "F8_E4M3" else (6.0, _e2m1)
    fraction, exponent = torch.frexp(blocks.abs().amax((1, 3)).clamp_min(1e-30) / limit)
    exponent -= (fraction == 0.5).int()  # the smallest power of two that is not below
    scaled = torch.ldexp(blocks, -exponent[:, None, :, None]).view_as(padded)
    codes = code(scaled[: values.shape[0], : values.shape[1]])
    return {name: codes.numpy().reshape(-1), scale: (exponent + 127).to(torch.uint8).numpy().reshape(-1)}


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _e2m1(values: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to even; two codes a byte, the even column in the low half."""
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    size = values.abs()
    code = torch.bucketize(size, borders)
    code += (size == borders[code.clamp_max(6)]) & (code % 2 == 1)
    code += 8 * torch.signbit(values)
    return (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)
