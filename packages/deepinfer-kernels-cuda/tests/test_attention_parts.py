"""Attention whose parts do not depend on the batch: a row has one result, alone, among others, by longer lists."""

import functools

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.batch import RecordView
from deepinfer.accelerator.ops.paged_cache import decode_records, encode_records
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.kernels import attention
from deepinfer_kernels_cuda.kernels.attention import Keys, attend, cut
from deepinfer_kernels_cuda.kernels.records import FP8

DEVICE = torch.device("cuda" if probe() is None else "cpu")
ROWS, HEADS, WIDTH, DIM, POOL = 3, 4, 32, 8, 150


def lists(width: int, seen: tuple[int, ...], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Slots [ROWS, width] of which each row sees the first few, and their masks."""
    slots = torch.randint(0, POOL, (ROWS, width), generator=draw)
    hidden = torch.arange(width) >= torch.tensor(seen).unsqueeze(1)
    return slots.masked_fill(hidden, -1), torch.zeros(ROWS, width).masked_fill(hidden, -torch.inf)


@functools.cache
def inputs() -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Queries, records, their values, and the lists of window and entries."""
    draw = torch.Generator().manual_seed(8)
    view = RecordView(torch.zeros(POOL + 1, WIDTH + 1, dtype=torch.uint8), "fp8_group32", WIDTH, DIM)
    view.data[:POOL] = encode_records(torch.randn(POOL, WIDTH, generator=draw), view)
    q = torch.randn(ROWS, HEADS, WIDTH, generator=draw).to(torch.bfloat16)
    both = [lists(16, (16, 3, 9), draw), lists(140, (140, 5, 0), draw)]
    return q, view.data, decode_records(view.data, view, torch.float32), both


def run(rows: list[int], width: int) -> Tensor:
    """Attention of some rows over lists of entries of which only the first `width` places are given."""
    q, data, _, ((slots, bias), (entry_slots, entry_bias)) = inputs()
    turns = torch.stack((torch.ones(ROWS, DIM // 2), torch.zeros(ROWS, DIM // 2)), 2)
    window = Keys(data.to(DEVICE), slots[rows].to(DEVICE), bias[rows].to(DEVICE), FP8)
    chosen = (part[rows, :width].contiguous().to(DEVICE) for part in (entry_slots, entry_bias))
    entries = Keys(data.to(DEVICE), *chosen, FP8)
    sink = torch.zeros(HEADS, device=DEVICE)
    return attend(q[rows].to(DEVICE), window, entries, sink, turns[rows].to(DEVICE), steady=True).cpu()


def test_it_is_attention() -> None:
    q, _, values, both = inputs()
    got = run([0, 1, 2], 140)
    for row in range(ROWS):
        slots = torch.cat([slots[row] for slots, _ in both])
        keys = values[slots[slots >= 0]]
        scores = torch.cat((q[row].to(torch.float32) @ keys.t() * WIDTH**-0.5, torch.zeros(HEADS, 1)), 1)
        want = torch.softmax(scores, 1)[:, :-1] @ keys
        torch.testing.assert_close(got[row].to(torch.float32), want, rtol=0.02, atol=0.02)


def test_a_row_has_the_same_bits_alone_and_beside_longer_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run([0, 1, 2], 140)
    assert torch.equal(run([0], 140), whole[:1])
    assert torch.equal(run([2, 1], 8), whole[[2, 1]])
    assert torch.equal(run([1], 70), whole[1:2])
    monkeypatch.setattr(attention, "MOST_SHARES", 8)
    assert torch.equal(run([0, 1, 2], 140), whole)


def test_parts_depend_on_the_lists_alone() -> None:
    assert cut(1, 128, 512, steady=True) == cut(8192, 128, 512, steady=True) == (8, 32, 64)
    assert cut(1, 128, 8192, steady=True) == (128, 32, 64)
    assert cut(1, 128, 512, steady=False) == (16, 32, 32)
    assert cut(300, 128, 512, steady=False) == (1, 128, 512)
