"""Opening the device: with one, what the contract promises beside ops; without one, an error that says what to do."""

from collections.abc import Callable

import pytest
import torch

from deepinfer.accelerator.registry import open_accelerator
from deepinfer.errors import AcceleratorError
from deepinfer_kernels_cuda.accelerator import NvidiaAccelerator
from deepinfer_kernels_cuda.driver import probe


def without_device() -> None:
    reason = probe()
    assert reason is not None
    with pytest.raises(AcceleratorError) as caught:
        open_accelerator("nvidia")
    assert "'nvidia' of deepinfer-kernels-cuda" in str(caught.value)
    assert reason in str(caught.value)
    if not torch.cuda.is_available():
        with pytest.raises(AcceleratorError, match="finds no usable NVIDIA device"):
            NvidiaAccelerator()


def with_device() -> None:
    accelerator = NvidiaAccelerator()
    free, total = accelerator.memory()
    assert 0 < free <= total
    assert "compute capability" in accelerator.description()
    table = torch.arange(1000.0)
    assert accelerator.host_table(table).is_pinned()
    assert accelerator.host_table(table).device.type == "cpu"
    assert accelerator.pinned(table).is_pinned()


def events_and_streams() -> None:
    accelerator = NvidiaAccelerator()
    with accelerator.stream():
        doubled = accelerator.pinned(torch.arange(1000.0)).to(accelerator.device, non_blocking=True) * 2
        event = accelerator.event()
        event.record()
    event.synchronize()
    assert event.query()
    assert doubled.sum().item() == 999000.0


def replay() -> None:
    accelerator = NvidiaAccelerator()
    x = torch.zeros(4, device=accelerator.device)
    y = torch.zeros(4, device=accelerator.device)
    again = accelerator.capture(lambda: y.copy_(x + 1))
    x.fill_(5.0)
    again()
    assert y.tolist() == [6.0] * 4


CHECKS = [with_device, events_and_streams, replay] if probe() is None else [without_device]


@pytest.mark.parametrize("check", CHECKS)
def test_accelerator(check: Callable[[], None]) -> None:
    check()
