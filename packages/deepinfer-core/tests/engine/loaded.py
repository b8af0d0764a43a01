"""The real model in float64 and without quantisers, where every equality is one of tokens: the logic alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request
from deepinfer.engine.speculation import Drafting
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.draft import DraftStages
from deepinfer.model.tiny import write_tiny
from deepinfer.model.weights import Weights

from .checker import drain, engine_config

FLOAT64 = Precision(torch.float64, round_inputs=False, cache="model")


@dataclass(frozen=True)
class Loaded:
    """A small model, ready for engines of any configuration."""

    model_config: ModelConfig
    weights: Weights
    model: DeepSeek
    ops: Ops

    def config(self, **changes: object) -> EngineConfig:
        """Room for everything, with decoder replay where the model has it, and with `changes`."""
        replay = self.model_config.window + 12 if self.model_config.first_decoder_layer is not None else None
        return engine_config(**{"precision": FLOAT64, "decoder_replay": replay, **changes})

    def engine(
        self, config: EngineConfig, drafting: Drafting | None = None, clock: Callable[[], float] = lambda: 0.0
    ) -> Engine:
        parts = (self.model, self.ops, CpuAccelerator(), None)
        return Engine(config, self.model_config, *parts, clock=clock, drafting=drafting)

    def run(self, config: EngineConfig, requests: Sequence[Request]) -> list[list[Progress]]:
        """What each request becomes in a fresh engine, all added before the first step."""
        engine = self.engine(config)
        ids = [engine.add(request) for request in requests]
        gained = drain(engine)
        return [gained[number] for number in ids]

    @cached_property
    def stages(self) -> DraftStages:
        """The draft stages."""
        return DraftStages(self.model, self.weights)


def load(folder: Path, ops: Ops | None = None) -> Loaded:
    """Load the checkpoint in `folder`."""
    checkpoint, accelerator = Checkpoint(folder), CpuAccelerator()
    ops = ops or accelerator.ops(FLOAT64)
    weights = Weights(checkpoint, ops, accelerator)
    return Loaded(checkpoint.config, weights, DeepSeek(checkpoint.config, weights, ops), ops)


def load_tiny(folder: Path, family: str, ops: Ops | None = None) -> Loaded:
    """Write the tiny model of `family` into `folder` and load it."""
    write_tiny(folder, family=family)  # type: ignore[arg-type]
    return load(folder, ops)


def rows(gained: Sequence[Progress]) -> Tensor:
    """Log-probabilities of all tokens, where whole rows were asked for."""
    return torch.cat([part.logprobs for part in gained if isinstance(part.logprobs, Tensor)])


def text(seed: int, length: int) -> list[int]:
    """Random token ids that stand for letters in the tiny model's vocabulary."""
    numbers: list[int] = np.random.default_rng(seed).integers(30, 255, length).tolist()
    return numbers
