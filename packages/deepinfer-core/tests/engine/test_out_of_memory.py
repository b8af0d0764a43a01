"""A device without memory: at the start the user reads what to change, later the engine takes smaller steps."""

import logging
from typing import override

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import LLM, ConfigError
from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Request
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.kv_cache import KVCache

from .checker import EXAMPLES, CheckingModel, drain, engine_config, greedy, lone_run, small_config, small_ops, tokens_of

V41 = small_config()


class Narrow(CheckingModel):
    """Has memory for so many rows; a step of more breaks off after some of its work."""

    def __init__(self, rows: int) -> None:
        super().__init__(V41)
        self.most, self.largest = rows, 0

    @override
    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        rows = len(batch.token_ids)
        output = super().forward(batch, cache)
        if rows > self.most:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        self.largest = max(self.largest, rows)
        return output


@settings(max_examples=EXAMPLES // 8)
@given(
    rows=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    overlap=st.booleans(),
)
def test_steps_get_smaller_until_they_fit_and_tokens_stay(rows: int, lengths: list[int], overlap: bool) -> None:
    config = engine_config(overlap=overlap, max_num_batched_tokens=300)
    model = Narrow(rows)
    engine = Engine(config, V41, model, small_ops(), CpuAccelerator(), None)
    asked = [
        Request([3 + (i * j) % 30 for j in range(length)], greedy(max_tokens=6)) for i, length in enumerate(lengths)
    ]
    numbers = [engine.add(request) for request in asked]
    gained = drain(engine)
    for number, request in zip(numbers, asked, strict=True):
        assert tokens_of(gained[number]) == lone_run(V41, config, request).token_ids
    assert model.largest <= rows
    assert engine.scheduler.blocks.free == config.blocks


def test_a_row_that_finds_no_memory_alone_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(engine_config(), V41, Narrow(0), small_ops(), CpuAccelerator(), None)
    number = engine.add(Request([3, 4, 5], greedy(max_tokens=2)))
    with caplog.at_level(logging.WARNING):
        (ended,) = drain(engine)[number]
    assert ended.finish_reason == "error"
    assert "OutOfMemoryError: tried to allocate 2.00 GiB" in str(ended.error)
    assert "a step found no memory on the device, steps have at most 256 rows now" in caplog.records[0].getMessage()


def test_a_model_that_does_not_fit_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ConfigError, match=r"its weights take 0\.00 GB .* lower memory_fraction, max_num_seqs"):
        LLM("tiny", accelerator="cpu")
