"""The tool that makes the demo model: what it trains is what the engine computes, in the engine's formats."""

import importlib.util
import json
import lzma
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from corpus import STOP, WRITTEN
from deepinfer import LLM, SamplingParams
from deepinfer.accelerator.ops.number_formats import fp4_round, fp8_round
from deepinfer.model.checkpoint import DEMO, open_checkpoint
from deepinfer.model.engram_hash import compress_token_ids
from deepinfer.model.read_config import parse_config
from deepseek_recipe import encode_chat, parse_completion
from dialogues import END, TOOLS, draw_dialogue, make_turn, render_call
from drafting import Blocks, draft_logits, draft_rows
from export import read_checkpoint, write_checkpoint
from network import Network, document_starts
from rollout import Writer
from rounding import fp4_entries, fp4_rows, fp8_blocks, fp8_rows
from settings import BOS, EOS, PAD, demo_config

LENGTH = 91


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_checkpoint(DEMO).tokenizer
    assert found is not None
    return found


def make_network(tokenizer: Tokenizer, seed: int = 1) -> Network:
    """A small network whose every parameter matters: gates, sinks and heads that start at zero are moved away."""
    config = parse_config(demo_config(tokenizer, small=True, quantised=False))
    ids = torch.from_numpy(compress_token_ids(tokenizer, config.vocab_size))
    network = Network(config, ids, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        still = ("_base", "_scale", "attn_sink", "bias")
        if name.endswith(still) or any(part in name for part in ("markov", "confidence", "norm")):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return network


@pytest.fixture(scope="module")
def network(tokenizer: Tokenizer) -> Network:
    return make_network(tokenizer)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    made = torch.randint(3, 4000, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    made[0, 0] = BOS
    return made


@given(st.integers(0, 2**32 - 1), st.floats(-12, 12))
@settings(max_examples=50, deadline=None)
def test_rounding_is_the_engines(seed: int, exponent: float) -> None:
    x = torch.randn((64, 96), generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    assert torch.equal(fp8_rows(x), fp8_round(x, 32))
    assert torch.equal(fp4_rows(x), fp4_round(x, 32))
    assert torch.equal(fp4_entries(x), fp4_round(x, 16))
    assert torch.equal(fp8_blocks(fp8_blocks(x)), fp8_blocks(x))


def test_gradients_pass_straight_through() -> None:
    x = torch.randn((32, 64), requires_grad=True)
    (fp4_rows(x) * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_checkpoint_in_the_engine_gives_the_networks_logits(
    network: Network, tokenizer: Tokenizer, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """Written in FP8 and FP4, read back as values, and run both ways in float32."""
    write_checkpoint(network, demo_config(tokenizer, small=True), tokenizer, tmp_path / "model")
    values = make_network(tokenizer, seed=2)
    read_checkpoint(values, tmp_path / "model")
    with torch.no_grad():
        ours = torch.log_softmax(values.head(values(tokens, document_starts(tokens, BOS)).hidden)[0], -1)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "model", "decoder_replay": "off"}
    llm = LLM(tmp_path / "model", accelerator="cpu", max_num_seqs=2, **options)
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    (completion,) = llm.generate({"prompt_token_ids": tokens[0].tolist()}, params)
    theirs = completion.prompt_logprobs
    assert isinstance(theirs, torch.Tensor)
    assert (theirs - ours).abs().max() < 1e-3


def test_drafts_in_the_engine_are_those_of_the_trained_stages(
    network: Network, tokenizer: Tokenizer, tokens: torch.Tensor, tmp_path: Path
) -> None:
    """With the drafter's own tokens fed back, the first draft is accepted exactly where both models agree."""
    write_checkpoint(network, demo_config(tokenizer, small=True), tokenizer, tmp_path / "model")
    values = make_network(tokenizer, seed=2)
    read_checkpoint(values, tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "model", "decoder_replay": "off"}
    llm = LLM(
        tmp_path / "model",
        accelerator="cpu",
        max_num_seqs=2,
        draft="on",
        draft_rule="greedy",
        max_model_len=512,
        **options,
    )
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    steps = list(llm.generate({"prompt_token_ids": tokens[0].tolist()}, params, stream=True))
    done = steps[-1].completion
    assert done is not None
    whole = torch.tensor([[*tokens[0].tolist(), *done.token_ids]])
    starts = document_starts(whole, BOS)
    place = LENGTH
    with torch.no_grad():
        output = values(whole, starts)
        best = values.head(output.hidden)[0].argmax(-1)
        for step in steps[1:-1]:
            assert step.draft_step is not None
            accepted = _accepted(values, whole, starts, output.taps, place, best)
            assert step.draft_step.accepted == accepted
            place += accepted + 1


def _accepted(
    network: Network, tokens: torch.Tensor, starts: torch.Tensor, taps: torch.Tensor, place: int, best: torch.Tensor
) -> int:
    """How many greedy drafts behind `place` are what the target says there."""
    blocks = Blocks(torch.tensor([[place]]), torch.ones((1, 1, network.draft.block_size)))
    hidden, normed = draft_rows(network, tokens, starts, taps, blocks)
    before = torch.full((1, 1, network.draft.block_size), int(tokens[0, place]))
    for row in range(network.draft.block_size):
        draft = int(draft_logits(network, hidden, normed, before)[0][0, 0, row].argmax())
        if place + row >= len(best) or draft != int(best[place + row]):
            return row
        if row + 1 < network.draft.block_size:
            before[0, 0, row + 1] = draft
    return network.draft.block_size


def test_documents_of_a_row_do_not_see_one_another(network: Network, tokens: torch.Tensor) -> None:
    before = torch.randint(3, 4000, (1, 26), generator=torch.Generator().manual_seed(6))
    before[0, 0] = BOS
    together = torch.cat((before, tokens), 1)
    with torch.no_grad():
        alone = network(tokens, document_starts(tokens, BOS)).hidden
        behind = network(together, document_starts(together, BOS)).hidden[:, 26:]
    assert (alone - behind).abs().max() < 1e-4


def test_written_rows_are_the_networks_own(network: Network) -> None:
    """At temperature 0 every token that was written is the best one by the forward pass over the whole row."""
    prompts = torch.tensor([BOS, 40, 50, 60, -1, BOS, 70, 80, -1, BOS, 90, -1])
    with torch.no_grad():
        writer = Writer(network, prompts, torch.zeros(3), 48, eos=EOS, pad=PAD)
        writer.longest = 9
        writer.reset(torch.tensor([0, 5, 9]))
        for _ in range(48):
            writer.step()
        logits = network.head(network(writer.tokens, document_starts(writer.tokens, BOS)).hidden)
    logits[..., PAD] = -torch.inf
    written = writer.flags[:, 1:]
    assert written.sum() > 60
    assert torch.equal(logits.argmax(-1)[:, :-1][written], writer.tokens[:, 1:][written])
    places = torch.nonzero(writer.tokens == BOS)[:, 1]
    assert len(places) > 6
    assert (places % 2 == 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_dialogues_are_what_the_recipe_renders_and_parses(seed: int) -> None:
    draw = random.Random(seed)
    turn = make_turn("tool", draw)
    assert turn.call is not None
    name, arguments = turn.call
    dialogue = render_call(turn, (name,), thinking=False, result=False)
    prompt = encode_chat([{"role": "user", "content": turn.question}], [TOOLS[name]], thinking=False)
    assert dialogue.prompt == prompt.text
    (call,) = parse_completion(dialogue.answer, prompt).tool_calls or []
    assert (call.name, json.loads(call.arguments)) == (name, arguments)
    plain = draw_dialogue(draw, "arithmetic")
    assert plain.answer.endswith(END)
    assert "⟦" not in plain.prompt + dialogue.prompt


def test_a_rehearsal_passes_every_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """`train --rehearse` on a handful of rows: a checkpoint that the engine runs, and a report."""
    data = tmp_path / "data"
    data.mkdir()
    tokenizer.save(str(data / "tokenizer.json"))
    rng = np.random.default_rng(0)
    rows = rng.integers(3, 4000, (8, 256)).astype(np.uint16)
    rows[:, 0] = BOS
    rows[:, 40:] |= WRITTEN
    prompts = np.array([BOS, 40, 50, STOP, BOS, 60, STOP] * 4, dtype=np.uint16)
    for name, array in {"rows": rows, "held": rows, "prompts": prompts, "held_prompts": prompts}.items():
        (data / f"{name}.xz").write_bytes(lzma.compress(array.tobytes()))
    tool = importlib.util.spec_from_file_location(
        "train_tiny_main", Path(sys.modules["network"].__file__ or "").parent / "__main__.py"
    )
    assert tool is not None
    assert tool.loader is not None
    module = importlib.util.module_from_spec(tool)
    tool.loader.exec_module(module)
    arguments = ["train", str(data), str(tmp_path / "model"), "--rehearse", "--steps", "4"]
    result = CliRunner().invoke(module.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "model" / "report.json").read_text())
    assert report["target_steps"] == report["draft_steps"] == 4
    llm = LLM(tmp_path / "model", accelerator="cpu", draft="on", max_num_seqs=1)
    assert len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
