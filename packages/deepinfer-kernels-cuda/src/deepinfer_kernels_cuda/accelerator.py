"""One NVIDIA device: its memory, streams and graphs, through torch.

What it computes is `ops.py`'s; whether there is a device at all is answered by `driver.py`, without torch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator, Event
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.tiled_ops import TiledOps
from deepinfer.errors import AcceleratorError
from deepinfer_kernels_cuda.ops import NvidiaOps, SteadyNvidiaOps
from deepinfer_kernels_cuda.uploads import Uploads
from deepinfer_kernels_cuda.warm import compile_all


class TiledNvidiaOps(TiledOps):
    """The reference on tiles that keep a device busier than the default; its products see one shape each."""

    tile_rows = 64
    tile_keys = 128


class NvidiaAccelerator(Accelerator):
    """The first visible device; CUDA_VISIBLE_DEVICES decides which one that is."""

    name = "nvidia"
    deterministic = True
    graphs = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise AcceleratorError(
                f"torch {torch.__version__} (built for CUDA {torch.version.cuda}) finds no usable NVIDIA device: "
                "compare with nvidia-smi, and install torch from the public index if it is built without CUDA"
            )
        self.device = torch.device("cuda", 0)
        # cuBLAS may add the parts of a bfloat16 product in bfloat16; ops round once, at their end.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._side = torch.cuda.Stream(self.device)
        self._uploads = Uploads(self.device, torch.cuda.Event)
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._graphs = torch.cuda.graph_pool_handle()

    @override
    def description(self) -> str:
        facts = torch.cuda.get_device_properties(self.device)
        return (
            f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
            f"torch {torch.__version__} for CUDA {torch.version.cuda}"
        )

    @override
    def ops(self, precision: Precision) -> Ops:
        return NvidiaOps(self.device, precision)

    @override
    def deterministic_ops(self, precision: Precision) -> Ops:
        """Return ops whose rows do not depend on the batch; `deepinfer verify-determinism` proves it.

        Where this wheel's kernels run (bfloat16, a cache of records) these; else the reference by tiles.
        """
        steady = SteadyNvidiaOps(self.device, precision)
        kernels = steady.no_kernels is None and precision.cache == "records"
        return steady if kernels else TiledNvidiaOps(self.device, precision)

    @override
    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    @override
    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    @override
    def upload(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device; the host goes on reading while it is made."""
        return self._uploads.upload(tensor)

    @override
    def host_table(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy in host memory: the device reads rows of it without a staging copy."""
        return tensor.pin_memory()

    @override
    def stream(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._side)

    @override
    def event(self) -> Event:
        return torch.cuda.Event()

    @override
    def warm(self) -> int:
        """Compile the kernels of the released models' shapes on all cores, into Triton's cache."""
        return compile_all(torch.cuda.get_device_capability(self.device))

    @override
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run` once, so that libraries make their workspaces, then record it; graphs share one memory pool."""
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            run()
        torch.cuda.current_stream(self.device).wait_stream(self._side)
        if self._anchor is None:
            self._anchor = self._nothing()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: the writer of the disk tier does.
        with torch.cuda.graph(graph, pool=self._graphs, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def _nothing(self) -> torch.cuda.CUDAGraph:
        """A graph that keeps the pool alive: torch takes none whose graphs are all gone, as after one that failed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs):
            torch.zeros(1, device=self.device)
        return graph
