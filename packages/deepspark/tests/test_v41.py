import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepspark.backbone import BlockRows
from deepspark.cost import CostTable
from deepspark.drafter import DrafterSettings, DraftRequest, DSparkDrafter
from deepspark.errors import CheckpointError
from deepspark.policy import Fixed
from deepspark.proposing import HeadedSource, by_argmax, propose
from deepspark.v41 import V41DraftConfig, load_heads

DATA = Path(__file__).parent / "data" / "v41_heads.safetensors"


def golden(folder: str) -> tuple[V41DraftConfig, list[dict[str, Any]], dict[str, Tensor]]:
    with safe_open(DATA, "pt") as file:
        facts = json.loads(file.metadata()[folder])
        names = [name for name in file.keys() if name.startswith(f"{folder}/")]  # noqa: SIM118 - not a dictionary
        tensors = {name.split("/", 1)[1]: file.get_tensor(name) for name in names}
    return V41DraftConfig.from_text_config(facts["text_config"]), facts["drafts"], tensors


class GivenRows:
    """The stages' part, as recorded: what an engine's draft stages return."""

    def __init__(self, config: V41DraftConfig, tensors: dict[str, Tensor], hidden: Tensor) -> None:
        self._config = config
        self._tensors = tensors
        self._hidden = hidden

    @property
    def block_size(self) -> int:
        return self._hidden.shape[0]

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def draft_block(self, anchors: Tensor, positions: Tensor, slots: Tensor) -> BlockRows:
        weight = self._tensors[self._config.last_stage + "norm.weight"].float()
        hidden = self._hidden[None].expand(anchors.shape[0], -1, -1)
        normed = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight, 1e-20)
        return BlockRows(hidden, normed, normed @ self._tensors["head.weight"].float().T)


def check(
    config: V41DraftConfig, drafts: list[dict[str, Any]], tensors: dict[str, Tensor], recorded: dict[str, Tensor]
) -> None:
    heads = load_heads(config, tensors)
    for draft in drafts:
        key = draft["key"]
        backbone = GivenRows(config, tensors, recorded[f"{key}.hidden"])
        anchors = torch.tensor([draft["token"]])
        with torch.no_grad():
            got = propose(
                backbone.draft_block(anchors, anchors, anchors), heads, anchors, lambda z, _: z.softmax(-1), by_argmax()
            )
        assert got.tokens[0].tolist() == draft["tokens"]
        torch.testing.assert_close(got.logits[0], recorded[f"{key}.logits"], rtol=0, atol=1e-4)
        assert got.confidence_logits is not None
        torch.testing.assert_close(got.confidence_logits[0], recorded[f"{key}.confidence_logit"], rtol=0, atol=1e-4)
        source = HeadedSource(backbone, heads)
        settings = DrafterSettings(rule="greedy", policy=Fixed(backbone.block_size), parking=None)
        drafter = DSparkDrafter(source, CostTable([1], [1.0], mode="linear"), 1, settings)
        request = DraftRequest(
            slot=0, anchor=draft["token"], position=draft["context"], seed=0, limit=backbone.block_size
        )
        assert drafter.propose([request]).drafts[0].tolist() == draft["tokens"]


@pytest.mark.parametrize("folder", ["v41-c-f32", "v41-s-smooth"])
def test_golden_drafts_token_for_token(folder: str) -> None:
    config, drafts, tensors = golden(folder)
    check(config, drafts, tensors, tensors)


@pytest.mark.parametrize("folder", ["v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth"])
def test_golden_drafts_of_the_extra_folder(extra_data: Path, folder: str) -> None:
    where = extra_data / "golden" / folder
    config = V41DraftConfig.from_text_config(json.loads((where / "config.json").read_text())["text_config"])
    drafts = json.loads((where / "golden.json").read_text())["drafts"]
    check(config, drafts, load_file(where / "model.safetensors"), load_file(where / "golden.safetensors"))


def facts() -> dict[str, Any]:
    with safe_open(DATA, "pt") as file:
        values: dict[str, Any] = json.loads(file.metadata()["v41-c-f32"])["text_config"]
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dspark_target_layer_ids": [4, 99]}, "the taps"),
        ({"dspark_target_layer_ids": []}, "the taps"),
        ({"dspark_block_size": 0}, "block size"),
        ({"dspark_noise_token_id": 512}, r"dspark_noise_token_id must lie in 0\.\.511, got 512"),
    ],
)
def test_a_configuration_that_cannot_be_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        V41DraftConfig.from_text_config(facts() | change)


def test_a_checkpoint_without_a_drafter_says_so() -> None:
    values = facts()
    del values["dspark_markov_rank"]
    with pytest.raises(CheckpointError, match="lacks dspark_markov_rank: the checkpoint has no DSpark drafter"):
        V41DraftConfig.from_text_config(values)


def test_heads_that_do_not_fit_are_named() -> None:
    _, _, tensors = golden("v41-c-f32")
    wider = V41DraftConfig.from_text_config(facts() | {"dspark_markov_rank": 40})
    with pytest.raises(CheckpointError, match=r"markov_w1\.weight of shape \[512, 32\], expected \[512, 40\]"):
        load_heads(wider, tensors)
    deeper = V41DraftConfig.from_text_config(facts() | {"num_nextn_predict_layers": 3})
    with pytest.raises(CheckpointError, match=r"lacks mtp\.2\."):
        load_heads(deeper, tensors)
