"""How fast weights go from a file to an NVIDIA device, beside the speed of the disk and of copies of pinned memory.

    python benchmarks/loading.py [--gigabytes 4] [--folder /tmp]

A file of random bytes is mapped, as checkpoints are, and sent in pieces of one expert's matrix.  Prints GB/s: of the
disk and of pinned copies alone, of plain copies out of the page cache, and of the wheel's uploads from cache and disk.
"""

import argparse
import mmap
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels_cuda.accelerator import NvidiaAccelerator

PIECE_BYTES = 5120 * 2304 // 2
BLOCK_BYTES = 1 << 26


def main() -> None:
    """Write the file, measure, and remove it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch does not like memory that nobody may write to
    accelerator = NvidiaAccelerator()
    with tempfile.NamedTemporaryFile(dir=options.folder) as file:
        block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
        for _ in range(options.gigabytes * (1 << 30) // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        path = Path(file.name)
        print(f"pinned memory to the device  {_pinned():6.2f} GB/s")
        _forget(path)
        print(f"disk                         {_disk(path):6.2f} GB/s")
        for name, send in (("plain copies, page cache", _plain), ("uploads, page cache", accelerator.upload)):
            print(f"{name:28} {_sent(path, send):6.2f} GB/s")
        print(f"uploads, page cache again    {_sent(path, accelerator.upload):6.2f} GB/s")
        _forget(path)
        print(f"uploads, disk                {_sent(path, accelerator.upload):6.2f} GB/s")


def _pinned() -> float:
    memory = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    speed = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(memory, non_blocking=True)
        torch.cuda.synchronize()
        speed = (1 << 28) / 1e9 / (time.perf_counter() - begin)
    return speed


def _disk(path: Path) -> float:
    buffer = bytearray(BLOCK_BYTES)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return path.stat().st_size / 1e9 / (time.perf_counter() - begin)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to("cuda")


def _sent(path: Path, send: Callable[[Tensor], Tensor]) -> float:
    size = path.stat().st_size // PIECE_BYTES * PIECE_BYTES
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for start in range(0, size, PIECE_BYTES):
        send(torch.frombuffer(mapped, dtype=torch.uint8, count=PIECE_BYTES, offset=start))
    torch.cuda.synchronize()
    return size / 1e9 / (time.perf_counter() - begin)


def _forget(path: Path) -> None:
    """Ask the system to drop the file from its page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
