import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspark.audit.cells import outcomes
from deepspark.errors import ConfigError, InputError
from deepspark.verify import RULES, Kind, Noise, ReferenceKernels, Rows, Rule, draw, verify, verify_rows


def case(seed: int, requests: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Noise]:
    rng = np.random.default_rng(seed)
    P = torch.from_numpy(rng.dirichlet(np.ones(vocab), (requests, width + 1)))
    Q = torch.from_numpy(rng.dirichlet(np.ones(vocab), (requests, width)))
    x = torch.from_numpy(rng.integers(0, vocab, (requests, width)))
    ell = torch.from_numpy(rng.integers(0, width + 1, requests))
    gumbel = torch.from_numpy(rng.gumbel(size=(requests, width + 1, vocab)))
    noise = Noise(torch.from_numpy(rng.random((requests, width))), torch.from_numpy(rng.random(requests)), gumbel)
    return P, Q, x, ell, noise


def pick(noise: Noise, row: int) -> Noise:
    assert noise.accept is not None
    assert noise.extra is not None
    assert noise.match is not None
    return Noise(noise.accept[row : row + 1], noise.extra[row : row + 1], noise.match[row : row + 1])


@given(st.integers(0, 10**6), st.sampled_from(RULES), st.integers(1, 5), st.integers(2, 6))
def test_a_batch_is_its_requests(seed: int, rule: Rule, width: int, vocab: int) -> None:
    P, Q, x, ell, noise = case(seed, 4, width, vocab)
    together = verify(P, Q, x, ell, noise, rule)
    for row in range(4):
        cut = slice(row, row + 1)
        alone = verify(P[cut], Q[cut], x[cut], ell[cut], pick(noise, row), rule)
        assert int(alone.accepted[0]) == int(together.accepted[row])
        assert int(alone.token[0]) == int(together.token[row])
        assert int(alone.kind[0]) == int(together.kind[row])


@given(st.integers(0, 10**6), st.sampled_from(RULES))
def test_flat_rows_and_pool_slots_change_nothing(seed: int, rule: Rule) -> None:
    P, Q, x, ell, noise = case(seed, 3, 4, 5)
    padded = verify(P, Q, x, ell, noise, rule)
    counts = ell + 1
    flat = torch.cat([P[r, : counts[r]] for r in range(3)])
    pool = torch.zeros(7, 4, 5, dtype=P.dtype)
    slots = torch.tensor([5, 1, 3])
    pool[slots] = Q
    rows = Rows(flat, counts.cumsum(0) - counts, ell, x, pool, slots)
    assert noise.match is not None
    numbers = Noise(noise.accept, noise.extra, torch.cat([noise.match[r, : counts[r]] for r in range(3)]))
    ragged = verify_rows(rows, numbers, rule)
    assert ragged.emitted(x) == padded.emitted(x)


@given(st.integers(0, 10**6), st.sampled_from(RULES))
def test_every_step_emits_accepted_drafts_and_one_more(seed: int, rule: Rule) -> None:
    P, Q, x, ell, noise = case(seed, 5, 3, 4)
    verdict = verify(P, Q, x, ell, noise, rule)
    assert bool((verdict.accepted <= ell).all())
    for r, tokens in enumerate(verdict.emitted(x)):
        assert tokens[:-1] == x[r, : int(verdict.accepted[r])].tolist()
        assert P[r, len(tokens) - 1, tokens[-1]] > 0
        if int(verdict.kind[r]) == Kind.COUPLED:
            assert tokens[-1] == int(x[r, int(ell[r])])


@given(st.integers(0, 10**6))
def test_coupled_takes_over_exactly_where_the_cut_ends(seed: int) -> None:
    """Cut at ell, the coupled rule emits what the whole block's chain emits, up to ell + 1 tokens."""
    P, Q, x, ell, noise = case(seed, 4, 4, 4)
    cut = verify(P, Q, x, ell, noise, "coupled").emitted(x)
    whole = verify(P, Q, x, torch.full_like(ell, 4), noise, "chain").emitted(x)
    for r in range(4):
        assert cut[r] == whole[r][: int(ell[r]) + 1]


@pytest.mark.parametrize("seed", range(12))
def test_block_never_expects_fewer_tokens_than_chain(seed: int) -> None:
    width, vocab = 3, 3
    means = {}
    for rule in ("chain", "block"):
        mean = 0.0
        for x in np.ndindex(*(vocab,) * width):
            P, Q = _tables(seed, width, vocab, x)
            drawn = math.prod(Q[i, token] for i, token in enumerate(x))
            for box, law in outcomes(P, Q, x, width, rule):
                volume = drawn * math.prod(high - low for low, high in box)
                mean += volume * sum(mass * (accepted + 1) for (accepted, _), mass in law.items())
        means[rule] = mean
    assert means["block"] >= means["chain"] - 1e-12


def _tables(seed: int, width: int, vocab: int, x: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Laws that depend on the drafts before them."""
    P = [np.random.default_rng([seed, 1, i, *x[:i]]).dirichlet(np.ones(vocab)) for i in range(width + 1)]
    Q = [np.random.default_rng([seed, 2, i, *x[:i]]).dirichlet(np.ones(vocab)) for i in range(width)]
    return np.stack(P), np.stack(Q)


@pytest.mark.parametrize("rule", ["chain", "coupled", "block"])
def test_equal_laws_accept_everything(rule: Rule) -> None:
    P, _, x, _, noise = case(3, 64, 4, 6)
    verdict = verify(P, P[:, :4].clone(), x, torch.full((64,), 4), noise, rule)
    assert verdict.accepted.tolist() == [4] * 64


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_an_empty_residual_draws_from_the_target(rule: Rule) -> None:
    """Q above p everywhere by rounding: a rejection finds nothing in excess."""
    P = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    Q = P[:, :1] * (1 + 1e-12)
    noise = Noise(torch.tensor([[1 - 1e-13]], dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64))
    verdict = verify(P, Q, torch.tensor([[0]]), torch.tensor([1]), noise, rule)
    assert int(verdict.accepted[0]) == 0
    assert int(verdict.token[0]) == 1


@pytest.mark.parametrize("rule", ["chain", "coupled", "block"])
def test_an_impossible_draft_is_never_accepted(rule: Rule) -> None:
    P = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    Q = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    noise = Noise(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    verdict = verify(P, Q, torch.tensor([[0]]), torch.tensor([1]), noise, rule)
    assert verdict.emitted(torch.tensor([[0]])) == [[1]]


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_draw_never_returns_an_impossible_token(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((20, vocab)) * (rng.random((20, vocab)) < 0.5)
    weights[:, rng.integers(vocab)] += 1e-9
    uniforms = np.concatenate([[np.nextafter(1, 0), 0.0], rng.random(18)])
    tokens = draw(torch.from_numpy(weights), torch.from_numpy(uniforms))
    assert (weights[np.arange(20), tokens.numpy()] > 0).all()


def test_a_device_kernel_does_the_vocabulary_work() -> None:
    class Counting(ReferenceKernels):
        calls = 0

        def draw_excess(self, *arguments: Tensor) -> Tensor:
            self.calls += 1
            return super().draw_excess(*arguments)

    P, Q, x, ell, noise = case(5, 3, 2, 4)
    index = torch.arange(3)
    rows = Rows(P.flatten(0, 1), index * 3, ell, x, Q, index)
    kernels = Counting()
    assert verify_rows(rows, noise, "chain", kernels).emitted(x) == verify(P, Q, x, ell, noise).emitted(x)
    assert kernels.calls == 1


def test_errors_say_what_to_do() -> None:
    P, Q, x, ell, noise = case(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="rule must be one of greedy, chain, coupled, block, match"):
        verify(P, Q, x, ell, noise, "typical")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"P must be \[2, 4, V\]"):
        verify(P[:, :3], Q, x, ell, noise)
    with pytest.raises(InputError, match=r"Q must be \[slots, 3, 4\]"):
        verify(P, Q[:, :2], x, ell, noise)
    with pytest.raises(InputError, match=r"needs Noise\.accept"):
        verify(P, Q, x, ell, Noise())
    with pytest.raises(InputError, match="g >= 1"):
        verify(P[:, :1], None, x[:, :0], ell, noise)
