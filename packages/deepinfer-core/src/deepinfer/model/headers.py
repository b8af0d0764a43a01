"""Which tensors a folder of safetensors files holds and where each lies, read from the files' headers alone.

Nothing but JSON and safetensors headers is read: no pickle, no code.  Comparing what is found with a configuration, and
reading tensor data, are `checkpoint.py`'s.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import CheckpointError
from deepinfer.model.inventory import DTYPE_BYTES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HEADER_LIMIT = 100_000_000
"""Largest header the safetensors format allows, in bytes."""

AGAIN = "download the file again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: `key` is its name there, `dtype` safetensors' name, `offset` and `bytes` where it lies."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all weight files of `folder`; keys are tensor names without the prefix `model.`.

    The files are those that `model.safetensors.index.json` names, else `model.safetensors`.  Raises CheckpointError,
    naming the file, for a file that is missing, truncated or damaged, for an index that does not match its files, and
    for a tensor that occurs twice.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = _read_index(index)
        files = [folder / name for name in sorted(set(weight_map.values()))]
        _require(files, index)
        headers = {path.name: read_header(path) for path in files}
        _match_index(index, weight_map, headers)
    elif (folder / SINGLE).is_file():
        headers = {SINGLE: read_header(folder / SINGLE)}
    else:
        raise _no_weights(folder)
    tensors: dict[str, StoredTensor] = {}
    for header in headers.values():
        for key, tensor in header.items():
            name = key.removeprefix("model.")
            if name in tensors:
                raise CheckpointError(
                    f"{tensor.file}: tensor {key} occurs twice, also in {tensors[name].file.name} as "
                    f"{tensors[name].key}; expected it once: remove the file that does not belong to this checkpoint"
                )
            tensors[name] = tensor
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read one safetensors file's header: its tensors by name, each checked to lie inside the file.

    Raises CheckpointError for a file that is no safetensors file or shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` there")
            if size < 8:
                raise CheckpointError(f"{path}: has only {size} bytes; expected a safetensors file: {AGAIN}")
            if length > min(size - 8, HEADER_LIMIT):
                raise CheckpointError(
                    f"{path}: header is declared {length} bytes long, but the whole file has {size}; expected a "
                    f"complete safetensors file: {AGAIN}"
                )
            values = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read its safetensors header ({error}); {AGAIN}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: safetensors header is {type(values).__name__}, expected a JSON object; {AGAIN}")
    values.pop("__metadata__", None)
    tensors = {key: _entry(path, key, entry, 8 + length) for key, entry in values.items()}
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{path}: tensor {tensor.key}: begins at byte {tensor.offset}, expected {end}, where the one before it "
                f"ends; {AGAIN}"
            )
        end += tensor.bytes
    if end != size:
        what = "truncated" if size < end else "longer than its tensors"
        raise CheckpointError(f"{path}: {what}: expected {end} bytes, found {size}; {AGAIN}")
    return tensors


def _entry(path: Path, key: str, entry: Any, data: int) -> StoredTensor:
    """One entry of a header; `data` is the byte of the file at which the data of all tensors begins."""
    try:
        dtype, shape, (start, stop) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)) or start > stop:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{path}: tensor {key}: broken entry in the header: {str(entry)[:200]}; expected dtype, shape and "
            f"data_offsets; {AGAIN}"
        ) from None
    if dtype in DTYPE_BYTES and stop - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{path}: tensor {key}: {dtype} {list(shape)} needs {math.prod(shape) * DTYPE_BYTES[dtype]} bytes, the "
            f"header gives it {stop - start}; {AGAIN}"
        )
    return StoredTensor(path, key, dtype, shape, data + start, stop - start)


def _read_index(path: Path) -> dict[str, str]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        weight_map = values["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected JSON with a weight_map, cannot read it ({type(error).__name__}: {error}); {AGAIN}"
        ) from None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names; {AGAIN}")
    for name in set(weight_map.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: names the weight file {name!r}; expected a .safetensors file in the same folder: {AGAIN}"
            )
    return weight_map


def _require(files: Iterable[Path], index: Path) -> None:
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{index.parent}: missing {', '.join(missing[:3])}{more}, named by {index.name}; download the missing "
            "files, or start with the hub name of the model to continue its download"
        )


def _match_index(index: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, StoredTensor]]) -> None:
    for key, name in weight_map.items():
        if key not in headers[name]:
            raise CheckpointError(
                f"{index}: says that tensor {key} lies in {name}, which does not hold it; index and weight files are "
                "of different checkpoints or versions: download both again"
            )
    for name, header in headers.items():
        for key in header:
            if key not in weight_map:
                raise CheckpointError(
                    f"{index.parent / name}: holds tensor {key}, which {index.name} does not name; index and weight "
                    "files are of different checkpoints or versions: download both again"
                )
            if weight_map[key] != name:
                raise CheckpointError(
                    f"{index.parent / name}: holds tensor {key}, which {index.name} expects once, in "
                    f"{weight_map[key]}; two versions of the checkpoint are mixed: download the folder again"
                )


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{folder}: holds {pickles[0]} but no safetensors files; pickled weights can run code and are never read: "
            "convert them to safetensors, or download the safetensors files"
        )
    return CheckpointError(
        f"{folder}: no weights: expected {INDEX} with its files, or {SINGLE}; download them (*.safetensors, *.json)"
    )
