"""Penalties, bias, bad words and min_tokens are what they say, and follow from a request's own tokens alone."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import LLM
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops.sampling import TokenAdjustments
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.engine.token_rules import RuledRow, TokenRules, gather, make_rules
from deepinfer.errors import RequestError
from deepinfer.model.tiny_tokenizer import make_tokenizer

from .checker import EXAMPLES, PRECISION, checked_engine, drain, engine_config, small_config, tokens_of

VOCABULARY = 12
OPS = CpuAccelerator().ops(PRECISION)
TOKEN = st.integers(0, VOCABULARY - 1)
TOKENIZER = make_tokenizer()

RULED = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    logit_bias=st.none() | st.dictionaries(TOKEN, st.sampled_from([-100.0, -1.0, 5.0]), max_size=4),
    bad_words_token_ids=st.none() | st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=4),
    min_tokens=st.integers(0, 4),
)


def rules_of(params: SamplingParams, prompt: Sequence[int], stops: Sequence[int] = (1,)) -> TokenRules:
    return make_rules(params, prompt, stops, VOCABULARY, None)


def by_hand(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The definition, one token after the other."""
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        logit += (params.logit_bias or {}).get(token, 0.0)
        words = [list(word) for word in params.bad_words_token_ids or ()]
        completed = [word for word in words if [*output, token][-len(word) :] == word]
        if completed or (token == 1 and len(output) < params.min_tokens):
            logit = -math.inf
        result.append(logit)
    return result


@given(
    data=st.lists(
        st.tuples(
            st.lists(st.integers(-40, 40).map(lambda n: n / 10), min_size=VOCABULARY, max_size=VOCABULARY),
            RULED,
            st.lists(TOKEN, min_size=1, max_size=6),
            st.lists(TOKEN, max_size=8),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_rules_are_what_they_say_and_each_row_has_its_own(
    data: list[tuple[list[float], SamplingParams, list[int], list[int]]],
) -> None:
    logits = torch.tensor([row for row, *_ in data], dtype=torch.float64)
    ruled = [
        RuledRow(place, rules_of(params, prompt), output)
        for place, (_, params, prompt, output) in enumerate(data)
        if params.has_rules
    ]
    got = OPS.adjust(logits, TokenAdjustments(*map(torch.from_numpy, gather(ruled)))) if ruled else logits
    wanted = torch.tensor([by_hand(*one) for one in data], dtype=torch.float64)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-12)
    assert logits.isfinite().all()


@given(params=RULED, prompt=st.lists(TOKEN, min_size=1, max_size=5), outputs=st.lists(st.lists(TOKEN, max_size=8)))
def test_rules_follow_any_change_of_the_output(
    params: SamplingParams, prompt: list[int], outputs: list[list[int]]
) -> None:
    def named(rules: TokenRules, output: list[int]) -> dict[int, tuple[float, float]]:
        tokens, repetition, addend = rules.entries(output)
        assert len(set(tokens.tolist())) == len(tokens)
        changed = (repetition != 1) | (addend != 0)
        columns = (tokens[changed].tolist(), repetition[changed].tolist(), addend[changed].tolist())
        return {token: (factor, added) for token, factor, added in zip(*columns, strict=True)}

    rules, before = rules_of(params, prompt), []
    for output in outputs:
        before = before[: len(before) // 2] + output  # drafts are dropped, others come
        assert named(rules, before) == named(rules_of(params, prompt), before)


@settings(max_examples=EXAMPLES // 10)
@given(
    order=st.permutations(range(5)),
    params=st.lists(RULED, min_size=5, max_size=5),
    budget=st.integers(5, 90),
    blocks=st.integers(3, 8),
)
def test_a_request_with_rules_writes_the_same_whatever_runs_beside_it(
    order: list[int], params: list[SamplingParams], budget: int, blocks: int
) -> None:
    model = small_config()
    requests = [
        Request([3 + i] * (20 * i + 1), _seeded(one, seed=i, greedy=i % 2 == 0), index=i)
        for i, one in enumerate(params)
    ]
    alone = []
    for request in requests:
        engine = checked_engine(engine_config(), model)
        number = engine.add(request)
        alone.append(tokens_of(drain(engine)[number]))
    config = engine_config(max_num_batched_tokens=budget, max_num_seqs=5, blocks=blocks, max_model_len=300)
    engine = checked_engine(config, model)
    ids = {place: engine.add(requests[place]) for place in order}
    gained = drain(engine)
    assert [tokens_of(gained[ids[place]]) for place in range(5)] == alone
    for one, tokens in zip(params, alone, strict=True):
        assert 1 not in tokens[: one.min_tokens]
        for word in one.bad_words_token_ids or ():
            assert not any(list(tokens[at : at + len(word)]) == list(word) for at in range(len(tokens)))


def _seeded(params: SamplingParams, *, seed: int, greedy: bool) -> SamplingParams:

    return replace(params, seed=seed, max_tokens=12, temperature=0.0 if greedy else 1.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", accelerator="cpu", max_num_seqs=8, max_model_len=512)


def test_bias_bans_and_forces(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=5, logit_bias={40: 100}, ignore_eos=True),
        SamplingParams(max_tokens=40, logit_bias={"40": 100, 41: 100}, frequency_penalty=2, seed=1),  # type: ignore[dict-item]
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    ]
    forced, shared, plain = llm.generate(["a"] * 3, params)
    assert forced.token_ids == (40,) * 5
    assert set(shared.token_ids) == {40, 41}
    banned = llm.generate(
        "a", SamplingParams(max_tokens=40, temperature=0, bad_words_token_ids=[[t] for t in set(plain.token_ids)])
    )
    assert not set(banned[0].token_ids) & set(plain.token_ids)


def test_bad_words_are_banned_with_and_without_a_space(llm: LLM) -> None:
    word, joined = "cat", TOKENIZER.encode("cat", add_special_tokens=False).ids
    spaced = TOKENIZER.encode(" cat", add_special_tokens=False).ids
    push = dict.fromkeys((*joined, *spaced), 60.0)
    without, with_words = llm.generate(
        ["the"] * 2,
        [SamplingParams(max_tokens=60, seed=3, logit_bias=push, bad_words=words) for words in (None, [word])],
    )
    assert word in without.text
    for ids in (joined, spaced):
        assert not any(list(with_words.token_ids[at : at + len(ids)]) == ids for at in range(60))


def test_min_tokens_hold_back_every_kind_of_end(llm: LLM) -> None:
    end = 1
    push = SamplingParams(max_tokens=30, seed=2, logit_bias={end: 100, 40: 90}, stop_token_ids=[40])

    short, long = llm.generate(["x"] * 2, [push, replace(push, min_tokens=9)])
    assert len(short.token_ids) == 1
    assert len(long.token_ids) == 10
    assert not {end, 40} & set(long.token_ids[:9])
    assert long.stop_reason == end


def test_a_stop_string_counts_only_behind_min_tokens(llm: LLM) -> None:
    base = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)

    whole = llm.generate("x", base)[0]
    texts = ["".join(TOKENIZER.decode([t]) for t in whole.token_ids[:n]) for n in range(31)]
    stop = whole.text[2:4]
    for least in range(31):
        got = llm.generate("x", replace(base, stop=stop, min_tokens=least))[0]
        ends = [at + 2 for at in range(len(whole.text)) if whole.text.startswith(stop, at)]
        later = [end for end in ends if end > len(texts[least])]
        assert got.text == (whole.text[: later[0] - 2] if later else whole.text)
        assert got.finish_reason == ("stop" if later else "length")


def test_log_probabilities_are_of_the_model_or_of_the_draw(llm: LLM) -> None:
    base = SamplingParams(
        max_tokens=8, seed=5, logprobs=-1, temperature=0.6, top_k=7, presence_penalty=1.0, logit_bias={50: 3.0}
    )
    raw, processed, mixed = llm.generate(
        ["x", "x", "y"],
        [
            base,
            replace(base, logprobs_mode="processed"),
            SamplingParams(max_tokens=8, logprobs=2, temperature=0),
        ],
    )
    assert raw.token_ids == processed.token_ids
    assert isinstance(raw.logprobs, torch.Tensor)
    assert isinstance(processed.logprobs, torch.Tensor)
    for step in range(8):
        logits = raw.logprobs[step].to(torch.float64).numpy().copy()
        logits[50] += 3.0
        for token in set(raw.token_ids[:step]):
            logits[token] -= 1.0
        order = np.argsort(-logits, kind="stable")[:7]
        kept = logits[order] / 0.6
        wanted = dict(zip(order.tolist(), (kept - np.log(np.exp(kept).sum())).tolist(), strict=True))
        got = processed.logprobs[step]
        assert set(torch.nonzero(got > -torch.inf).flatten().tolist()) == set(wanted)
        for token, value in wanted.items():
            assert float(got[token]) == pytest.approx(value, abs=1e-4)
    assert isinstance(mixed.logprobs, list)
    assert all(len(item.top) == 2 for item in mixed.logprobs)


def test_processed_log_probabilities_show_only_what_is_left(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, logprobs=5, logprobs_mode="processed", top_k=2)
    completion = llm.generate("x", params)[0]
    assert isinstance(completion.logprobs, list)
    for item in completion.logprobs:
        assert len(item.top) == 2
        assert sum(map(math.exp, item.top.values())) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be a number, 0 to"),
        ({"presence_penalty": 2.5}, "presence_penalty must be a number, -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a number, -2 to 2"),
        ({"min_tokens": -1}, "min_tokens must be an integer, at least 0"),
        ({"min_tokens": 20}, "min_tokens=20 must be at most max_tokens=16"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping"),
        ({"logit_bias": {12: 1}}, "each token of logit_bias must be an integer, 0 to 11"),
        ({"logit_bias": {"x": 1}}, "each token of logit_bias must be an integer"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 must be a number, -100 to 100"),
        ({"bad_words": "word"}, "bad_words must be a list of texts"),
        ({"bad_words": ["word"]}, "bad_words need a tokenizer.json"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids must be lists of at least one"),
        ({"bad_words_token_ids": [[12]]}, "each of bad_words_token_ids must be an integer, 0 to 11"),
        ({"bad_words_token_ids": [[n] for n in range(12)]}, "nothing is left to write"),
    ],
)
def test_what_cannot_be_honoured_is_told(changes: dict[str, object], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        rules_of(SamplingParams(**changes), [3])  # type: ignore[arg-type]


def test_an_empty_bad_word_is_told() -> None:
    with pytest.raises(RequestError, match="at least one character"):
        make_rules(SamplingParams(bad_words=[""]), [3], (1,), 512, TOKENIZER)
