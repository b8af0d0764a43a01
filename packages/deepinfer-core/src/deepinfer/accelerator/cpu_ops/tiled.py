"""The CPU's deterministic ops: tiles are steps of few rows, so that every call takes the numpy body or none does."""

from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.batch import RecordView
from deepinfer.accelerator.cpu_ops import CpuOps
from deepinfer.accelerator.cpu_ops.formats import decode_few
from deepinfer.accelerator.tiled_ops import TiledOps


class TiledCpuOps(TiledOps, CpuOps):
    """16 rows a call: with MKL and OpenBLAS a row of a product is the same at every place of such a tile."""

    @override
    def read_records(self, view: RecordView, slots: Tensor) -> Tensor:
        """Decode by table, bit for bit what the reference decodes."""
        if view.data.dtype == torch.uint8:
            decoded = decode_few(view.data.numpy().take(slots.numpy(), 0), view)
            if decoded is not None:
                return torch.from_numpy(decoded).to(self.wide)
        return super().read_records(view, slots)
