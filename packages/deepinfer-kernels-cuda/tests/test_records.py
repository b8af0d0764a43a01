"""Records as kernels write them: byte for byte what the reference makes, whatever a row holds; -1 is the spare."""

import pytest
import torch

from deepinfer.accelerator.batch import RecordFormat, RecordView
from deepinfer.accelerator.ops.paged_cache import encode_records, record_bytes
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.kernels.records import takes_record, write_entries, write_window

DEVICE = torch.device("cuda" if probe() is None else "cpu")
ROWS = 7
KINDS: list[tuple[RecordFormat, int, int]] = [
    ("fp8_group32", 32, 8),
    ("fp4_group16", 32, 8),
    ("fp4_group32", 128, 64),
    ("fp8_rope", 32, 8),
    ("fp8_rope", 128, 64),
]


@pytest.mark.parametrize(("kind", "width", "rope"), KINDS)
def test_every_byte_is_the_references(kind: RecordFormat, width: int, rope: int) -> None:
    """Rows of zeros, of numbers below every scale, with ties between codes, and with zeros of either sign."""
    draw = torch.Generator().manual_seed(5)
    size = torch.tensor([0.0, 1e-30, 1e-6, 1e-2, 1.0, 40.0, 3e4]).unsqueeze(1)
    rows = (torch.randn(ROWS, width, generator=draw) * size).to(torch.bfloat16)
    rows[4, :16] = torch.arange(16).to(torch.bfloat16) * 0.25 - 1.75
    rows[5, 1], rows[5, 2] = -0.0, -1e-20
    rows[:, width - rope :] = rows[:, width - rope :].abs()
    view = RecordView(
        torch.full((ROWS + 1, record_bytes(kind, width, rope)), 255, dtype=torch.uint8), kind, width, rope
    )
    assert takes_record(view)
    still = torch.stack((torch.ones(ROWS, rope // 2), torch.zeros(ROWS, rope // 2)), 2)
    slots = torch.tensor([3, -1, 0, 5, 2, 1, 4])
    moved = RecordView(view.data.to(DEVICE), kind, width, rope)
    write_entries(rows.to(DEVICE), still.to(DEVICE), slots.to(DEVICE), moved, transform=False)
    want = encode_records(rows.to(torch.float32), view)
    assert torch.equal(moved.data.cpu()[slots], want)


@pytest.mark.parametrize(("kind", "width", "rope"), [kind for kind in KINDS if kind[0].startswith("fp8")])
def test_window_kv_is_normed_before_it_is_stored(kind: RecordFormat, width: int, rope: int) -> None:
    """Signs have a mean square of 1, so the norm is exact; rows lie apart in memory, as a part of a projection does."""
    draw = torch.Generator().manual_seed(6)
    signs = torch.randint(0, 2, (ROWS, width + 16), generator=draw).to(torch.bfloat16) * 2 - 1
    norm = torch.randn(width, generator=draw).to(torch.bfloat16).to(torch.float32)
    view = RecordView(torch.zeros(ROWS + 1, record_bytes(kind, width, rope), dtype=torch.uint8), kind, width, rope)
    moved = RecordView(view.data.to(DEVICE), kind, width, rope)
    still = torch.stack((torch.ones(ROWS, rope // 2), torch.zeros(ROWS, rope // 2)), 2).to(DEVICE)
    slots = torch.tensor([[3, 9], [-1, 9], [0, 9], [5, 9], [2, 9], [1, 9], [4, 9]])
    write_window(signs.to(DEVICE)[:, :width], norm.to(DEVICE), 0.0, still, slots.to(DEVICE)[:, 0], moved)
    want = encode_records(signs[:, :width].to(torch.float32) * norm, view)
    assert torch.equal(moved.data.cpu()[slots[:, 0]], want)


def test_shapes_that_kernels_do_not_hold_are_not_taken() -> None:
    others: list[tuple[RecordFormat, int, int]] = [("fp8_group32", 48, 8), ("fp8_rope", 256, 32), ("bfloat16", 32, 8)]
    for kind, width, rope in [*others, ("fp8_rope", 64, 64)]:
        assert not takes_record(RecordView(torch.zeros(1, 1, dtype=torch.uint8), kind, width, rope))
