"""Collecting calibration rounds: owns the run that whole-block verification needs, and the hash that names a drafter.

Fitting is `calibration`'s.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from deepspark.calibration import ENOUGH_ROUNDS, RoundLog
from deepspark.decode import GenerationSettings, SpeculativeDecoder
from deepspark.errors import ConfigError
from deepspark.policy import Fixed

__all__ = ["collect_rounds", "hash_weights"]

Batch = tuple[Sequence[Sequence[int]], Sequence[GenerationSettings]]


def hash_weights(module: nn.Module) -> str:
    """Return 16 hex digits that name a drafter's weights: names, shapes, dtypes and bytes of its state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def collect_rounds(
    decoder: SpeculativeDecoder,
    batches: Iterable[Batch],
    path: Path,
    *,
    model_hash: str,
    rounds: int = ENOUGH_ROUNDS,
) -> int:
    """Decode `batches` until `rounds` whole blocks were verified, write them to `path` and return how many there are.

    The decoder's drafter must verify whole blocks always (policy Fixed(width), parking None), and all requests must
    share one temperature: acceptance, which is the label, depends on it.  Raises ConfigError otherwise.
    """
    drafter = decoder.drafter
    if drafter is None:
        raise ConfigError("collecting needs a decoder with a drafter")
    scheduler = drafter.scheduler
    if scheduler.policy != Fixed(drafter.width) or scheduler.parking is not None:
        raise ConfigError(
            f"collecting needs whole blocks: make the drafter with policy Fixed({drafter.width}) and parking None, "
            f"got {scheduler.policy} and {scheduler.parking}"
        )
    log = drafter.rounds = RoundLog(drafter.width)
    temperatures: set[float] = set()
    for prompts, settings in batches:
        temperatures |= {each.sampling.temperature for each in settings}
        if len(temperatures) > 1:
            raise ConfigError(
                f"rounds of one file share one temperature, got {sorted(temperatures)}; collect them apart"
            )
        decoder.generate(prompts, settings)
        if len(log) >= rounds:
            break
    drafter.rounds = None
    log.save(path, model_hash=model_hash, temperature=temperatures.pop() if temperatures else 1.0)
    return len(log)
