"""What the model's tests share: a loaded model, and batches of one sequence written out by hand."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Groups
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import DeepSeek, ModelOutput
from deepinfer.model.draft import DraftStages
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.weights import Weights

BLOCKS = 4

FLOAT32 = Precision(torch.float32, round_inputs=False, cache="model")
FLOAT64 = Precision(torch.float64, round_inputs=False, cache="model")


@dataclass(frozen=True)
class Loaded:
    """A model with its drafter, on some ops."""

    config: ModelConfig
    ops: Ops
    precision: Precision
    model: DeepSeek
    stages: DraftStages | None

    def cache(self) -> KVCache:
        return KVCache(self.config, self.ops, self.precision, blocks=BLOCKS, window_blocks=BLOCKS, states=1)

    def run(self, ids: list[int], cache: KVCache, start: int = 0, stop: int | None = None, **changes: object) -> Tensor:
        """Logits of rows start .. stop - 1 (of the decoder rows among them)."""
        return self.step(ids, cache, start, stop, **changes).logits

    def step(
        self, ids: list[int], cache: KVCache, start: int = 0, stop: int | None = None, **changes: object
    ) -> ModelOutput:
        return self.model.forward(batch(self.config, ids, start, stop or len(ids), **changes), cache)


def load(folder: Path, precision: Precision = FLOAT32, ops: Ops | None = None) -> Loaded:
    accelerator = CpuAccelerator()
    ops = ops or accelerator.ops(precision)
    checkpoint = Checkpoint(folder)
    weights = Weights(checkpoint, ops, accelerator)
    model = DeepSeek(checkpoint.config, weights, ops)
    stages = DraftStages(model, weights) if checkpoint.config.draft else None
    weights.check_only(("vision.", "aligner.", "image_"))
    weights.finish()
    return Loaded(checkpoint.config, ops, precision, model, stages)


def batch(config: ModelConfig, ids: list[int], start: int, stop: int, *, first: int = 0, **changes: object) -> Batch:
    """Rows start .. stop - 1 of one sequence that owns blocks 0, 1, 2 ..; `first` is its first decoder row."""
    rows = range(start, stop)
    history = [[ids[row - back] if row >= back else -1 for back in range(1, config.history + 1)] for row in rows]
    groups = {}
    for ratio in config.ratios:
        ends = [row for row in rows if (row + 1) % ratio == 0]
        groups[ratio] = Groups(_numbers([row - start for row in ends]), _numbers([row // ratio for row in ends]))
    table = torch.arange(BLOCKS).unsqueeze(0)
    decoder_rows = torch.arange(min(max(first, start), stop) - start, stop - start) if first > start else None
    made = Batch(
        token_ids=_numbers(ids[start:stop]),
        positions=torch.arange(start, stop),
        sequences=torch.zeros(stop - start, dtype=torch.int64),
        history=_numbers(history).view(stop - start, config.history),
        query_starts=_numbers([0]),
        query_lens=_numbers([stop - start]),
        context_lens=_numbers([stop]),
        block_tables=table,
        window_tables=table,
        window_bases=_numbers([0]),
        states=_numbers([0]),
        decoder_starts=_numbers([first]),
        groups=groups,
        logit_rows=torch.arange(stop - start if decoder_rows is None else len(decoder_rows)),
        max_context=stop,
        decoder_rows=decoder_rows,
    )
    assert stop <= BLOCKS * BLOCK_TOKENS
    return replace(made, **changes)  # type: ignore[arg-type]


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


def largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _numbers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
