"""A whole decoding step of the device's ops takes nothing from the host and asks for nothing: graphs can record it.

Kernels do not run here: on a device without numbers only what surrounds them does, which is what could wait.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer.accelerator.conformance.case import AUTO
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.engine.graph_runner import GraphSize, _empty_batch
from deepinfer.model.checkpoint import DTYPES, Checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.inventory import inventory
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.weights import Weights
from deepinfer_kernels_cuda import expert_ops, linear_ops
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.kernels.variants import Variant
from deepinfer_kernels_cuda.ops import NvidiaOps

META = torch.device("meta")


class Waiting(TorchDispatchMode):
    """Raises where host and device would have to meet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = [part for part in tree_leaves((args, kwargs, result)) if isinstance(part, Tensor)]
        kinds = {part.device.type for part in parts}
        if kinds == {"cpu", "meta"} or func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
            raise AssertionError(f"{func}: host and device meet")
        return result


class Shapes(Checkpoint):
    """A checkpoint of the tiny model whose tensors have shapes and no numbers."""

    def __init__(self, config: ModelConfig, ids: Tensor | None) -> None:
        self.config = config
        self.specs = inventory(config)
        self.tensors = {name: spec for name, spec in self.specs.items() if not spec.optional}  # type: ignore[misc]
        self.compressed_ids = ids

    def read(self, name: str) -> Tensor:  # type: ignore[explicit-override]
        spec = self.specs[name]
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtypes[0]], device=META)

    def where(self, name: str) -> str:
        return name

    def announce(self, names: Any) -> None: ...  # type: ignore[explicit-override]


@pytest.mark.skipif(probe() is None, reason="a device shows it by recording")
def test_host_and_device_do_not_meet_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(Variant, "launch", lambda variant, grid, *arguments: launched.append(variant.name))
    for module in (expert_ops, linear_ops):
        monkeypatch.setattr(module, "fill_weight", lambda *_: True)
    monkeypatch.setattr(Weights, "_check_scale", lambda *_: None)
    tiny = Checkpoint.tiny()
    ops = NvidiaOps(META, AUTO)
    weights = Weights(Shapes(tiny.config, tiny.compressed_ids), ops, CpuAccelerator())
    model = DeepSeek(tiny.config, weights, ops)
    cache = KVCache(tiny.config, ops, AUTO, blocks=64, window_blocks=16, states=8)
    for size in (GraphSize(4, 4, 512), GraphSize(4, 4, 8192), GraphSize(24, 4, 8192)):
        batch = _empty_batch(size, tiny.config, 3, META)
        for watch in (nullcontext(), Waiting()):  # what is kept may be copied once
            with torch.inference_mode(), watch:
                assert ops.greedy(model.forward(batch, cache).logits).shape == (size.rows,)
    assert {"best_of_chunk", "mix_out"} <= set(launched)
