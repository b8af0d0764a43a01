"""An accelerator whose results come as late as they may: a worker thread runs an op when somebody waits for an event.

Its tensors hold nothing on the host's side: reading one without an event raises, a host copy that was not waited for
holds poison, and host memory that was handed to a copy is read when the copy runs.  So a step that is built from what
the device has not told yet, a token read too early or staging memory that was used again too soon gives an error or
wrong numbers, every time and not only on a slow day.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self, override

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.model_runner import Model
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache

DEVICE = torch.device("meta")
POISON = -(2**62)
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


class DelayedTensor(Tensor):
    """Shape and dtype of a result; `value` is set when the worker has run the op."""

    value: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=DEVICE
        )
        made.value = None
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: a tensor of the delayed device, used where the device is not running")


class DelayedEvent:
    """A place in the queue of the worker."""

    def __init__(self, device: "DelayedAccelerator") -> None:
        self._device = device
        self._place = 0

    def record(self) -> None:
        self._place = self._device.queued

    def synchronize(self) -> None:
        self._device.run_to(self._place)
        error, self._device.error = self._device.error, None
        if error is not None:
            raise error

    def query(self) -> bool:
        return self._device.done >= self._place


class DelayedAccelerator(Accelerator):
    """Used as `with device:` around everything that gives it work; leaving ends its thread.

    `copies_may_wait`: a copy to the host that nobody can wait for later is an error unless this is set.
    """

    name = "delayed"
    device = DEVICE

    def __init__(self, *, copies_may_wait: bool = False) -> None:
        self.copies_may_wait = copies_may_wait
        self.done = 0
        self.error: Exception | None = None
        self._jobs: list[Callable[[], None]] = []
        self._wanted = 0
        self._open = True
        self._change = threading.Condition()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._mode = _Deferring(self)

    def __enter__(self) -> Self:
        self._worker.start()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        with self._change:
            self._open = False
            self._change.notify_all()
        self._worker.join()

    @override
    def ops(self, precision: Precision) -> Ops:
        return Ops(DEVICE, precision)

    @override
    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    @override
    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @override
    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def event(self) -> DelayedEvent:
        return DelayedEvent(self)

    @property
    def queued(self) -> int:
        """How many jobs there have been."""
        return len(self._jobs)

    def run_to(self, place: int) -> None:
        """Let the worker run the first `place` jobs, and wait until it has."""
        with self._change:
            self._wanted = max(self._wanted, place)
            self._change.notify_all()
            self._change.wait_for(lambda: self.done >= place)

    def defer(self, outputs: Sequence[DelayedTensor], run: Callable[[], Sequence[Tensor]]) -> None:
        """Queue `run`, whose results become the values of `outputs`; what it raises comes out of the next event."""

        def job() -> None:
            try:
                for output, value in zip(outputs, run(), strict=True):
                    output.value = value
            except Exception as error:  # noqa: BLE001 - a device reports whatever went wrong when it is waited for
                self.error = self.error or error
                for output in outputs:  # who goes on from there finds what nobody should use
                    output.value = torch.zeros(output.shape, dtype=output.dtype)

        self._jobs.append(job)

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self.done < self._wanted or not self._open)
                if self.done >= self._wanted:
                    return
                job = self._jobs[self.done]
            job()
            with self._change:
                self._jobs[self.done] = _nothing
                self.done += 1
                self._change.notify_all()


class _Deferring(TorchDispatchMode):
    """Queues every op that concerns the device, with outputs of the right shape that hold nothing yet."""

    def __init__(self, device: DelayedAccelerator) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, DelayedTensor) or leaf == DEVICE for leaf in leaves if not _is_plain(leaf)):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], DelayedTensor):
            return self._to_host(*args)
        if any(isinstance(leaf, torch.device) and leaf != DEVICE for leaf in leaves):
            assert self._device.copies_may_wait, "a copy that waits"
            self._device.run_to(self._device.queued)
            return func(*tree_map(real, args), **kwargs)
        assert func not in READS, "a value of the device is read on the host"
        shapes = func(*tree_map(_shape, args), **tree_map(_shape, kwargs))
        if isinstance(args[0] if args else None, DelayedTensor) and func._schema.is_mutable:
            self._device.defer([], lambda: _run(func, args, kwargs, keep=False))
            return args[0]
        made = tree_map(lambda one: DelayedTensor(one) if isinstance(one, Tensor) else one, shapes)
        outputs = [one for one in tree_flatten(made)[0] if isinstance(one, DelayedTensor)]
        self._device.defer(outputs, lambda: _run(func, args, kwargs))
        return made

    def _to_host(self, target: Tensor, source: DelayedTensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking, "a blocking copy to the host"
        target.fill_(float("nan") if target.is_floating_point() else POISON)

        def run() -> list[Tensor]:
            target.copy_(real(source))
            return []

        self._device.defer([], run)
        return target


class DelayedModel:
    """Any model of the host, run by the worker: its logits come as late as everything else."""

    def __init__(self, model: Model, device: DelayedAccelerator, vocab_size: int) -> None:
        self._model = model
        self._device = device
        self._vocab_size = vocab_size
        self._cache: KVCache | None = None

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        shape = (batch.logit_rows.shape[0], self._vocab_size)
        logits = DelayedTensor(torch.empty(shape, dtype=torch.float32))
        self._device.defer([logits], lambda: [self._model.forward(on_host(batch), self._on_host(cache)).logits])
        return ModelOutput(logits, None)

    def _on_host(self, cache: KVCache) -> KVCache:
        """The cache with layers that hold the values of its tensors; the same one at every call."""
        if self._cache is None:
            self._cache = copy(cache)
            self._cache._layers = [_with_values(layer) for layer in cache._layers]
        return self._cache


def on_host(batch: Batch) -> Batch:
    """The batch with the values of its tensors, for who runs on the worker."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    groups = {ratio: replace(one, rows=real(one.rows), slots=real(one.slots)) for ratio, one in batch.groups.items()}
    tensors = {name: real(value) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(batch, **tensors, groups=groups)


def _with_values[T](view: T) -> T:
    """A frozen dataclass of tensors of the device, and of such dataclasses, with the values of these tensors."""
    values = {field.name: getattr(view, field.name) for field in fields(view)}  # type: ignore[arg-type]
    made = {name: real(value) for name, value in values.items() if isinstance(value, Tensor)}
    made |= {name: _with_values(value) for name, value in values.items() if is_dataclass(value)}
    return replace(view, **made)  # type: ignore[type-var]


def real(tensor: Any) -> Any:
    """What an op of the worker is given: values for tensors of the device, copies of host memory as it is by then."""
    if isinstance(tensor, torch.device):
        return torch.device("cpu")
    if _is_plain(tensor):
        return tensor.clone()
    if not isinstance(tensor, DelayedTensor):
        return tensor
    assert tensor.value is not None, "an op that runs before its input"
    return tensor.value


def _run(func: Any, args: Any, kwargs: Any, *, keep: bool = True) -> list[Tensor]:
    """Run an op on values; what it takes from host memory is copied, even where host and device are the same."""
    args, kwargs = tree_map(real, (args, kwargs))
    results = func(*args, **kwargs)
    return [one for one in tree_flatten(results)[0] if isinstance(one, Tensor)] if keep else []


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DelayedTensor)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=DEVICE)


def _nothing() -> None:
    """What is left of a job that is done."""
