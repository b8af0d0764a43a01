"""Drafts never change the text: seeds, stops, limits, penalties, log-probs, batches, loads."""

import dataclasses

import pytest
import torch

from deepspark.audit import World
from deepspark.audit.engine import WorldSource, WorldTarget
from deepspark.cost import CostTable
from deepspark.decode import Generation, GenerationSettings, SpeculativeDecoder
from deepspark.drafter import DrafterSettings, DraftRequest, DSparkDrafter
from deepspark.errors import ConfigError, InputError
from deepspark.parking import Parking
from deepspark.penalties import Penalties
from deepspark.policy import AlgorithmOne, Asynchronous, Fixed, Off, Policy, SurvivalThreshold, Threshold
from deepspark.proposing import Blocks, Chooser, Drafts, Law
from deepspark.transform import SamplingSettings
from deepspark.verify import Rule

VOCAB, WIDTH = 5, 4
COST = CostTable([1, 1000], [1.0, 51.0], mode="linear", draft_sizes=[1], draft_ms=[0.1])
POLICIES: list[Policy] = [
    Off(),
    Fixed(1),
    Fixed(WIDTH),
    Threshold(0.4),
    SurvivalThreshold(0.3),
    AlgorithmOne(),
    Asynchronous(lag=1),
    Asynchronous(lag=2),
]
MIXED = [
    GenerationSettings(seed=11, max_new=20, logprobs=2),
    GenerationSettings(seed=12, max_new=17, sampling=SamplingSettings(temperature=0.7, top_p=0.9), logprobs=0),
    GenerationSettings(
        seed=13, max_new=9, penalties=Penalties(repetition=1.3, presence=0.4, frequency=0.2), logprobs=0
    ),
    GenerationSettings(seed=14, max_new=30, stop=frozenset({3}), logprobs=0),
    GenerationSettings(seed=15, max_new=30, stop=frozenset({2}), min_tokens=12, logprobs=0),
    GenerationSettings(seed=16, max_new=12, sampling=SamplingSettings(temperature=0.0), logprobs=0),
    GenerationSettings(seed=17, max_new=1),
    GenerationSettings(seed=18, max_new=14, sampling=SamplingSettings(ban=(0, 4)), logprobs=0),
]
PROMPTS = [[1], [2, 3], [4, 0, 1], [2], [1, 1], [3, 2], [0], [4]]


def decode(
    policy: Policy | None, rule: Rule, requests: list[int] | None = None, parking: Parking | None = None
) -> list[Generation]:
    """Decode some of the mixed requests; policy None decodes plainly."""
    chosen = list(range(len(MIXED))) if requests is None else requests
    target = WorldTarget(World(VOCAB, 7, agreement=0.6))
    drafter = None
    if policy is not None:
        source = WorldSource(target, WIDTH)
        drafter = DSparkDrafter(source, COST, len(chosen), DrafterSettings(rule=rule, policy=policy, parking=parking))
    decoder = SpeculativeDecoder(target, drafter, rule=rule)
    return decoder.generate([PROMPTS[i] for i in chosen], [MIXED[i] for i in chosen])


def texts(results: list[Generation]) -> list[tuple[list[int], str | None]]:
    return [(each.tokens, each.finish) for each in results]


@pytest.mark.parametrize("rule", ["match", "greedy"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_text_and_logprobs_are_those_of_plain_decoding(policy: Policy, rule: Rule) -> None:
    plain, drafted = decode(None, rule), decode(policy, rule)
    assert texts(drafted) == texts(plain)
    for a, b in zip(plain, drafted, strict=True):
        assert b.logprobs == pytest.approx(a.logprobs, abs=1e-12)
    if not isinstance(policy, Off):
        assert sum(len(each.accepted_lengths) for each in drafted) < sum(len(each.accepted_lengths) for each in plain)


def test_match_text_does_not_depend_on_the_batch() -> None:
    together = texts(decode(Asynchronous(), "match"))
    for i in range(len(MIXED)):
        assert texts(decode(Asynchronous(), "match", [i])) == [together[i]]
    assert texts(decode(AlgorithmOne(), "match", [5, 2, 0])) == [together[5], together[2], together[0]]


@pytest.mark.parametrize("rule", ["chain", "coupled", "block"])
def test_sampling_rules_respect_stops_limits_and_bans(rule: Rule) -> None:
    for policy in (Fixed(WIDTH), Asynchronous(lag=1)):
        for settings, result in zip(MIXED, decode(policy, rule), strict=True):
            assert len(result.tokens) <= settings.max_new
            assert not set(result.tokens) & set(settings.sampling.ban)
            stopped = [i for i, token in enumerate(result.tokens) if token in settings.stop]
            assert stopped == ([len(result.tokens) - 1] if result.finish == "stop" else [])
            if result.finish == "stop":
                assert len(result.tokens) > settings.min_tokens
            if settings.logprobs is not None:
                assert len(result.logprobs) == len(result.tokens)


@pytest.mark.parametrize("rule", ["chain", "coupled", "block"])
def test_a_greedy_request_among_sampled_ones_is_greedy(rule: Rule) -> None:
    """Temperature 0 is a one-hot law: the sampling rules then emit argmax, whatever the draft."""
    assert texts(decode(Fixed(WIDTH), rule))[5] == texts(decode(None, "greedy"))[5]


@pytest.mark.parametrize("rule", ["chain", "coupled", "block", "match", "greedy"])
def test_parking_in_the_middle_changes_no_rule(rule: Rule) -> None:
    eager = Parking(patience=0.01, first_probe=1, margin=0.5)
    results = decode(Asynchronous(lag=1), rule, parking=eager)
    if rule in ("match", "greedy"):
        assert texts(results) == texts(decode(None, rule))
    assert all(each.finish for each in results)


def test_the_same_call_gives_the_same_text() -> None:
    for rule in ("chain", "coupled", "block"):
        assert texts(decode(Asynchronous(), rule)) == texts(decode(Asynchronous(), rule))


def test_telemetry_and_survivals_come_with_it() -> None:
    target = WorldTarget(World(VOCAB, 7, agreement=0.9))
    drafter = DSparkDrafter(WorldSource(target, WIDTH), COST, 2, DrafterSettings(policy=Fixed(WIDTH), parking=None))
    settings = [dataclasses.replace(MIXED[0], seed=seed, max_new=40) for seed in (1, 2)]
    results = SpeculativeDecoder(target, drafter).generate([[1], [2]], settings)
    for slot, result in enumerate(results):
        report = drafter.telemetry.report(slot)
        assert report.steps == len(result.accepted_lengths) - 1
        assert report.accepted + report.steps == sum(result.accepted_lengths[1:])
        assert ((report.survival >= 0) & (report.survival <= 1)).all()
    total = drafter.telemetry.report()
    assert WIDTH * total.steps >= total.proposed >= total.verified >= total.accepted > 0


class SilentSource(WorldSource):
    """A drafter without a confidence head, as DFlash is."""

    def draft(self, block: Blocks, law: Law, choose: Chooser) -> Drafts:
        drafts = super().draft(block, law, choose)
        return dataclasses.replace(drafts, confidence_logits=None)


def test_a_drafter_without_confidences_is_scheduled_by_what_was_realised() -> None:
    target = WorldTarget(World(VOCAB, 7, agreement=0.95))
    cost = CostTable([1, 1000], [1.0, 101.0], mode="linear")
    drafter = DSparkDrafter(SilentSource(target, WIDTH), cost, 4, DrafterSettings(rule="match"))
    settings = [dataclasses.replace(MIXED[0], seed=seed, max_new=60) for seed in range(4)]
    results = SpeculativeDecoder(target, drafter).generate([[1]] * 4, settings)
    plain = SpeculativeDecoder(target, None, rule="match").generate([[1]] * 4, settings)
    assert texts(results) == texts(plain)
    assert drafter.telemetry.report().verified > 0


def test_errors_speak() -> None:
    target = WorldTarget(World(VOCAB, 1))
    with pytest.raises(InputError, match="one GenerationSettings a prompt"):
        SpeculativeDecoder(target, None).generate([[1]], [])
    with pytest.raises(InputError, match="no empty prompt"):
        SpeculativeDecoder(target, None).generate([[]], MIXED[:1])
    drafter = DSparkDrafter(WorldSource(target, 2), COST, 1, DrafterSettings(policy=Fixed(2), parking=None))
    target.begin(0)
    target.forward([0], [[1]], [0])
    proposal = drafter.propose([DraftRequest(slot=0, anchor=2, position=1, seed=3, limit=2)])
    with pytest.raises(InputError, match="3 rows, got laws of 1"):
        drafter.verify(torch.ones(1, VOCAB), proposal)
    with pytest.raises(ConfigError):
        DrafterSettings(policy=Fixed(0))
