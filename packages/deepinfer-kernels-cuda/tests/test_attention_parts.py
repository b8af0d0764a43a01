"""Attention over every record, against a plain softmax; and in parts that do not depend on the batch.

The conformance suite says more, on a device: it fills whole caches, which takes the interpreter minutes.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.batch import RecordFormat, RecordView
from deepinfer.accelerator.ops.paged_cache import decode_records, encode_records, record_bytes
from deepinfer_kernels_cuda.driver import probe
from deepinfer_kernels_cuda.kernels import attention
from deepinfer_kernels_cuda.kernels.attention import Keys, attend, cut
from deepinfer_kernels_cuda.kernels.records import FORMATS

DEVICE = torch.device("cuda" if probe() is None else "cpu")
ROWS, HEADS, WIDTH, DIM, POOL = 3, 4, 32, 8, 150


def lists(width: int, seen: tuple[int, ...], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Slots [ROWS, width] of which each row sees the first few, and their masks."""
    slots = torch.randint(0, POOL, (ROWS, width), generator=draw)
    hidden = torch.arange(width) >= torch.tensor(seen).unsqueeze(1)
    return slots.masked_fill(hidden, -1), torch.zeros(ROWS, width).masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class Inputs:
    """Queries, and for window and entries: records, their values, slots and masks."""

    q: Tensor
    views: tuple[RecordView, RecordView]
    values: tuple[Tensor, Tensor]
    lists: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


@functools.cache
def inputs(kinds: tuple[RecordFormat, RecordFormat] = ("fp8_group32", "fp4_group16")) -> Inputs:
    """Random records of two formats."""
    draw = torch.Generator().manual_seed(8)
    views = []
    for kind in kinds:
        view = RecordView(torch.zeros(POOL + 1, record_bytes(kind, WIDTH, DIM), dtype=torch.uint8), kind, WIDTH, DIM)
        view.data[:POOL] = encode_records(torch.randn(POOL, WIDTH, generator=draw), view)
        views.append(view)
    window, entries = views
    q = torch.randn(ROWS, HEADS, WIDTH, generator=draw).to(torch.bfloat16)
    values = (decode_records(window.data, window, torch.float32), decode_records(entries.data, entries, torch.float32))
    return Inputs(q, (window, entries), values, (lists(16, (16, 3, 9), draw), lists(140, (140, 5, 0), draw)))


def run(given: Inputs, rows: list[int], width: int, *, steady: bool) -> Tensor:
    """Attention of some rows over lists of entries of which only the first `width` places are given."""
    turns = torch.stack((torch.ones(ROWS, DIM // 2), torch.zeros(ROWS, DIM // 2)), 2)
    keys = []
    for view, pair, most in zip(given.views, given.lists, (16, width), strict=True):
        slots, bias = (part[rows, :most].contiguous().to(DEVICE) for part in pair)
        keys.append(Keys(view.data.to(DEVICE), slots, bias, FORMATS[view.format]))
    q, sink = given.q[rows].to(DEVICE), torch.zeros(HEADS, device=DEVICE)
    return attend(q, keys[0], keys[1], sink, turns[rows].to(DEVICE), steady=steady).cpu()


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize(
    "kinds", [("fp8_group32", "fp4_group16"), ("fp8_group32", "fp8_group32"), ("fp8_rope", "fp8_rope")], ids=str
)
def test_it_is_attention(kinds: tuple[RecordFormat, RecordFormat], *, steady: bool) -> None:
    given = inputs(kinds)
    q, got = given.q, run(given, [0, 1, 2], 140, steady=steady)
    for row in range(ROWS):
        parts = [
            values[slots[row][slots[row] >= 0]] for values, (slots, _) in zip(given.values, given.lists, strict=True)
        ]
        keys = torch.cat(parts)
        scores = torch.cat((q[row].to(torch.float32) @ keys.t() * WIDTH**-0.5, torch.zeros(HEADS, 1)), 1)
        want = torch.softmax(scores, 1)[:, :-1] @ keys
        torch.testing.assert_close(got[row].to(torch.float32), want, rtol=0.02, atol=0.02)


def test_a_row_has_the_same_bits_alone_and_beside_longer_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    whole = run(given, [0, 1, 2], 140, steady=True)
    assert torch.equal(run(given, [0], 140, steady=True), whole[:1])
    assert torch.equal(run(given, [2, 1], 8, steady=True), whole[[2, 1]])
    assert torch.equal(run(given, [1], 70, steady=True), whole[1:2])
    monkeypatch.setattr(attention, "MOST_SHARES", 8)
    assert torch.equal(run(given, [0, 1, 2], 140, steady=True), whole)


def test_parts_depend_on_the_lists_alone() -> None:
    assert cut(1, 128, 512, steady=True) == cut(8192, 128, 512, steady=True) == (8, 32, 64)
    assert cut(1, 128, 8192, steady=True) == (128, 32, 64)
    assert cut(1, 128, 512, steady=False) == (16, 32, 32)
    assert cut(300, 128, 512, steady=False) == (1, 128, 512)
