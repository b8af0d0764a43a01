"""The model against golden numbers from an independent reference, the choices of each layer included."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, override

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.accelerator.batch import Batch, Selection
from deepinfer.accelerator.cpu_ops import CpuOps
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import RouteSettings
from deepinfer.accelerator.ops.ngram_memory import EngramHash
from deepinfer.accelerator.ops.sparse_attention import IndexRequest
from deepinfer.accelerator.parameters import Precision

from .steps import FLOAT32, FLOAT64, Loaded, batch, largest, load, rms

V41 = ("v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth")
FOLDERS = (*V41, "v4-g")
TOLERANCE = 1e-4
"""Float32 against the independent reference; three implementations lie within 6e-6."""


@dataclass(frozen=True)
class Golden:
    folder: Path
    facts: dict[str, Any]
    tensors: dict[str, Tensor]


@pytest.fixture(scope="session")
def golden(golden_dir: Callable[[str], Path]) -> Callable[[str], Golden]:
    @cache
    def read(name: str) -> Golden:
        folder = golden_dir(name)
        facts = json.loads((folder / "golden.json").read_text())
        return Golden(folder, facts, load_file(folder / "golden.safetensors"))

    return read


@pytest.fixture(scope="session")
def loaded(golden: Callable[[str], Golden]) -> Callable[..., Loaded]:
    @cache
    def make(name: str, precision: Precision = FLOAT32) -> Loaded:
        return load(golden(name).folder, precision)

    return make


@pytest.mark.parametrize("name", FOLDERS)
def test_prompt_logits(name: str, golden: Callable[[str], Golden], loaded: Callable[..., Loaded]) -> None:
    model, expected = loaded(name), golden(name)
    for number, ids in enumerate(expected.facts["prompts"]):
        first = expected.facts["logits_first_row"][number]
        assert largest(model.run(ids, model.cache())[first:], expected.tensors[f"logits.{number}"]) < TOLERANCE


@pytest.mark.parametrize("name", FOLDERS)
def test_greedy_continuations(name: str, golden: Callable[[str], Golden], loaded: Callable[..., Loaded]) -> None:
    model, expected = loaded(name), golden(name)
    for ids, continuation in zip(expected.facts["prompts"], expected.facts["greedy"], strict=True):
        memory, known = model.cache(), list(ids)
        logits = model.run(known, memory)
        for token in continuation:
            assert int(logits[-1].argmax()) == token
            known.append(token)
            logits = model.run(known, memory, len(known) - 1)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("chunk", [1, 7, 61])
def test_chunks_equal_the_whole(
    name: str, chunk: int, golden: Callable[[str], Golden], loaded: Callable[..., Loaded]
) -> None:
    model = loaded(name, FLOAT64)
    ids = golden(name).facts["prompts"][0][: 60 if chunk == 1 else None]
    whole, memory = model.run(ids, model.cache()), model.cache()
    pieces = [model.run(ids, memory, at, min(at + chunk, len(ids))) for at in range(0, len(ids), chunk)]
    assert largest(torch.cat(pieces), whole) < 1e-10


@pytest.mark.parametrize("name", V41)
def test_decoder_replay(name: str, golden: Callable[[str], Golden], loaded: Callable[..., Loaded]) -> None:
    model, expected = loaded(name), golden(name)
    replay = expected.facts["decoder_replay"]
    ids = expected.facts["prompts"][replay["prompt"]]
    logits = model.run(ids, model.cache(), first=replay["first_row"])
    assert logits.shape[0] == len(ids) - replay["first_row"]
    assert largest(logits[-24:], expected.tensors["decoder_replay.logits"]) < TOLERANCE
    memory = model.cache()
    pieces = [
        model.run(ids, memory, at, min(at + 37, len(ids)), first=replay["first_row"]) for at in range(0, len(ids), 37)
    ]
    assert largest(torch.cat(pieces), logits) < TOLERANCE


MODES = [
    ("kv_quant", Precision(torch.float32, round_inputs=False, cache="records"), 0.0, 2e-3),
    ("", Precision(torch.float32, round_inputs=True, cache="model"), 0.05, 0.10),
    ("", Precision(torch.float32, round_inputs=True, cache="records"), 0.05, 0.10),
    ("", Precision(torch.bfloat16, round_inputs=True, cache="records"), 0.05, 0.10),
    ("", Precision(torch.bfloat16, round_inputs=False, cache="model"), 0.0, 0.012),
]


@pytest.mark.parametrize(("mode", "precision", "low", "high"), MODES)
def test_rounding_modes(
    mode: str,
    precision: Precision,
    low: float,
    high: float,
    golden: Callable[[str], Golden],
    loaded: Callable[..., Loaded],
) -> None:
    """v41-s-smooth, where no choice can flip: the distance to the same mode's rows, or to the plain ones."""
    model, expected = loaded("v41-s-smooth", precision), golden("v41-s-smooth")
    logits = model.run(expected.facts["prompts"][0], model.cache())
    rows = expected.tensors[f"logits.0@{mode}" if mode else "logits.0"]
    assert low <= rms(logits[-rows.shape[0] :], rows) <= high


@pytest.mark.parametrize("name", V41)
def test_drafts(name: str, golden: Callable[[str], Golden], loaded: Callable[..., Loaded]) -> None:
    model, expected = loaded(name), golden(name)
    for draft in expected.facts["drafts"]:
        number = draft["prompt"]
        ids = (expected.facts["prompts"][number] + expected.facts["greedy"][number])[: draft["context"]]
        tokens, values = propose(model, ids, draft["token"])
        assert tokens == draft["tokens"]
        for key, value in values.items():
            assert largest(value, expected.tensors[f"{draft['key']}.{key}"]) < TOLERANCE, key


@pytest.mark.parametrize("name", V41)
def test_drafts_after_replay(name: str, golden: Callable[[str], Golden], loaded: Callable[..., Loaded]) -> None:
    model, expected = loaded(name), golden(name)
    replay = expected.facts["decoder_replay"]
    ids = expected.facts["prompts"][replay["prompt"]]
    tokens, values = propose(model, ids, replay["greedy"][0], first=replay["first_row"])
    assert tokens == replay["draft_tokens"]
    assert largest(values["logits"], expected.tensors["decoder_replay.draft.logits"]) < TOLERANCE


def propose(model: Loaded, ids: list[int], anchor: int, first: int = 0) -> tuple[list[int], dict[str, Tensor]]:
    """Greedy drafts after `ids` and `anchor`, with the plain Markov head written out."""
    stages, draft, memory = model.stages, model.config.draft, model.cache()
    assert stages is not None
    assert draft is not None
    step = batch(model.config, ids, 0, len(ids), first=first)
    hidden = model.model.forward(step, memory).hidden
    assert hidden is not None
    stages.write_context(hidden, step, memory)
    block = ids + stages.block_ids(torch.tensor([anchor]))[0].tolist()
    rows = batch(model.config, block, len(ids), len(block), decoder_starts=torch.tensor([first]))
    out = stages.forward(rows, memory)
    tokens, logits, confidence = [anchor], [], []
    for row in range(draft.block_size):
        previous = stages.heads.markov_embed[tokens[-1]]
        logits.append(out.logits[row] + stages.heads.markov_head @ previous)
        confidence.append(stages.heads.confidence @ torch.cat((out.hidden[row], previous)))
        tokens.append(int(logits[-1].argmax()))
    values = {"hidden": out.hidden, "base_logits": out.logits}
    return tokens[1:], {**values, "logits": torch.stack(logits), "confidence_logit": torch.cat(confidence)}


def test_image_rows(golden: Callable[[str], Golden], loaded: Callable[..., Loaded]) -> None:
    """An image span: features instead of embeddings, bias_vl, no Engram, cut n-grams."""
    model, expected = loaded("v41-a"), golden("v41-a")
    ids, image = expected.facts["vl"]["ids"], model.config.image_token_id
    rows = torch.tensor([token == image for token in ids])
    features = torch.zeros(len(ids), model.config.hidden)
    features[rows] = expected.tensors["vl.span"]
    back = [[i >= k and ids[i - k] == image for k in range(1, model.config.history + 1)] for i in range(len(ids))]
    changes = {"image_rows": rows, "image_features": features, "history_images": torch.tensor(back)}
    assert largest(model.run(ids, model.cache(), **changes), expected.tensors["vl.logits"]) < TOLERANCE


class Recording(CpuOps):
    """CPU ops that also keep what layers chose, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), FLOAT32)
        self.chosen: dict[str, list[Tensor]] = defaultdict(list)

    @override
    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, picks: Tensor | None, settings: RouteSettings
    ) -> tuple[Tensor, Tensor]:
        result = super().route(x, gate, bias, picks, settings)
        self.chosen["experts"].append(result[0])
        return result

    @override
    def ngram_rows(self, batch: Batch, hashing: EngramHash) -> Tensor:
        self.chosen["engram"].append(super().ngram_rows(batch, hashing))
        return self.chosen["engram"][-1]

    @override
    def everything(self, batch: Batch, ratio: int) -> Selection:
        self.chosen["index"].append(super().everything(batch, ratio).entries)
        return super().everything(batch, ratio)

    @override
    def select_entries(self, request: IndexRequest, batch: Batch) -> tuple[Selection, Tensor | None]:
        selection, blocks = super().select_entries(request, batch)
        self.chosen["index"].append(selection.entries)
        if blocks is not None:
            self.chosen["blocks"].append(blocks)
        return selection, blocks


@pytest.mark.parametrize("name", FOLDERS)
def test_choices(name: str, golden: Callable[[str], Golden]) -> None:
    """Picked experts, selected entries, candidate blocks and n-gram rows of prompt 0, layer by layer."""
    expected, ops = golden(name), Recording()
    model = load(expected.folder, FLOAT32, ops)
    model.run(expected.facts["prompts"][0], model.cache())
    for layer, picks in enumerate(ops.chosen["experts"]):
        key = f"experts.layers.{layer}.ffn"
        if key in expected.tensors:
            assert torch.equal(picks.sort(1).values, expected.tensors[key].long().sort(1).values)
    indexed = sorted(int(key.split(".")[1]) for key in expected.tensors if key.startswith("index."))
    sources = [layer.index for layer in model.config.layers if layer.owns_index or layer.ratio == 128]
    for layer, entries in zip(sources, ops.chosen["index"], strict=True):
        if layer in indexed:
            assert sets(entries) == sets(expected.tensors[f"index.{layer}"])
    for blocks in ops.chosen["blocks"]:
        assert sets(blocks) == sets(expected.tensors["candidate_blocks"])
    for order, rows in enumerate(ops.chosen["engram"]):
        assert torch.equal(rows, expected.tensors["engram_rows"][:, order].long())


def sets(entries: Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in entries.tolist()]


@pytest.mark.parametrize("name", ["v41-a", "v4-g"])
def test_cpu_ops_equal_the_reference(name: str, golden: Callable[[str], Golden], loaded: Callable[..., Loaded]) -> None:
    """The CPU accelerator's own bodies against the definitions, through a whole model in float64."""
    reference = load(golden(name).folder, FLOAT64, Ops(torch.device("cpu"), FLOAT64))
    ids = golden(name).facts["prompts"][0]
    model = loaded(name, FLOAT64)
    assert largest(model.run(ids, model.cache()), reference.run(ids, reference.cache())) < 1e-10
