"""Sampling follows the distribution that is asked for, and each row depends on its own request alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.accelerator.ops.sampling import SamplingRows, derive_seed, filter_logits, gumbel_noise, law_of
from deepinfer.engine.request import Request, SamplingParams

from .checker import EXAMPLES, checked_engine, drain, engine_config, small_config, small_ops, tokens_of

OPS = small_ops()
V41 = small_config()
NOISE = [
    [-0.8676332692268732, 0.04009094624727789, -0.5529754279237172],
    [-1.1460554517784831, 1.619575591561423, 0.6294964154673112],
]
SEEDS = [5197578548964807871, 7675656394906785483, 8343941530488821525]


def rows(params: list[SamplingParams], seeds: list[int], positions: list[int]) -> SamplingRows:
    def numbers(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return SamplingRows(
        temperature=numbers([p.temperature for p in params]),
        top_p=numbers([p.top_p for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        min_p=numbers([p.min_p for p in params]),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
        filtered=True,
    )


def by_hand(logits: list[float], params: SamplingParams) -> list[float]:
    """The filtered distribution, one step of the definition after the other."""
    scaled = torch.tensor(logits, dtype=torch.float64) / params.temperature
    order = sorted(range(len(logits)), key=lambda v: (-float(scaled[v]), v))
    kept = order[: params.top_k] if params.top_k else order
    share = torch.softmax(scaled[kept], 0).tolist()
    before = [0.0, *itertools.accumulate(share)]
    if params.top_p < 1:
        kept = [v for v, mass in zip(kept, before, strict=False) if mass < params.top_p]
    share = torch.softmax(scaled[kept], 0).tolist()
    kept = [v for v, mass in zip(kept, share, strict=True) if mass >= params.min_p * share[0]]
    result = [0.0] * len(logits)
    for v, mass in zip(kept, torch.softmax(scaled[kept], 0).tolist(), strict=True):
        result[v] = mass
    return result


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
)
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 10), min_size=10, max_size=10)


@given(data=st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=5))
def test_filters_are_what_they_say(data: list[tuple[list[float], SamplingParams]]) -> None:
    logits = torch.tensor([row for row, _ in data], dtype=torch.float64)
    params = [one for _, one in data]
    scaled = logits / torch.tensor([one.temperature for one in params], dtype=torch.float64).unsqueeze(1)
    filtered = torch.softmax(filter_logits(scaled, rows(params, [0] * len(data), [0] * len(data))), 1)
    wanted = torch.tensor([by_hand(row, one) for row, one in data], dtype=torch.float64)
    assert torch.allclose(filtered, wanted, atol=1e-12)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05)])
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 0.9, -2.0, 1.1])
    count = 40_000
    drawn = OPS.sample(logits.expand(count, -1), rows([params] * count, [7] * count, list(range(count))))
    share = torch.bincount(drawn, minlength=len(logits)).to(torch.float64) / count
    wanted = torch.tensor(by_hand(logits.tolist(), params), dtype=torch.float64)
    assert ((share - wanted).abs() < 5 * (wanted * (1 - wanted) / count).sqrt() + 1e-12).all()


def test_noise_is_gumbel_noise_and_rows_are_strangers() -> None:
    noise = gumbel_noise(torch.tensor([1, 1, 2]), 0, torch.tensor([5, 6, 5]), 50_000)
    assert torch.isfinite(noise).all()
    assert (noise.mean(1) - 0.5772156649).abs().max() < 0.03
    assert (noise.var(1) - torch.pi**2 / 6).abs().max() < 0.06
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.02
    other = gumbel_noise(torch.tensor([1]), 1, torch.tensor([5]), 50_000)
    assert torch.corrcoef(torch.cat([noise[:1], other]))[0, 1].abs() < 0.02


def test_noise_stays_the_same_from_version_to_version() -> None:
    """Outputs of seeded requests are a promise: these numbers must not change."""
    noise = gumbel_noise(torch.tensor([0, 2**63 - 1]), 0, torch.tensor([1, 1_000_000]), 3)
    assert noise.tolist() == [pytest.approx(row) for row in NOISE]
    assert [derive_seed(0, 0), derive_seed(0, 1), derive_seed(9, 0)] == SEEDS


@given(
    data=st.lists(st.tuples(LOGITS, PARAMS, st.integers(0, 2**63 - 1)), min_size=2, max_size=6), split=st.integers(1, 5)
)
def test_a_row_is_the_same_in_any_batch(data: list[tuple[list[float], SamplingParams, int]], split: int) -> None:
    logits = torch.tensor([row for row, _, _ in data])
    params, seeds = [one for _, one, _ in data], [seed for _, _, seed in data]
    places = list(range(len(data)))
    whole = OPS.sample(logits, rows(params, seeds, places)).tolist()
    cut = min(split, len(data) - 1)
    parts = [places[:cut], places[cut:]]
    again = [
        OPS.sample(logits[part], rows([params[i] for i in part], [seeds[i] for i in part], part)).tolist()
        for part in parts
    ]
    assert whole == [token for tokens in again for token in tokens]


def test_greedy_rows_take_the_lowest_of_equals_also_among_others() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0]])
    assert OPS.greedy(logits).tolist() == [1, 1]
    params = [SamplingParams(temperature=0, top_k=1), SamplingParams(temperature=1e-6)]
    assert OPS.sample(logits, rows(params, [1, 2], [3, 4])).tolist() == [1, 1]


@settings(max_examples=EXAMPLES // 10)
@given(order=st.permutations(range(5)), budget=st.integers(5, 90), blocks=st.integers(3, 8))
def test_a_seeded_request_writes_the_same_whatever_runs_beside_it(order: list[int], budget: int, blocks: int) -> None:
    requests = [
        Request([3 + i] * (20 * i + 1), SamplingParams(seed=i, max_tokens=12, top_k=20 * (i % 2)), index=i)
        for i in range(5)
    ]
    alone = []
    for request in requests:
        engine = checked_engine(engine_config(), V41)
        engine.add(request)
        alone.append(tokens_of(drain(engine)[0]))
    config = engine_config(max_num_batched_tokens=budget, max_num_seqs=5, blocks=blocks, max_model_len=300)
    engine = checked_engine(config, V41)
    ids = {place: engine.add(requests[place]) for place in order}
    gained = drain(engine)
    assert [tokens_of(gained[ids[place]]) for place in range(5)] == alone


def test_unseeded_requests_draw_from_the_engine_seed_and_their_index() -> None:
    def run(seed: int, index: int, own: int | None = None) -> tuple[int, ...]:
        engine = checked_engine(engine_config(seed=seed), V41)
        number = engine.add(Request([5, 6], SamplingParams(max_tokens=20, seed=own, ignore_eos=True), index=index))
        return tokens_of(drain(engine)[number])

    assert run(0, 0) == run(0, 0)
    assert len({run(0, 0), run(0, 1), run(1, 0)}) == 3
    assert run(0, 0, own=4) == run(3, 2, own=4)


@given(data=st.data())
def test_the_law_of_a_row_is_the_distribution_that_was_asked_for(data: st.DataObject) -> None:
    logits = data.draw(st.lists(st.integers(-30, 30).map(lambda n: n / 7), min_size=2, max_size=12))
    params = data.draw(st.one_of(PARAMS, st.just(SamplingParams(temperature=0))))
    found = law_of(torch.tensor([logits], dtype=torch.float64), rows([params], [0], [0]))[0]
    if params.temperature == 0:
        expected = [float(place == logits.index(max(logits))) for place in range(len(logits))]
    else:
        expected = by_hand(logits, params)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
