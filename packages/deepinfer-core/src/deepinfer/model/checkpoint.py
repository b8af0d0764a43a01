"""One model on disk: its configuration, its tensors (checked against the configuration, memory-mapped), its tokenizer.

Headers are `headers.py`'s, downloading is `download.py`'s, turning tensors into packed weights is `weights.py`'s.
"""

import hashlib
import mmap
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.errors import CheckpointError
from deepinfer.model.config import ModelConfig
from deepinfer.model.download import Hub, fetch
from deepinfer.model.engram_hash import compress_token_ids, primes
from deepinfer.model.headers import StoredTensor, read_headers
from deepinfer.model.inventory import TensorSpec, inventory
from deepinfer.model.read_config import read_config
from deepinfer.model.tiny import write_tiny

TINY = "tiny"
"""Model name of the tiny model of random weights, made on the spot."""

DEMO = "demo"
"""Model name of the embedded demo model, trained; its files lie in the folder of that name beside this one."""

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I64": torch.int64,
}

QUANTISED = {"F8_E4M3", "I8"}

MAP_NORESERVE = 0x4000
"""Linux's flag for a mapping that may be larger than memory; Python names it from 3.13 on.

The safetensors library maps without it, and cannot open a shard larger than memory, such as one with an Engram table.
"""

UNKNOWN_DRAFT = "mtp."
"""V4's releases have drafters of different shapes; what is not known there is neither checked nor loaded."""


READ_WHOLE = 1 << 26


class Checkpoint:
    """A checkpoint with checked headers: every tensor is present, of the right shape and dtype, and none is left over.

    Opening reads headers only.  `read` gives memory-mapped tensors: bytes come from the file when they are used.

    folder    where the files lie
    config    what config.json says
    tensors   every tensor of the files by name, without the prefix `model.`
    specs     what each tensor had to be
    """

    def __init__(self, folder: Path) -> None:
        """Open `folder`; raises CheckpointError for anything missing, damaged, contradictory or left over."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; expected a checkpoint folder with config.json")
        self.folder = folder
        self.config: ModelConfig = read_config(folder)
        self.specs: Mapping[str, TensorSpec] = inventory(self.config)
        self.tensors: Mapping[str, StoredTensor] = read_headers(folder)
        check_tensors(self.tensors, self.specs, self.config)
        self._files: dict[Path, mmap.mmap] = {}

    @classmethod
    def tiny(cls) -> "Checkpoint":
        """Make the tiny model of random weights in a temporary folder, which is removed with the returned object."""
        temporary = tempfile.mkdtemp(prefix="deepinfer-tiny-")
        folder = Path(temporary) / TINY
        write_tiny(folder)
        checkpoint = cls(folder)
        weakref.finalize(checkpoint, shutil.rmtree, temporary, ignore_errors=True)
        return checkpoint

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU as a view of the mapped file, in its stored dtype and shape."""
        stored = self.tensors[name]
        data = torch.frombuffer(self._mapped(stored.file), dtype=torch.uint8, count=stored.bytes, offset=stored.offset)
        return data.view(DTYPES[stored.dtype]).view(stored.shape)

    def announce(self, names: Iterable[str]) -> None:
        """Tell the system which tensors are read next, so that it fetches them while the first are worked on."""
        for name in names:
            stored = self.tensors[name]
            start = stored.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapped(stored.file).madvise(mmap.MADV_WILLNEED, start, stored.offset + stored.bytes - start)

    def identity(self) -> str:
        """Tell this checkpoint from others of the same shape, as a hash.

        Files up to 64 MiB count with every byte, larger ones with their real path, size and time of change.
        """
        digest = hashlib.sha256()
        for file in sorted({stored.file.resolve() for stored in self.tensors.values()}):
            status = file.stat()
            small = status.st_size <= READ_WHOLE
            digest.update(b"bytes" if small else f"{file} {status.st_size} {status.st_mtime_ns}".encode())
            if small:
                digest.update(hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()

    def _mapped(self, file: Path) -> mmap.mmap:
        if file not in self._files:
            self._files[file] = _map(file)
        return self._files[file]

    def where(self, name: str) -> str:
        """Return the file and tensor name for an error message."""
        stored = self.tensors[name]
        return f"{stored.file}: tensor {stored.key}"

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the folder; None when there is no tokenizer.json.

        Raises CheckpointError for a file that is no tokenizer, or that has ids beyond the embedding.
        """
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception for every fault of the file
            raise CheckpointError(f"{path}: is no tokenizer ({error}); download the file again") from None
        last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if last >= self.config.vocab_size:
            raise CheckpointError(
                f"{path}: has token id {last}, but config.json has vocab_size {self.config.vocab_size}; the tokenizer "
                "is of another model: download it again"
            )
        return tokenizer

    @cached_property
    def compressed_ids(self) -> Tensor | None:
        """The compressed id of every token: int64 [vocab_size] on the CPU; None for a model without Engram.

        Raises CheckpointError when the tokenizer is missing, or when tokenizer or configuration are not those that the
        Engram tables were made with.
        """
        engram = self.config.engram
        if engram is None:
            return None
        rows = primes(engram).sum((1, 2)).tolist()
        tables = [layer.engram.rows for layer in self.config.layers if layer.engram is not None]
        if tables != rows:
            raise CheckpointError(
                f"{self.folder / 'config.json'}: engram_num_embeddings is {tables}, but the hash ranges of its other "
                f"engram_* values take {rows} rows; config.json was changed: download it again"
            )
        path = self.folder / "tokenizer.json"
        if self.tokenizer is None:
            raise CheckpointError(
                f"{path}: missing; expected the model's tokenizer, from which Engram layers "
                f"{list(engram.layer_ids)} take their rows: download it"
            )
        ids = torch.from_numpy(compress_token_ids(self.tokenizer, self.config.vocab_size))
        count = int(ids.max()) + 1
        if count != engram.compressed_vocab_size:
            raise CheckpointError(
                f"{path}: its tokens make {count} compressed ids, but config.json has engram_compressed_vocab_size "
                f"{engram.compressed_vocab_size}; the tokenizer is of another model or was changed: download it again"
            )
        return ids


def open_checkpoint(model: str | Path, *, hub: Hub | None = None) -> Checkpoint:
    """Open "demo" (embedded), "tiny" (made on the spot), a checkpoint folder, or a model of the Hugging Face Hub.

    The last is downloaded if need be.
    Raises CheckpointError as `Checkpoint` and `fetch` do.
    """
    if model == DEMO:
        return Checkpoint(Path(__file__).parent / DEMO)
    if model == TINY:
        return Checkpoint.tiny()
    return Checkpoint(fetch(model, hub or Hub()))


def _map(file: Path) -> mmap.mmap:
    """Map a whole file; nobody writes to it, and what anybody wrote would stay in memory."""
    try:
        with file.open("rb") as opened:
            flags, access = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(opened.fileno(), 0, flags=flags, prot=access)
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be mapped into memory ({error}); expected a readable file and address space for it: check "
            "its permissions and `ulimit -v`"
        ) from None


def check_tensors(tensors: Mapping[str, StoredTensor], specs: Mapping[str, TensorSpec], config: ModelConfig) -> None:
    """Compare the tensors of the files with the list that the configuration demands.

    Raises CheckpointError with the first wrong dtype, wrong shape, missing or extra tensor; dtypes come first, because
    a checkpoint whose formats contradict its configuration also lacks scales or has too many.
    """
    for name, spec in specs.items():
        if name in tensors and tensors[name].dtype not in spec.dtypes and not spec.optional:
            raise _wrong_dtype(tensors[name], spec, config)
    for name, spec in specs.items():
        if name in tensors and tensors[name].shape != spec.shape:
            stored = tensors[name]
            raise CheckpointError(
                f"{stored.file}: tensor {stored.key}: expected shape {list(spec.shape)} by config.json, found "
                f"{list(stored.shape)}; config.json and weights are of different models: download both again"
            )
    missing = [name for name, spec in specs.items() if name not in tensors and not spec.optional]
    if missing:
        raise _missing(missing, tensors, specs)
    ignored = UNKNOWN_DRAFT if config.family == "deepseek_v4" else None
    extra = [name for name in tensors if name not in specs and not (ignored and name.startswith(ignored))]
    if extra:
        stored = tensors[extra[0]]
        raise CheckpointError(
            f"{stored.file}: tensor {stored.key}: not part of the model that config.json describes ({len(extra)} such "
            f"in all); expected nothing beside its {len(specs)} tensors: is config.json of this checkpoint?"
        )


def _wrong_dtype(stored: StoredTensor, spec: TensorSpec, config: ModelConfig) -> CheckpointError:
    quantised = "has a" if config.quant else "has no"
    hint = f"config.json {quantised} quantization_config: " if QUANTISED & {stored.dtype, *spec.dtypes} else ""
    return CheckpointError(
        f"{stored.file}: tensor {stored.key}: expected {' or '.join(spec.dtypes)}, found {stored.dtype}; {hint}"
        "config.json and weights are of different checkpoints: download both again"
    )


def _missing(
    missing: list[str], tensors: Mapping[str, StoredTensor], specs: Mapping[str, TensorSpec]
) -> CheckpointError:
    name = missing[0]
    spec = specs[name]
    what = f"expected {spec.dtypes[0]} {list(spec.shape)}, found no such tensor ({len(missing)} missing in all)"
    weight = tensors.get(f"{name.removesuffix('.scale')}.weight") if name.endswith(".scale") else None
    if weight is not None:
        return CheckpointError(
            f"{weight.file}: tensor {name}: {what}; {weight.key} is {weight.dtype} and means nothing without its "
            "scales: download the checkpoint again"
        )
    folder = next(iter(tensors.values())).file.parent if tensors else Path()
    return CheckpointError(
        f"{folder}: tensor {name}: {what}; the checkpoint is incomplete, or config.json is of another model: "
        "download both again"
    )
