"""Tensors of mapped files on their way to the device: owns the pinned host memory that they pass, piece by piece.

Which tensors there are, and what becomes of their bytes, is the engine's and the ops'.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.accelerator.base import Event

PIECE_BYTES = 1 << 26
PIECES = 4


class Uploads:
    """Copies that run on while the host reads what comes next from the file; each byte crosses to the device once."""

    def __init__(self, device: torch.device, event: Callable[[], Event]) -> None:
        self._device = device
        self._event = event
        self._pieces: list[tuple[Tensor, Event]] = []
        self._next = 0

    def upload(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the device, in its dtype and shape; work given to the device later waits for it."""
        if tensor.device.type == self._device.type == "cuda":
            return tensor
        source = tensor.contiguous().view(-1).view(torch.uint8)
        target = torch.empty(source.shape, dtype=torch.uint8, device=self._device)
        for start in range(0, len(source), PIECE_BYTES):
            part = source[start : start + PIECE_BYTES]
            memory, copied = self._free_piece()
            memory[: len(part)].copy_(part)
            target[start : start + len(part)].copy_(memory[: len(part)], non_blocking=True)
            copied.record()
        return target.view(tensor.dtype).view(tensor.shape)

    def _free_piece(self) -> tuple[Tensor, Event]:
        """The piece that was used the longest ago, when its copy has ended."""
        if len(self._pieces) < PIECES:
            pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._pieces.append((pinned, self._event()))
            return self._pieces[-1]
        self._next = (self._next + 1) % PIECES
        memory, copied = self._pieces[self._next]
        copied.synchronize()
        return memory, copied
