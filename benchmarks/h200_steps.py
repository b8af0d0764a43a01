"""Steps that no engine has to reach: batches at any context over a cache of random records, and a clock for them."""

import time

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Groups, RecordView
from deepinfer.model.config import ModelConfig
from deepinfer.model.kv_cache import KVCache

WINDOWS = 3
SPREAD = 64
"""Contexts of a batch differ by less than this, so that not all rows end a group at once."""


class Clock:
    """Points in the device's stream, and milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> object:
        """Return this point."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def between(self, begin: object, end: object) -> float:
        """Milliseconds; both points must have been reached."""
        if isinstance(begin, float) and isinstance(end, float):
            return 1e3 * (end - begin)
        assert isinstance(begin, torch.Event)
        assert isinstance(end, torch.Event)
        return float(begin.elapsed_time(end))

    def wait(self) -> None:
        """Wait for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def step_of(config: ModelConfig, count: int, width: int, context: int, device: torch.device) -> Batch:
    """The last `width` rows of `count` sequences of about `context` tokens; every sequence has blocks of its own."""
    ends = context - torch.arange(count) % min(SPREAD, context // 2)
    positions = (ends.unsqueeze(1) + torch.arange(-width, 0)).flatten()
    sequences = torch.arange(count).repeat_interleave(width)
    each = -(-context // BLOCK_TOKENS)
    order = torch.randperm(count * each, generator=torch.Generator().manual_seed(0)).view(count, each)
    bases = (ends - width - config.window + 1).clamp_min(0) // BLOCK_TOKENS
    rows = count * width

    def groups(ratio: int) -> Groups:
        found = torch.nonzero((positions + 1) % ratio == 0).flatten()
        entries, size = positions[found] // ratio, BLOCK_TOKENS // ratio
        slots = order[sequences[found], entries // size] * size + entries % size
        return Groups(found.to(device), slots.to(device))

    ids = torch.randint(
        3, config.vocab_size - 3, (rows, 1 + config.history), generator=torch.Generator().manual_seed(1)
    )
    numbers = torch.arange(count)
    of_rows = {"positions": positions, "sequences": sequences, "logit_rows": torch.arange(rows)}
    of_sequences = {
        "query_starts": numbers * width,
        "query_lens": torch.full((count,), width),
        "context_lens": ends,
        "block_tables": order,
        "window_tables": numbers.unsqueeze(1) * WINDOWS + torch.arange(WINDOWS),
        "window_bases": bases,
        "states": numbers,
        "decoder_starts": torch.zeros_like(numbers),
    }
    return Batch(
        token_ids=ids[:, 0].to(device),
        history=ids[:, 1:].to(device),
        groups={ratio: groups(ratio) for ratio in config.ratios},
        max_context=context,
        **{name: tensor.to(device) for name, tensor in (of_rows | of_sequences).items()},
    )


def draft_step(config: ModelConfig, count: int, context: int, device: torch.device) -> Batch:
    """A block of the draft stages behind `count` sequences."""
    assert config.draft is not None
    batch = step_of(config, count, config.draft.block_size, context, device)
    return Batch(**{**vars(batch), "groups": {}, "max_context": 0})


def fill_cache(cache: KVCache) -> None:
    """Give every record and tail numbers: zeros would take other ways through the kernels, and NaN spoils a step."""
    views = [cache.layer(layer.index) for layer in cache.config.layers]
    views += [cache.stage(stage) for stage in range(cache.config.draft.stages if cache.config.draft else 0)]
    for view in views:
        for records in (view.window, view.entries, view.index_keys):
            if records is not None:
                _fill(records)
        for tail in (view.tail, view.index_tail):
            if tail is not None:
                tail.values.normal_()
                tail.scores.normal_()


def _fill(view: RecordView) -> None:
    """Codes of any finite number, scales around one."""
    data: Tensor = view.data
    codes, scales = {
        "fp8_group32": (view.width, (118, 123)),
        "fp4_group16": (view.width // 2, (40, 64)),
        "fp4_group32": (view.width // 2, (125, 128)),
    }.get(view.format, (0, (0, 1)))
    if not codes:
        data.normal_()
        return
    limit = 120 if view.format == "fp8_group32" else 256
    data[:, :codes].random_(0, limit)
    data[:, codes:].random_(*scales)
