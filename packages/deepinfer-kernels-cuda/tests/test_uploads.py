"""What is uploaded arrives whole, whatever its size and however often pinned memory is used again."""

import pytest
import torch

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer_kernels_cuda import uploads
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.uploads import Uploads

DEVICE = torch.device("cuda" if probe() is None else "cpu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e8m0fnu, torch.float32])
def test_tensors_arrive_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PIECE_BYTES", 1000)
    way = Uploads(DEVICE, torch.cuda.Event if DEVICE.type == "cuda" else CpuAccelerator().event)
    sent = [torch.randint(0, 255, (rows, 8), dtype=torch.uint8).view(dtype) for rows in (1, 3, 125, 700, 0, 126)]
    arrived = [way.upload(tensor) for tensor in sent]
    for before, after in zip(sent, arrived, strict=True):
        assert after.device.type == DEVICE.type
        assert after.shape == before.shape
        assert torch.equal(after.cpu().view(torch.uint8), before.view(torch.uint8))
