"""Opening the device without one: an error that says what to do. With a device nothing was ever run."""

import logging

import pytest

from deepinfer.accelerator.registry import open_accelerator
from deepinfer.errors import AcceleratorError
from deepinfer_kernels_ascend.accelerator import AscendAccelerator
from deepinfer_kernels_ascend.installation import probe


def without_device() -> None:
    reason = probe()
    assert reason is not None
    with pytest.raises(AcceleratorError) as caught:
        open_accelerator("ascend")
    assert "'ascend' of deepinfer-kernels-ascend" in str(caught.value)
    assert reason in str(caught.value)
    with pytest.raises(
        AcceleratorError, match=r"install deepinfer-kernels-ascend\[npu\]|finds no usable Ascend device"
    ):
        AscendAccelerator()


def with_device(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        accelerator = AscendAccelerator()
    assert "never run on hardware" in caplog.text
    assert "never run on hardware" in accelerator.description()
    free, total = accelerator.memory()
    assert 0 < free <= total


def test_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    if probe() is None:
        with_device(caplog)
    else:
        without_device()
