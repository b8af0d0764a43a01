"""Drafts change when tokens come, never which: with deepspark's drafter over the real draft stages of a tiny model.

"match" and "greedy" give the tokens of an engine without drafts; "chain" and "block" give its law, which a test over a
vocabulary small enough to enumerate holds them to.  In float64 and without quantisers: the logic alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, override

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.batch_builder import Ahead
from deepinfer.engine.block_pool import Hit
from deepinfer.engine.config import DraftRule, EngineConfig
from deepinfer.engine.constraint import Constraint
from deepinfer.engine.draft_backbone import BlockRows, StagesBackbone
from deepinfer.engine.draft_report import RESTED, DraftReport
from deepinfer.engine.draft_rules import DraftRules
from deepinfer.engine.engine import Engine
from deepinfer.engine.plan import Plan
from deepinfer.engine.request import Progress, Request, SamplingParams, TokenLogprobs
from deepinfer.engine.sequence import Integers
from deepinfer.engine.speculation import Drafting, Speculation
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import DeepSeek, ModelOutput
from deepinfer.model.draft import DraftHeads, DraftStages
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.tiny import write_tiny
from deepinfer.model.weights import Weights
from deepspark.audit import audit_against_law, first_tokens
from deepspark.audit.world import World, target_law
from deepspark.policy import AlgorithmOne, Asynchronous, Fixed, Policy, SurvivalThreshold, Threshold
from deepspark.serving import ServingDrafter

from .checker import EXAMPLES, drain, engine_config, small_config, small_ops, tokens_of

PRECISION = Precision(torch.float64, round_inputs=False, cache="model")
POLICIES: list[Policy] = [
    Fixed(5),
    Fixed(2),
    Threshold(0.5),
    SurvivalThreshold(0.2),
    AlgorithmOne(),
    Asynchronous(lag=1),
    Asynchronous(lag=2),
]


@dataclass(frozen=True)
class Loaded:
    model_config: ModelConfig
    model: DeepSeek
    stages: DraftStages
    ops: Ops
    tokenizer: Tokenizer | None

    def engine(self, config: EngineConfig, drafting: Drafting | None = None) -> Engine:
        parts = (self.model_config, self.model, self.ops, CpuAccelerator(), self.tokenizer)
        return Engine(config, *parts, drafting=drafting)

    def config(self, **changes: object) -> EngineConfig:
        return engine_config(precision=PRECISION, decoder_replay=self.model_config.window + 12, **changes)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("tiny") / "v41"
    write_tiny(folder, family="deepseek_v41")
    checkpoint, accelerator = Checkpoint(folder), CpuAccelerator()
    ops = accelerator.ops(PRECISION)
    weights = Weights(checkpoint, ops, accelerator)
    model = DeepSeek(checkpoint.config, weights, ops)
    return Loaded(checkpoint.config, model, DraftStages(model, weights), ops, checkpoint.tokenizer)


class Helped:
    """The real stages, with a push towards what the texts say: a random model's own drafts are seldom right."""

    def __init__(self, backbone: StagesBackbone, texts: Sequence[Sequence[int]], wrong: float) -> None:
        self._backbone = backbone
        self._texts = texts
        self._wrong = wrong
        self._generator = np.random.default_rng(0)

    @property
    def block_size(self) -> int:
        return self._backbone.block_size

    @property
    def vocab_size(self) -> int:
        return self._backbone.vocab_size

    def draft_block(self, anchors: Tensor, positions: Tensor, slots: Tensor) -> BlockRows:
        rows = self._backbone.draft_block(anchors, positions, slots)
        base = rows.base.clone()
        for row, (anchor, position) in enumerate(zip(anchors.tolist(), positions.tolist(), strict=True)):
            known = [text for text in self._texts if len(text) > position and text[position] == anchor]
            for place, token in enumerate(known[0][position + 1 : position + 1 + self.block_size] if known else ()):
                if self._generator.random() >= self._wrong:
                    base[row, place, token] += 60
        return BlockRows(rows.hidden, rows.normed, base)


class Resting(ServingDrafter):
    """A drafter that rests for some steps after every few that it was asked in, as a parked one does."""

    asked, left, works, rests = 0, 0, 3, 7

    @property
    @override
    def rests_for(self) -> int:
        return self.left

    @override
    def rest(self, requests: int) -> bool:
        self.left = max(self.left - 1, 0)
        return self.left > 0

    @override
    def propose(self, rows: Any, room: int) -> tuple[Integers, Integers] | None:
        self.asked += 1
        if self.asked % self.works == 0:
            self.left = self.rests
            return None
        return super().propose(rows, room)


def helped(
    tiny: Loaded,
    rule: DraftRule,
    policy: Policy,
    texts: Sequence[Sequence[int]] = (),
    wrong: float = 0.3,
    kind: type[ServingDrafter] = ServingDrafter,
) -> Drafting:
    """Drafts of deepspark by `policy`, with made-up times of a target that minds its rows."""

    def made(backbone: StagesBackbone, heads: DraftHeads, **choices: Any) -> ServingDrafter:
        drafter = kind(Helped(backbone, texts, wrong), heads, policy=policy, **choices)
        drafter.set_costs({1: 1.0, 8: 1.2, 16: 3.0, 64: 9.0}, {1: 0.1, 8: 0.2})
        return drafter

    return Drafting(tiny.stages, made, rule, mode="on")


def run(engine: Engine, requests: Sequence[Request], arrivals: Sequence[int]) -> list[list[Progress]]:
    """Add request number i before step arrivals[i]; returns what each gained."""
    gained: dict[int, list[Progress]] = {}
    ids: dict[int, int] = {}
    step = 0
    while len(ids) < len(requests) or engine.has_work:
        for number, when in enumerate(arrivals):
            if when == step:
                ids[number] = engine.add(requests[number])
        for progress in engine.step():
            gained.setdefault(progress.request_id, []).append(progress)
        engine.scheduler.check()
        step += 1
    return [gained[ids[number]] for number in range(len(requests))]


RULES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 0.8, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.none() | st.dictionaries(st.integers(30, 255), st.sampled_from([-100.0, 4.0]), max_size=9),
        "bad_words_token_ids": st.none() | st.just([[40], *([a, b] for a in range(60, 80) for b in range(60, 200, 3))]),
        "min_tokens": st.integers(0, 1),
    }
)
SHARED = np.random.default_rng(7).integers(30, 255, 160)
"""How every long prompt begins: a block that all share, and more."""
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-f]{3,9}( [0-9]{2}){0,3}"},
    {"regex": "(ab|ba|c)*d", "thinking": True},
    {"json_schema": {"type": "object", "properties": {"a": {"enum": ["xyz", 12]}}, "required": ["a"]}},
]


@st.composite
def request_lists(draw: st.DrawFn) -> list[Request]:
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    lengths = draw(st.lists(st.one_of(st.integers(1, 30), st.integers(100, 220)), min_size=1, max_size=5))
    found = []
    for index, length in enumerate(lengths):
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_k=draw(st.sampled_from([0, 0, 5])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
            max_tokens=draw(st.integers(1, 14)),
            stop_token_ids=generator.integers(0, 259, draw(st.sampled_from([0, 0, 60]))).tolist(),
            stop=draw(st.sampled_from([None, None, ["e", "qu"]])),
            logprobs=draw(st.sampled_from([None, None, 2])),
            logprobs_mode=draw(st.sampled_from(["raw", "processed"])),
            ignore_eos=True,
        )
        if draw(st.booleans()):
            params = replace(params, **draw(RULES))
        if draw(st.sampled_from([True, False, False])):
            params = replace(params, ignore_eos=False, structured=Constraint(**draw(st.sampled_from(CONSTRAINTS))))
        prompt = generator.integers(30, 255, length)
        if length >= 100:
            prompt[: len(SHARED)] = SHARED[:length]
        found.append(Request(prompt.tolist(), params, index=index))
    return found


@pytest.mark.parametrize("rule", ["match", "greedy"])
@settings(max_examples=EXAMPLES // 8)
@given(data=st.data())
def test_drafts_change_no_token(tiny: Loaded, rule: DraftRule, data: st.DataObject) -> None:
    requests = data.draw(request_lists())
    plain = run(tiny.engine(tiny.config(prefix_cache="off")), requests, [0] * len(requests))
    texts = [[*r.prompt_token_ids, *tokens_of(parts)] for r, parts in zip(requests, plain, strict=True)]
    policy, wrong = data.draw(st.sampled_from(POLICIES)), data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    starved = {"blocks": 4, "max_model_len": 300, "window_blocks": data.draw(st.integers(4, 9))}
    config = tiny.config(
        max_num_batched_tokens=data.draw(st.sampled_from([8, 11, 40, 512])),
        max_num_seqs=data.draw(st.integers(1, 6)),
        overlap=data.draw(st.booleans()),
        **data.draw(st.sampled_from([{}, starved])),
    )
    arrivals = [data.draw(st.sampled_from([0, 0, 1, 4, 12, 30])) for _ in requests]
    kind = data.draw(st.sampled_from([ServingDrafter, Resting]))
    drafted = run(tiny.engine(config, helped(tiny, rule, policy, texts, wrong, kind)), requests, arrivals)
    for alone, parts in zip(plain, drafted, strict=True):
        assert tokens_of(parts) == tokens_of(alone)
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (alone[-1].finish_reason, alone[-1].stop_reason)
        assert "".join(part.text for part in parts) == "".join(part.text for part in alone)
        for found, wanted in zip(_logprobs(parts), _logprobs(alone), strict=True):
            assert found.token_id == wanted.token_id
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert list(found.top) == list(wanted.top)


@pytest.mark.parametrize("rule", ["match", "greedy"])
def test_drafts_change_no_text_behind_hits_and_preemptions(tiny: Loaded, rule: DraftRule) -> None:
    """Three that share a first part and outgrow four blocks; two of them end by stop strings, amid drafts."""
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    own = np.random.default_rng(3).integers(30, 255, (3, 40))
    requests = [Request([*SHARED.tolist(), *tail.tolist()], params) for tail in own]
    cold = tiny.config(prefix_cache="off")
    for place in (0, 2):
        text = "".join(part.text for part in run(tiny.engine(cold), [requests[place]], [0])[0])
        stop = next(
            text[at : at + 3] for at in range(len(text) * 3 // 4, len(text)) if text.index(text[at : at + 3]) == at
        )
        requests[place] = replace(requests[place], params=replace(params, stop=[stop]))
    alone = [run(tiny.engine(cold), [request], [0])[0] for request in requests]
    texts = [[*r.prompt_token_ids, *tokens_of(parts)] for r, parts in zip(requests, alone, strict=True)]
    config = tiny.config(blocks=4, window_blocks=10, max_model_len=320, max_num_seqs=3)
    engine = tiny.engine(config, helped(tiny, rule, Fixed(5), texts, 0.2))
    seated: list[int] = []
    resume = engine.table.resume

    def noted(row: int, hit: Hit) -> None:
        seated.append(hit.start)
        resume(row, hit)

    engine.table.resume = noted  # type: ignore[method-assign]
    drafted = run(engine, requests, [0, 3, 4])
    assert len(seated) > len(requests), "nobody was preempted"
    assert max(seated) > 0, "nobody went on from what was there"
    for parts, wanted in zip(drafted, alone, strict=True):
        assert tokens_of(parts) == tokens_of(wanted)
        assert "".join(part.text for part in parts) == "".join(part.text for part in wanted)
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (wanted[-1].finish_reason, wanted[-1].stop_reason)
        assert any(part.draft_step is not None and part.draft_step.accepted for part in parts)
    assert [parts[-1].finish_reason for parts in drafted] == ["stop", "length", "stop"]
    assert engine.scheduler.blocks.free == config.blocks


def _logprobs(parts: Sequence[Progress]) -> list[TokenLogprobs]:
    return [item for part in parts for item in part.logprobs or () if isinstance(item, TokenLogprobs)]


def test_right_drafts_save_steps_and_are_reported(tiny: Loaded) -> None:
    request = Request(list(range(40, 70)), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    plain = run(tiny.engine(tiny.config()), [request], [0])[0]
    text = [*request.prompt_token_ids, *tokens_of(plain)]
    parts = run(tiny.engine(tiny.config(), helped(tiny, "match", Fixed(5), [text], wrong=0.0)), [request], [0])[0]
    assert tokens_of(parts) == tokens_of(plain)
    assert len(parts) == 1 + 59 // 6 + 1
    steps = [part.draft_step for part in parts[1:]]
    assert all(
        step is not None and step.accepted == step.verified == len(part.token_ids) - 1
        for step, part in zip(steps, parts[1:], strict=True)
    )


def resting(tiny: Loaded, *, overlap: bool) -> tuple[Engine, list[Request]]:
    """An engine whose drafter works and rests in turns, without help, and requests that run beside one another."""
    generator = np.random.default_rng(5)
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    requests = [Request(generator.integers(30, 255, length).tolist(), params, index=length) for length in (110, 3, 40)]
    config = tiny.config(overlap=overlap)
    drafting = helped(tiny, "match", Fixed(5), [], 1.0, Resting)
    return tiny.engine(config, drafting), requests


def test_context_that_was_held_back_gives_the_same_drafts(tiny: Loaded) -> None:
    """Steps and what was accepted in each: held for several steps, at the ends of rests, over borders of blocks."""
    found = []
    for hold in (True, False):
        engine, requests = resting(tiny, overlap=False)
        assert isinstance(engine.sampler, Speculation)
        engine.sampler._may_hold = hold
        parts = run(engine, requests, [0, 2, 9])
        found.append([[(part.token_ids, part.draft_step) for part in each] for each in parts])
    assert found[0] == found[1]
    assert sum(step is not None and step.accepted > 0 for each in found[0] for _, step in each) > 3


def test_steps_overlap_while_drafting_rests(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = resting(tiny, overlap=True)
    plain = run(tiny.engine(tiny.config()), requests[:1], [0])[0]
    launched: list[tuple[bool, bool]] = []
    launch = Engine._launch

    def watched(self: Engine, plan: Plan, ahead: Ahead | None = None) -> Any:
        launched.append((ahead is not None, plan.drafts is not None))
        return launch(self, plan, ahead)

    monkeypatch.setattr(Engine, "_launch", watched)
    parts = run(engine, requests[:1], [0])[0]
    assert tokens_of(parts) == tokens_of(plain)
    assert (True, True) not in launched
    assert launched.count((True, False)) > len(launched) // 3
    assert launched.count((False, True)) > len(launched) // 10
    report = DraftReport.of([part.draft_step for part in parts])
    assert report.rested >= launched.count((True, False))
    assert report.steps == report.rested + sum(part.draft_step is not RESTED for part in parts)


@pytest.mark.parametrize("rule", ["match", "greedy", "chain", "block"])
@pytest.mark.parametrize(
    "ruled",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.3},
        {"bad_words_token_ids": [[a, b] for a in range(30, 255) for b in range(a % 5, 255, 5)]},
        {"structured": {"regex": "([a-d]{4} ){9}"}, "ignore_eos": False},
        {"structured": {"regex": "([a-d]{4} ){9}", "thinking": True}, "min_tokens": 30, "ignore_eos": False},
    ],
    ids=["penalties", "bad words", "constraint", "reasoning"],
)
def test_right_drafts_save_steps_under_rules(tiny: Loaded, rule: DraftRule, ruled: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True} | ruled)
    request = Request(list(range(40, 70)), params)
    plain = run(tiny.engine(tiny.config()), [request], [0])[0]
    text = [*request.prompt_token_ids, *tokens_of(plain)]
    parts = run(tiny.engine(tiny.config(), helped(tiny, rule, Fixed(5), [text], wrong=0.0)), [request], [0])[0]
    assert tokens_of(parts) == tokens_of(plain)
    assert len(parts) <= len(tokens_of(plain)) // 6 + 2


def test_no_row_is_spent_behind_a_draft_that_the_grammar_forbids(tiny: Loaded) -> None:
    """The drafter's text breaks the pattern at every fifth letter: that draft is judged where its law counts."""
    given = replace(SamplingParams(temperature=0, max_tokens=30), structured={"regex": "(abcd|efgh)*"})
    request = Request(list(range(40, 70)), given)
    assert tiny.tokenizer is not None
    plain = run(tiny.engine(tiny.config()), [request], [0])[0]
    letter = tiny.tokenizer.token_to_id("z")
    text = [*request.prompt_token_ids, *tokens_of(plain)]
    wrong = [letter if place >= 30 and (place - 30) % 5 == 4 else token for place, token in enumerate(text)]
    for rule, most in (("match", 4), ("chain", 5)):
        parts = run(tiny.engine(tiny.config(), helped(tiny, rule, Fixed(5), [wrong], wrong=0.0)), [request], [0])[0]
        assert tokens_of(parts) == tokens_of(plain)
        verified = [part.draft_step.verified for part in parts if part.draft_step is not None]
        assert verified
        assert max(verified) <= most


WIDTH, VOCAB = 3, 5


def make_letters() -> Tokenizer:
    """A tokenizer of VOCAB tokens: a, end, b, c, d."""
    letters = Tokenizer(models.BPE({"a": 0, "<end>": 1, "b": 2, "c": 3, "d": 4}, []))
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens(["<end>"])
    return letters


class WorldModel:
    """A target whose law is a world's: it reads the last two tokens."""

    def __init__(self, world: World) -> None:
        self._world = world

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        pairs = torch.stack((batch.history[:, 0], batch.token_ids), 1).index_select(0, batch.logit_rows).tolist()
        return ModelOutput(torch.from_numpy(np.log([self._world.target(tuple(pair)) for pair in pairs])), None)


class RandomBackbone:
    """Draft rows that depend on the anchor alone."""

    block_size, vocab_size = WIDTH, VOCAB

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn((VOCAB, WIDTH, 4), generator=generator, dtype=torch.float64)
        self.base = torch.randn((VOCAB, WIDTH, VOCAB), generator=generator, dtype=torch.float64)
        self.heads = DraftHeads(
            markov_embed=torch.randn((VOCAB, 3), generator=generator, dtype=torch.float64),
            markov_head=torch.randn((VOCAB, 3), generator=generator, dtype=torch.float64),
            confidence=2 * torch.randn((1, 7), generator=generator, dtype=torch.float64),
        )

    def draft_block(self, anchors: Tensor, positions: Tensor, slots: Tensor) -> BlockRows:
        return BlockRows(self.hidden[anchors], self.hidden[anchors], self.base[anchors])


class WrongLaws(ServingDrafter):
    """A drafter that remembers other laws than it drew from."""

    @override
    def _keep_laws(self, states: Integers, Q: Tensor) -> None:
        super()._keep_laws(states, torch.full_like(Q, 1 / VOCAB))


LETTERS = make_letters()
"""A tokenizer of this vocabulary: a, end, b, c, d."""

PHRASES = ("ab", "ac", "bc", "bd", "cd", "ca", "da", "db")
RULED = [
    SamplingParams(
        presence_penalty=0.8, frequency_penalty=0.4, logit_bias={2: 0.7}, bad_words_token_ids=[[1, 3], [4, 4]]
    ),
    SamplingParams(structured={"regex": f"({'|'.join(PHRASES)}){{20}}"}),
]


def sampled(
    world: World,
    rule: DraftRule,
    policy: Policy,
    kind: type[ServingDrafter] = ServingDrafter,
    params: SamplingParams = SamplingParams(ignore_eos=True),  # noqa: B008 - frozen
) -> list[tuple[int, ...]]:
    """The first four tokens of 6000 requests that run through one engine in batches of 64."""
    backbone = RandomBackbone()

    def made(_: object, heads: DraftHeads, **choices: Any) -> ServingDrafter:
        drafter = kind(backbone, heads, policy=policy, **choices)
        drafter.set_costs({1: 1.0, 64: 1.1, 96: 3.0, 256: 6.0}, {1: 0.01})
        return drafter

    stages: Any = SimpleNamespace(draft=SimpleNamespace(block_size=WIDTH), heads=backbone.heads)
    model = small_config(vocab_size=VOCAB)
    config = engine_config(max_num_seqs=64, blocks=64, window_blocks=200)
    drafting = Drafting(stages, made, rule, mode="on")
    engine = Engine(config, model, WorldModel(world), small_ops(), CpuAccelerator(), LETTERS, drafting=drafting)
    ids = [engine.add(Request([3, 0], replace(params, max_tokens=4, seed=seed))) for seed in range(6000)]
    gained = drain(engine)
    return [tokens_of(gained[number]) for number in ids]


def ruled_law(world: World, params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first tokens behind (3, 0), by the definitions of penalties and bans, and of the phrases."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = {each: ruled_row(world.target((3, 0, *each)), params, each) for each in law}
        law = {
            (*each, token): mass * float(rows[each][token])
            for each, mass in law.items()
            for token in range(VOCAB)
            if rows[each][token] > 0
        }
    return law


def ruled_row(law: NDArray[np.float64], params: SamplingParams, output: tuple[int, ...]) -> NDArray[np.float64]:
    logits = np.log(law)
    for token in range(VOCAB):
        logits[token] -= params.presence_penalty * (token in output) + params.frequency_penalty * output.count(token)
        logits[token] += (params.logit_bias or {}).get(token, 0.0)
        for word in params.bad_words_token_ids or ():
            if (*output, token)[-len(word) :] == tuple(word):
                logits[token] = -np.inf
        text = "".join("a-bcd"[each] for each in (*output, token))
        if params.structured is not None and not may_begin(text):
            logits[token] = -np.inf
    weights: NDArray[np.float64] = np.exp(logits - logits.max())
    return weights / weights.sum()


def may_begin(text: str) -> bool:
    """Whether phrases, one behind the other, may begin with `text`."""
    return text == "" or any(
        phrase.startswith(text) or (text.startswith(phrase) and may_begin(text[len(phrase) :])) for phrase in PHRASES
    )


@pytest.mark.parametrize(
    "policy", [Fixed(3), Asynchronous(lag=1), Threshold(0.5)], ids=["fixed", "budget", "threshold"]
)
@pytest.mark.parametrize("rule", ["chain", "block"])
def test_the_law_of_the_text_is_the_target_law(rule: DraftRule, policy: Policy) -> None:
    world = World(VOCAB, seed=3)
    samples = sampled(world, rule, policy)
    verdict = audit_against_law(samples, target_law(world, (3, 0), 4), first_tokens(3, VOCAB))
    assert verdict.lossless, verdict


@pytest.mark.parametrize("params", RULED, ids=["penalties", "masks"])
@pytest.mark.parametrize(("rule", "policy"), [("chain", Fixed(3)), ("block", Asynchronous(lag=1))])
def test_the_law_under_rules_is_that_without_drafts(rule: DraftRule, policy: Policy, params: SamplingParams) -> None:
    world = World(VOCAB, seed=3)
    samples = sampled(world, rule, policy, params=replace(params, ignore_eos=params.structured is None))
    verdict = audit_against_law(samples, ruled_law(world, params, 4), first_tokens(3, VOCAB))
    assert verdict.lossless, verdict


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_the_audit_sees_a_drafter_that_remembers_wrong_laws(rule: DraftRule) -> None:
    world = World(VOCAB, seed=3)
    samples = sampled(world, rule, Fixed(3), WrongLaws)
    assert not audit_against_law(samples, target_law(world, (3, 0), 4), first_tokens(3, VOCAB)).lossless


def test_the_audit_sees_a_cut_before_a_forbidden_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out instead of judged, a forbidden draft is not made up for: the wrong cut of DSpark's section 3.6."""
    made = DraftRules.__init__
    monkeypatch.setattr(DraftRules, "__init__", lambda rules, *parts, **_: made(rules, *parts, reads_laws=False))
    world = World(VOCAB, seed=3)
    samples = sampled(world, "chain", Fixed(3), params=RULED[1])
    assert not audit_against_law(samples, ruled_law(world, RULED[1], 4), first_tokens(3, VOCAB)).lossless
