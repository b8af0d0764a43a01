"""`LLM.generate`: prompts of every form, completions in order, increments as they come, bad prompts among good ones."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from deepinfer import Increment
from deepinfer.engine.request import Completion, Request, SamplingParams
from deepinfer.errors import AcceleratorError, ConfigError, RequestError
from deepinfer.llm import LLM

torch.set_num_threads(1)  # sums this small cost more to share than to do

GOLDEN = ["v41-a", "v41-b-quant", "v41-c-f32", "v41-s-smooth", "v4-g"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The tiny model in float64 without quantisers, where the same sums give the same tokens."""
    return LLM("tiny", accelerator="cpu", dtype="float64", kv_cache_dtype="model", max_model_len=512, max_num_seqs=8)


def _completion(steps: list[Increment], index: int) -> Completion:
    found = [step.completion for step in steps if step.index == index and step.completion is not None]
    assert len(found) == 1
    return found[0]


def test_every_form_of_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = [llm.model_config.bos_token_id, *llm.tokenizer.encode("Once upon", add_special_tokens=False).ids]
    spelled = llm.tokenizer.decode(ids[:1], skip_special_tokens=False) + "Once upon"
    forms: list[Any] = ["Once upon", ids, {"prompt": "Once upon"}, {"prompt_token_ids": ids}, spelled]
    together = llm.generate(forms, GREEDY)
    alone = [llm.generate(form, GREEDY)[0] for form in forms]
    assert together == alone
    assert {completion.prompt_token_ids for completion in together} == {tuple(ids)}
    assert {completion.text for completion in together} == {llm.tokenizer.decode(together[0].token_ids)}
    assert together[0].finish_reason == "length"
    assert together[0].decoder_replay == llm.model_config.window + 12
    assert llm.generate([]) == []


def test_one_bad_prompt_never_ends_its_neighbours(llm: LLM) -> None:
    prompts: list[Any] = ["a", "", [], [10**6], {"text": "a"}, None, {"prompt": 5}, ["a"], 7, [1.5], "b"]
    completions = llm.generate(prompts, GREEDY)
    assert [completion.finish_reason for completion in completions] == ["length", *["error"] * 9, "length"]
    errors = [completion.error or "" for completion in completions]
    for place, text in {
        1: "the prompt is empty",
        2: "the prompt is empty",
        3: "token ids must be 0 to",
        4: "where wanted, got the keys ['text']",
        5: "a prompt must be a text, token ids or an object, got NoneType",
        6: "a prompt object must be",
        7: "must be a flat list of integers",
        8: "a prompt must be a text, token ids or an object, got int",
        9: "must be a flat list of integers",
    }.items():
        assert text in errors[place]
    assert [completions[0], completions[-1]] == llm.generate(["a", "b"], GREEDY)


def test_one_set_of_parameters_for_each_prompt(llm: LLM) -> None:
    wrong = SamplingParams(temperature=-1)
    short, bad = llm.generate(["a", "b"], [SamplingParams(max_tokens=3, ignore_eos=True), wrong])
    assert len(short.token_ids) == 3
    assert (
        bad.error
        == "temperature must be a number, at least 0, got -1: 0 for the best token, 1 for the model's distribution"
    )
    with pytest.raises(RequestError, match="one for each of 2 prompts, got 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(RequestError, match=r"sampling_params must be SamplingParams, one or a list, got \{"):
        llm.generate("a", {"temperature": 0})  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="prompts must be a text, token ids, an object, or a sequence, got int"):
        llm.generate(5)  # type: ignore[call-overload]


@settings(max_examples=8)
@given(
    prompts=st.lists(st.text("abc de", min_size=1, max_size=40), min_size=1, max_size=5),
    stop=st.lists(st.text("aeno ", min_size=1, max_size=2), max_size=2),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_streaming_is_not_streaming(llm: LLM, prompts: list[str], stop: list[str], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=12, stop=stop, logprobs=1)
    whole = llm.generate(prompts, params)
    steps = list(llm.generate(prompts, params, stream=True))
    for index, completion in enumerate(whole):
        mine = [step for step in steps if step.index == index]
        assert _completion(steps, index) == completion
        assert "".join(step.text for step in mine) == completion.text
        assert tuple(token for step in mine for token in step.token_ids) == completion.token_ids
        assert all(len(step.token_ids) == 1 for step in mine)
        assert not any(word in completion.text for word in stop)


def test_increments_come_while_others_wait(llm: LLM) -> None:
    """Two streams that take turns, and a third that is closed early, give what each gives alone."""
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in ("a", "bb")]
    first, second = (llm.generate(prompt, GREEDY, stream=True) for prompt in ("a", "bb"))
    third = llm.generate("ccc", SamplingParams(max_tokens=100, ignore_eos=True), stream=True)
    next(third)
    seen: list[list[Increment]] = [[], []]
    for _ in range(GREEDY.max_tokens or 0):
        seen[0].append(next(first))
        seen[1].append(next(second))
        if len(seen[0]) == 3:
            third.close()  # type: ignore[attr-defined]
    assert [_completion(steps, 0) for steps in seen] == alone
    assert [progress.finish_reason for progress in llm.engine.step()] == []
    assert not llm.engine.has_work
    assert llm.engine.scheduler.blocks.free == llm.config.blocks


def test_an_abort_from_outside_is_told(llm: LLM) -> None:
    stream = llm.generate("a", SamplingParams(max_tokens=200, ignore_eos=True), stream=True)
    next(stream)
    llm.engine.abort(max(llm._mail))
    last = list(stream)[-1]
    assert last.finish_reason == "abort"
    assert last.completion is not None
    assert len(last.completion.token_ids) < 200


def test_prompt_rows_turn_decoder_replay_off(llm: LLM) -> None:
    prompt = np.random.default_rng(0).integers(30, 255, 200).tolist()
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=-1, logprobs=-1, ignore_eos=True)
    with_rows, plain = llm.generate([prompt, prompt], [params, GREEDY])
    assert with_rows.decoder_replay is None
    assert plain.decoder_replay == llm.model_config.window + 12
    assert isinstance(with_rows.prompt_logprobs, Tensor)
    assert isinstance(with_rows.logprobs, Tensor)
    assert with_rows.prompt_logprobs.shape == (200, llm.model_config.vocab_size)
    assert with_rows.prompt_logprobs.dtype == torch.float32
    assert with_rows.logprobs.argmax(1).tolist() == list(with_rows.token_ids)
    assert torch.equal(with_rows.prompt_logprobs[-1], with_rows.logprobs[0])


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(AcceleratorError, match="no accelerator is named 'abacus'"):
        LLM("tiny", accelerator="abacus")
    with pytest.raises(ConfigError, match="dtype must be one of"):
        LLM("tiny", accelerator="cpu", dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="decoder_replay=5 must be at least the window of 32 tokens"):
        LLM("tiny", accelerator="cpu", decoder_replay=5)
    with pytest.raises(ConfigError, match="max_model_len must be an integer"):
        LLM("tiny", accelerator="cpu", max_model_len=10**9)
    with pytest.raises(ConfigError, match=r"only 0\.00 GB may be used"):
        LLM("tiny", accelerator="cpu", memory_fraction=1e-9)


def _golden(
    golden_dir: Callable[[str], Path], name: str, **changes: Any
) -> tuple[LLM, dict[str, Any], Mapping[str, Tensor]]:
    folder = golden_dir(name)
    settings = {"dtype": "float32", "kv_cache_dtype": "model", "decoder_replay": "off", "max_num_seqs": 8, **changes}
    return (
        LLM(folder, accelerator="cpu", **settings),
        json.loads((folder / "golden.json").read_text()),
        load_file(folder / "golden.safetensors"),
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_checkpoints(golden_dir: Callable[[str], Path], name: str) -> None:
    """Log-probabilities of every prompt row, and every greedy token, of an independent implementation."""
    llm, golden, tensors = _golden(golden_dir, name)
    params = SamplingParams(
        temperature=0, max_tokens=len(golden["greedy"][0]), ignore_eos=True, prompt_logprobs=-1, logprobs=0
    )
    for index, completion in enumerate(llm.generate(golden["prompts"], params)):
        assert completion.token_ids == tuple(golden["greedy"][index])
        first = golden["logits_first_row"][index]
        wanted = torch.log_softmax(tensors[f"logits.{index}"].to(torch.float64), 1)
        assert isinstance(completion.prompt_logprobs, Tensor)
        assert (completion.prompt_logprobs[first:] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("name", GOLDEN[:4])
def test_golden_decoder_replay(golden_dir: Callable[[str], Path], name: str) -> None:
    """The last rows of a prompt whose decoder half begins late, in one prefill and in chunks of 37 tokens."""
    _, golden, tensors = _golden(golden_dir, name)
    replay, prompt = golden["decoder_replay"], golden["prompts"][0]
    kept = len(prompt) - replay["first_row"]
    wanted = tensors["decoder_replay.logits"]
    for budget in (2048, 37):
        llm, _, _ = _golden(golden_dir, name, decoder_replay=kept, max_num_batched_tokens=budget)
        llm.engine.add(Request(prompt, GREEDY))
        rows: list[Tensor] = []
        while sum(map(len, rows)) < kept:
            plan = llm.engine.scheduler.schedule(0.0)
            start, count = int(plan.starts[0]), int(plan.counts[0])
            asked = max(start + count - max(start, replay["first_row"]), 0)
            plan.logit_counts[0] = asked
            batch = llm.engine.builder.build(plan)
            output = llm.engine.runner.run(batch)
            rows.append(output.logits)
            tokens = llm.engine.sampler.read(llm.engine.sampler.draw(output, batch, plan))
            llm.engine.scheduler.advance(plan)
            llm.engine.scheduler.commit(plan, tokens)
        assert (torch.cat(rows)[-len(wanted) :] - wanted).abs().max() < 1e-4


def test_golden_cache_records(golden_dir: Callable[[str], Path]) -> None:
    """The model's quantised cache moves the logits of the smooth checkpoint by no more than its formats explain."""
    llm, golden, tensors = _golden(golden_dir, "v41-s-smooth", kv_cache_dtype="auto")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=-1)
    completion = llm.generate(golden["prompts"][0], params)[0]
    wanted = torch.log_softmax(tensors["logits.0@kv_quant"].to(torch.float64), 1)
    assert isinstance(completion.prompt_logprobs, Tensor)
    difference = completion.prompt_logprobs[-len(wanted) :] - wanted
    assert difference.square().mean().sqrt() < 2e-3


def test_golden_rounded_inputs(golden_dir: Callable[[str], Path]) -> None:
    """Rounding inputs to FP8, as trained, moves the logits by 0.05 to 0.10 (rms), for quantised weights."""
    llm, golden, tensors = _golden(golden_dir, "v41-s-smooth", dtype="auto")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=-1)
    completion = llm.generate(golden["prompts"][0], params)[0]
    first = golden["logits_first_row"][0]
    wanted = torch.log_softmax(tensors["logits.0"].to(torch.float64), 1)
    assert isinstance(completion.prompt_logprobs, Tensor)
    difference = completion.prompt_logprobs[first:] - wanted
    assert 0.05 < difference.square().mean().sqrt() < 0.10
