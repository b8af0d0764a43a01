"""Hands the tensors of a checkpoint to the model: packed by the ops, each asked for once, none forgotten.

Presence, shapes and dtypes were checked by `checkpoint.py`; here data is read, and scales are checked for NaN.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import PackedExperts
from deepinfer.accelerator.ops.projection import PackedLinear
from deepinfer.accelerator.parameters import StoredExpert, StoredTable, StoredWeight
from deepinfer.errors import CheckpointError
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.inventory import ENGRAM_TABLES, FP4_GROUP, component, not_loaded

NAN_SCALE = 255
"""The byte of a UE8M0 scale that is no number."""


class Progress(Protocol):
    """Shows how much has been read of what loading reads; all numbers are bytes."""

    def start(self, total: int) -> None:
        """Begin a bar of `total` bytes."""

    def advance(self, count: int) -> None:
        """Add `count` bytes."""

    def finish(self) -> None:
        """End the bar."""


class Weights:
    """Strict, lazy reader over one checkpoint: reads a tensor when it is asked for, and knows what was not asked for.

    Every tensor may be asked for once.  Data is memory-mapped; what stays in memory is what the ops pack.
    """

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, accelerator: Accelerator, progress: Progress | None = None
    ) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._ops = ops
        self._accelerator = accelerator
        self._progress = progress
        self._left = dict.fromkeys(checkpoint.tensors)
        unread = {*not_loaded(checkpoint.config), ENGRAM_TABLES}
        if progress is not None:
            progress.start(sum(t.bytes for name, t in checkpoint.tensors.items() if component(name) not in unread))

    def linear(self, name: str) -> PackedLinear:
        """Read `name`.weight and, when it is quantised, `name`.scale; return them packed for `ops.linear`."""
        return self._ops.pack_linear(self._weight(name))

    def stacked(self, names: Sequence[str]) -> PackedLinear:
        """Read weights of one input and one format; return them packed as one `ops.linear`, outputs in this order."""
        return self._ops.pack_stacked([self._weight(name) for name in names])

    def grouped(self, name: str, groups: int) -> PackedLinear:
        """Read a block-diagonal weight of `groups` blocks; return it packed for `ops.grouped_linear`."""
        return self._ops.pack_grouped(self._weight(name), groups)

    def experts(self, prefix: str, count: int) -> PackedExperts:
        """Read `prefix`.0 .. `prefix`.{count - 1}; return them packed for `ops.experts`."""
        self._checkpoint.announce(name for name in self._left if name.startswith(f"{prefix}."))
        return self._ops.pack_experts([self._expert(f"{prefix}.{index}") for index in range(count)])

    def expert(self, prefix: str) -> PackedExperts:
        """Read one expert, such as the shared one; return it packed for `ops.experts`."""
        return self._ops.pack_experts([self._expert(prefix)])

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor that is used as it is, on the device as `dtype` (default: the activation dtype)."""
        return self._ops.tensor(self._read(name), dtype)

    def table(self, name: str) -> StoredTable:
        """Return an Engram table where the accelerator wants it; neither copied nor scanned here.

        Its scales are checked when rows are looked up: the released tables are 101 GB each.
        """
        data = self._accelerator.host_table(self._map(f"{name}.weight"))
        scale = f"{name}.scale"
        if scale not in self._checkpoint.tensors:
            return StoredTable(data)
        return StoredTable(data, self._accelerator.host_table(self._map(scale)), self._checkpoint.where(scale))

    def compressed_ids(self) -> Tensor:
        """Return the compressed id of every token: int64 [V] on the CPU, for a model with Engram layers."""
        ids = self._checkpoint.compressed_ids
        assert ids is not None, "a model without Engram layers has no compressed ids"
        return ids

    def check_only(self, prefixes: Sequence[str]) -> None:
        """Count the tensors under `prefixes` as used: their headers were checked, their data is not needed."""
        for name in [name for name in self._left if name.startswith(tuple(prefixes))]:
            self._take(name)

    def finish(self) -> None:
        """End loading; raises CheckpointError when the model did not ask for some tensor."""
        if self._progress is not None:
            self._progress.finish()
        if self._left:
            name = next(iter(self._left))
            raise CheckpointError(
                f"{self._checkpoint.where(name)}: was not loaded, nor {len(self._left) - 1} others; expected the model "
                "to use every tensor: this is a defect of DeepInfer, please report it"
            )

    def _take(self, name: str) -> None:
        assert name in self._left, f"{name} is not in the checkpoint or was asked for twice"
        del self._left[name]

    def _map(self, name: str) -> Tensor:
        self._take(name)
        return self._checkpoint.read(name)

    def _read(self, name: str) -> Tensor:
        tensor = self._map(name)
        if tensor.dtype == torch.float8_e8m0fnu:
            self._check_scale(name, tensor)
        if name.endswith(".tid2eid"):
            self._check_expert_ids(name, tensor)
        if self._progress is not None:
            self._progress.advance(tensor.nbytes)
        return self._accelerator.upload(tensor)

    def _weight(self, name: str) -> StoredWeight:
        data = self._read(f"{name}.weight")
        quant = self.config.quant
        if quant is None or f"{name}.scale" not in self._checkpoint.specs:
            return StoredWeight(data)
        scale = self._read(f"{name}.scale")
        return StoredWeight(data, scale, FP4_GROUP if data.dtype == torch.int8 else quant.block)

    def _expert(self, prefix: str) -> StoredExpert:
        return StoredExpert(*(self._weight(f"{prefix}.{name}") for name in ("w1", "w2", "w3")))

    def _check_scale(self, name: str, scale: Tensor) -> None:
        bad = (scale.view(torch.uint8) == NAN_SCALE).nonzero()
        if bad.numel():
            raise CheckpointError(
                f"{self._checkpoint.where(name)}: scale {bad[0].tolist()} is NaN (byte 255), {len(bad)} such in all; "
                "expected powers of two: the file is damaged, download it again"
            )

    def _check_expert_ids(self, name: str, ids: Tensor) -> None:
        low, high = ids.aminmax()
        if low < 0 or high >= self.config.experts:
            raise CheckpointError(
                f"{self._checkpoint.where(name)}: names experts {int(low)} to {int(high)}; expected 0 to "
                f"{self.config.experts - 1}; the file is damaged, or config.json is of another model: download both"
            )
