import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from deepspark.backbone import DraftBackbone
from deepspark.deepspec import DeepSpecBackbone, DeepSpecConfig, DeepSpecModel, TargetFacts, load_drafter
from deepspark.deepspec.training import choose_anchors
from deepspark.errors import CheckpointError, ConfigError, InputError

CONFIG = DeepSpecConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    block_size=4,
    target_layer_ids=(1, 3),
    mask_token_id=31,
    markov_rank=5,
    rope_theta=10000.0,
)
TARGET = TargetFacts(num_hidden_layers=6, hidden_size=16, vocab_size=32)


def model(**changes: object) -> DeepSpecModel:
    torch.manual_seed(0)
    made = DeepSpecModel(dataclasses.replace(CONFIG, **changes)).double()  # type: ignore[arg-type]
    for name, parameter in made.named_parameters():
        if parameter.dim() == 1:
            parameter.data = torch.rand_like(parameter) + 0.5
        elif "weight" in name:
            parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return made.eval()


def features(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def column(*values: int) -> Tensor:
    return torch.tensor(values)


def test_a_batch_of_different_lengths_is_its_sequences() -> None:
    backbone: DraftBackbone = (made := DeepSpecBackbone(model(), 3, 40))
    lengths = {0: 3, 1: 17, 2: 9}
    for slot, length in lengths.items():
        made.begin(slot)
        made.feed(slot, features(length, slot), 0)
    together = backbone.draft_block(column(5, 6, 7), column(9, 3, 17), column(2, 0, 1))
    for row, (slot, anchor) in enumerate(((2, 5), (0, 6), (1, 7))):
        alone = backbone.draft_block(column(anchor), column(lengths[slot]), column(slot))
        torch.testing.assert_close(alone.base[0], together.base[row], rtol=0, atol=1e-12)


def test_rejected_rows_are_overwritten_and_leave_no_trace() -> None:
    made = DeepSpecBackbone(model(), 2, 40)
    made.begin(0)
    made.feed(0, features(8), 0)
    made.feed(0, features(5, 9), 8)  # anchor and four drafts were fed
    made.feed(0, features(3, 4), 10)  # only two of those five rows were accepted
    made.begin(1)
    whole = torch.cat([features(8), features(5, 9)[:2], features(3, 4)])
    made.feed(1, whole, 0)
    first = made.draft_block(column(1), column(13), column(0))
    second = made.draft_block(column(1), column(13), column(1))
    torch.testing.assert_close(first.base, second.base, rtol=0, atol=1e-12)
    before = made.keys.clone()
    made.draft_block(column(2), column(13), column(0))
    assert torch.equal(before, made.keys)


def test_the_window_is_all_that_is_seen() -> None:
    made = DeepSpecBackbone(model(attention_window=4), 2, 40)
    for slot in (0, 1):
        made.begin(slot)
        made.feed(slot, features(12), 0)
    made.feed(1, features(8, 5), 0)  # change everything before the last four
    made.feed(1, features(12)[8:], 8)
    first = made.draft_block(column(1), column(12), column(0))
    torch.testing.assert_close(first.base, made.draft_block(column(1), column(12), column(1)).base, rtol=0, atol=0)


def test_a_context_may_begin_late() -> None:
    """A prefix hit without draft context: exact, as if the window began there."""
    made = DeepSpecBackbone(model(), 2, 40)
    made.begin(0, first=8)
    made.feed(0, features(12)[8:], 8)
    windowed = DeepSpecBackbone(model(attention_window=4), 1, 40)
    windowed.begin(0)
    windowed.feed(0, features(12), 0)
    ours, theirs = (each.draft_block(column(1), column(12), column(0)).base for each in (made, windowed))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_misuse_of_the_context_speaks() -> None:
    made = DeepSpecBackbone(model(), 1, 10)
    made.begin(0)
    made.feed(0, features(4), 0)
    with pytest.raises(InputError, match="leave a hole"):
        made.feed(0, features(1), 6)
    with pytest.raises(InputError, match="does not fit max_context 10"):
        made.feed(0, features(7), 4)
    with pytest.raises(InputError, match="32 wide"):
        made.feed(0, features(2)[:, :5], 4)
    with pytest.raises(InputError, match="feed the rows"):
        made.draft_block(column(1), column(6), column(0))


def test_the_gemma_variant_by_its_formulas() -> None:
    """One layer, one context token, written out with torch's own functions."""
    made = model(family="gemma", num_hidden_layers=1, final_logit_softcapping=3.0, attention_k_eq_v=True, block_size=2)
    backbone = DeepSpecBackbone(made, 1, 4)
    backbone.begin(0)
    backbone.feed(0, features(1), 0)
    got = backbone.draft_block(column(3), column(1), column(0))
    layer, eps = made.layers[0], CONFIG.rms_norm_eps
    attention = layer.self_attn

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def turn(x: Tensor, positions: list[int]) -> Tensor:
        pairs = torch.complex(x[..., :3], x[..., 3:])
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * 10000.0 ** (
            -torch.arange(3, dtype=torch.float64) / 3
        )
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([pairs.real, pairs.imag], -1)

    x = made.embed_tokens.weight[[3, 31]] * 4.0
    z = norm(made.fc(features(1)), made.hidden_norm.weight)
    normed = norm(x, layer.input_layernorm.weight)
    raw = attention.k_proj(torch.cat([z, normed])).unflatten(-1, (2, 6))
    keys, values = turn(norm(raw, attention.k_norm.weight), [0, 1, 2]), norm(raw, None)
    queries = turn(norm(attention.q_proj(normed).unflatten(-1, (4, 6)), attention.q_norm.weight), [1, 2])
    heads = []
    for head in range(4):
        scores = queries[:, head] @ keys[:, head // 2].T
        heads.append(torch.softmax(scores, -1) @ values[:, head // 2])
    attended = attention.o_proj(torch.stack(heads, 1).flatten(1))
    x = x + norm(attended, layer.post_attention_layernorm.weight)
    inner = norm(x, layer.pre_feedforward_layernorm.weight)
    mlp = layer.mlp
    inner = mlp.down_proj(F.gelu(mlp.gate_proj(inner), approximate="tanh") * mlp.up_proj(inner))
    x = (x + norm(inner, layer.post_feedforward_layernorm.weight)) * layer.layer_scalar
    logits = 3.0 * torch.tanh(norm(x, made.norm.weight) @ made.lm_head.weight.T / 3.0)
    torch.testing.assert_close(got.base[0], logits, rtol=0, atol=1e-10)


def write(folder: Path, made: DeepSpecModel, **changes: object) -> None:
    """Write a checkpoint as it is shipped: without embedding and head, `model.` free names."""
    folder.mkdir(exist_ok=True)
    values = dataclasses.asdict(made.config) | changes
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["whatever"]}))
    names = {
        name.removeprefix("heads."): tensor.contiguous()
        for name, tensor in made.state_dict().items()
        if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    save_file(names, folder / "model.safetensors")


def shared(made: DeepSpecModel) -> dict[str, Tensor]:
    return {name: made.state_dict()[name] for name in ("embed_tokens.weight", "lm_head.weight")}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none"])
def test_a_checkpoint_comes_back(tmp_path: Path, kind: str) -> None:
    made = model(
        markov_head_type=kind, markov_rank=0 if kind == "none" else 5, confidence_head_with_markov=kind != "none"
    )
    write(tmp_path, made)
    loaded = load_drafter(tmp_path, TARGET, shared(made))
    assert loaded.state_dict().keys() == made.state_dict().keys()
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        ({"target_layer_ids": [1, 5]}, TARGET, r"taps \[5\] do not exist in the target"),
        ({"target_layer_ids": [1, 1]}, TARGET, r"taps\) repeat"),
        ({"target_layer_ids": []}, TARGET, r"taps\) is empty"),
        (
            {"target_layer_ids": [1, 2, 3]},
            TARGET,
            r"fc\.weight of shape \[16, 32\], expected \[16, 48\] \(width = 3 taps",
        ),
        ({"block_size": 0}, TARGET, "block_size must be >= 1"),
        ({"mask_token_id": 32}, TARGET, r"noise token\) must lie in 0\.\.31, got 32"),
        ({}, dataclasses.replace(TARGET, hidden_size=20), "width: the drafter has hidden_size 16, the target 20"),
        ({}, dataclasses.replace(TARGET, vocab_size=40), "vocabulary: the drafter has 32 tokens, the target 40"),
        ({}, dataclasses.replace(TARGET, attention_window=128), "attention_window must equal the target's 128, got 0"),
        ({"markov_rank": 6}, TARGET, r"markov_w1\.weight of shape \[32, 5\], expected \[32, 6\] \(markov_rank 6"),
        ({"markov_head_type": "gated"}, TARGET, r"lacks heads\.markov_head\.gate_proj"),
        ({"enable_confidence_head": False}, TARGET, r"unknown tensor heads\.confidence_head"),
        ({"num_hidden_layers": 3}, TARGET, r"lacks layers\.2\."),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, object], target: TargetFacts, message: str
) -> None:
    made = model()
    write(tmp_path, made, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, target, shared(made))


def test_missing_files_and_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_drafter(tmp_path, TARGET)
    made = model()
    write(tmp_path, made)
    with pytest.raises(CheckpointError, match=r"lacks embed_tokens\.weight.*hand the target's in `shared`"):
        load_drafter(tmp_path, TARGET)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"\*\.safetensors"):
        load_drafter(tmp_path, TARGET)
    with pytest.raises(CheckpointError, match="lacks vocab_size"):
        DeepSpecConfig.from_dict({"hidden_size": 16})
    with pytest.raises(ConfigError, match="markov_rank 0 goes with kind 'none'"):
        model(markov_rank=0)


def test_anchors_are_supervised_and_padded() -> None:
    ids, mask = torch.arange(6), torch.tensor([0, 1, 1, 0, 1, 1])
    anchors = choose_anchors(ids, mask, torch.rand(5), 4, 3)
    assert anchors.positions.tolist() == [1, 4, 0, 0]
    assert anchors.keep.tolist() == [True, True, False, False]
    assert anchors.labels[:2].tolist() == [[2, 3, 4], [5, 5, 5]]
    assert anchors.valid.tolist() == [[True, False, False], [True, False, False], [False] * 3, [False] * 3]
    with pytest.raises(InputError, match=r"uniforms must be \[5\]"):
        choose_anchors(ids, mask, torch.rand(6), 4, 3)
