"""Drafter checkpoints: owns the way from files to a `DeepSpecModel`, and the refusal of files that do not fit.

What a configuration means is `config`'s; a drafter that loads here belongs to its target as far as files can tell.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspark.deepspec.config import DeepSpecConfig, TargetFacts
from deepspark.deepspec.model import DeepSpecModel
from deepspark.errors import CheckpointError

__all__ = ["load_drafter", "load_weights"]

_SHARED = ("embed_tokens.weight", "lm_head.weight")
_HEADS = ("markov_head.", "confidence_head.")


def _ours(name: str) -> str:
    """Map a checkpoint's tensor name to the module's."""
    name = name.removeprefix("model.")
    return f"heads.{name}" if name.startswith(_HEADS) else name


def load_weights(
    model: DeepSpecModel, tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor] | None = None
) -> None:
    """Load `tensors` into `model` in place; raise CheckpointError naming every tensor that is missing, surplus or
    misshapen.

    shared: the target's `embed_tokens.weight` and `lm_head.weight`, for checkpoints that leave them out.
    """
    given = {_ours(name): tensor for name, tensor in tensors.items()}
    for name, tensor in (shared or {}).items():
        given.setdefault(name, tensor)
    wanted = model.state_dict()
    problems = [f"lacks {name}" for name in wanted if name not in given]
    problems += [f"has an unknown tensor {name}" for name in given if name not in wanted]
    for name in wanted.keys() & given.keys():
        if wanted[name].shape != given[name].shape:
            hint = _hint(name, model.config)
            problems.append(f"has {name} of shape {list(given[name].shape)}, expected {list(wanted[name].shape)}{hint}")
    if problems:
        missing_shared = [name for name in _SHARED if name not in given]
        advice = "; hand the target's in `shared`" if missing_shared else ""
        raise CheckpointError("the drafter's checkpoint " + "; ".join(sorted(problems)) + advice)
    model.load_state_dict(given)


def _hint(name: str, config: DeepSpecConfig) -> str:
    if name == "fc.weight":
        return f" (width = {len(config.target_layer_ids)} taps x hidden size {config.hidden_size}: do the taps fit?)"
    if "markov" in name:
        return f" (markov_rank {config.markov_rank}, kind {config.markov_head_type})"
    if name.startswith("heads.confidence_head"):
        return " (check confidence_head_with_markov and markov_rank)"
    return ""


def load_drafter(
    folder: Path, target: TargetFacts, shared: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> DeepSpecModel:
    """Load the drafter in `folder` (config.json and *.safetensors) for `target`; raises CheckpointError before it can
    run badly.

    shared: as in `load_weights`.  dtype: convert weights (None keeps the files').  Returns the model in evaluation
    mode.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"expected the drafter's config.json in {folder}, found none")
    config = DeepSpecConfig.from_dict(json.loads(path.read_text()))
    config.check_target(target)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"expected *.safetensors in {folder}, found none")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    with torch.device("meta"):
        model = DeepSpecModel(config)
    chosen = dtype or next(iter(tensors.values())).dtype
    model = model.to_empty(device="cpu").to(chosen)
    load_weights(model, tensors, shared)
    return model.eval()
