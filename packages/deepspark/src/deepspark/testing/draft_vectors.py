"""Checks of DeepSpec-style drafters against golden vectors: drafting, training forward, losses and gradients."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspark.deepspec import DeepSpecBackbone, DeepSpecConfig, DeepSpecModel, load_weights
from deepspark.deepspec.training import LossSettings, choose_anchors, drafter_loss, training_rows
from deepspark.proposing import by_uniforms, propose
from deepspark.testing.verify_vectors import expect, expect_close, floats
from deepspark.transform import SamplingSettings, transform

__all__ = ["draft"]

TENSOR_TOLERANCE = 1e-4


def draft(row: dict[str, Any], folder: Path) -> None:
    """draft.jsonl and its safetensors file: one drafter."""
    tensors = load_file(folder / row["file"])
    model = DeepSpecModel(DeepSpecConfig.from_dict(row["config"]))
    load_weights(model, {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("param.")})
    _drafting(row, model, tensors)
    _training(row, model, tensors)


def _near(what: str, got: Tensor, want: Tensor) -> None:
    expect_close(what, got.detach(), want, TENSOR_TOLERANCE)


def _drafting(row: dict[str, Any], model: DeepSpecModel, tensors: dict[str, Tensor]) -> None:
    length = row["context_tokens"]
    backbone = DeepSpecBackbone(model, num_slots=2, max_context=length + 1)
    backbone.begin(1)
    start = 0
    for count in row["append_splits"]:
        backbone.feed(1, tensors["feats"][start : start + count], start)
        start += count
    _near("context_k", backbone.keys[:, 1, :length], tensors["context_k"])
    _near("context_v", backbone.values[:, 1, :length], tensors["context_v"])
    anchors = torch.tensor([row["anchor"]])
    rows = backbone.draft_block(anchors, torch.tensor([length]), torch.tensor([1]))
    _near("hidden", rows.normed[0], tensors["hidden"])
    settings = SamplingSettings(**row["sampling"])
    with torch.no_grad():
        drafts = propose(
            rows,
            model.heads,
            anchors,
            lambda logits, offset: transform(logits, settings),
            by_uniforms(floats([row["uniforms"]])),
        )
    expect("tokens", drafts.tokens[0].tolist(), row["tokens"])
    _near("logits", drafts.logits[0], tensors["logits"])
    if drafts.Q is None:
        raise AssertionError("drafting by uniforms stores its laws")
    _near("q", drafts.Q[0], tensors["q"])
    expect("has confidences", drafts.confidence_logits is not None, "confidence_logits" in tensors)
    if drafts.confidence_logits is not None:
        _near("confidence_logits", drafts.confidence_logits[0], tensors["confidence_logits"])


def _training(row: dict[str, Any], model: DeepSpecModel, tensors: dict[str, Tensor]) -> None:
    train = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("train.")}
    block, count = model.config.block_size, train["anchors"].shape[0]
    anchors = choose_anchors(train["ids"], train["loss_mask"], train["anchor_uniforms"], count, block)
    for name in ("labels", "keep", "valid"):
        expect(name, getattr(anchors, name).int().tolist(), train[name].int().tolist())
    expect("anchors", anchors.positions.tolist(), train["anchors"].tolist())
    rows = training_rows(model, train["ids"], train["feats"], anchors)
    _near("train.logits", rows.logits, train["logits"])
    if rows.confidence_logits is not None:
        _near("train.conf", rows.confidence_logits, train["conf"])
    target = model.base_logits(train["last_hidden"]).detach()
    losses = drafter_loss(rows, anchors, target, LossSettings(**row["loss_settings"]))
    for name, want in row["loss"].items():
        expect_close(f"loss {name}", float(getattr(losses, name).detach()), want, TENSOR_TOLERANCE)
    losses.loss.backward()
    parameters = dict(model.named_parameters())
    names = {"fc": "fc.weight", "q0": "layers.0.self_attn.q_proj.weight", "w2": "heads.markov_head.markov_w2.weight"}
    for short, name in names.items():
        if f"grad.{short}" in train:
            gradient = parameters[name].grad
            if gradient is None:
                raise AssertionError(f"{name} got no gradient")
            _near(f"gradient of {name}", gradient, train[f"grad.{short}"])
