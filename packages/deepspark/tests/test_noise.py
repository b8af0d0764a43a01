import math

import pytest
import torch

from deepspark.noise import accept_uniforms, draft_uniforms, extra_uniforms, match_gumbel, match_uniforms


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def splitmix(value: int) -> int:
    """The published generator, on Python's own integers."""
    return finish((value + STEP) & MASK)


def finish(value: int) -> int:
    """Its finaliser."""
    mask = MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_numbers_are_pinned() -> None:
    """Seeds in the field must give the same text on every device and after an update."""
    seed, purpose, start, offset = 7, 1, 11, 1
    bits = splitmix(splitmix(seed) ^ purpose)
    for coordinate in (start, offset):
        bits = splitmix(bits ^ splitmix(coordinate))
    expected = ((bits >> 12) + 0.5) * 2.0**-52
    assert float(draft_uniforms(column(seed), column(start), 2)[0, offset]) == expected == 0.9607727108722205


def test_uniforms_fill_the_open_interval_evenly() -> None:
    drawn = draft_uniforms(torch.arange(2000), torch.arange(2000) * 3, 10).flatten()
    assert 0 < float(drawn.min()) < 1e-3
    assert 1 - 1e-3 < float(drawn.max()) < 1
    counts = torch.histc(drawn, 20, 0, 1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 60  # 19 degrees of freedom: chance of more is below 1e-5


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_position_drafted_again_gets_another_number(lag: int) -> None:
    """Block start and offset are the key: position 20 from block 15 and from block 15 + lag share nothing."""
    seeds = torch.arange(20000)
    early = draft_uniforms(seeds, torch.full_like(seeds, 15), 5)[:, 4]
    late = draft_uniforms(seeds, torch.full_like(seeds, 15 + lag), 5)[:, 4 - lag]
    assert abs(float(torch.corrcoef(torch.stack([early, late]))[0, 1])) < 0.03


def test_purposes_share_nothing() -> None:
    seeds, starts = torch.arange(20000), torch.full((20000,), 9)
    rows = torch.stack(
        [
            draft_uniforms(seeds, starts, 1)[:, 0],
            accept_uniforms(seeds, starts, 1)[:, 0],
            extra_uniforms(seeds, starts),
            match_uniforms(seeds, starts),
        ]
    )
    correlation = torch.corrcoef(rows) - torch.eye(4, dtype=rows.dtype)
    assert float(correlation.abs().max()) < 0.03


def test_a_request_keeps_its_numbers_in_any_batch() -> None:
    alone = draft_uniforms(column(3), column(8), 5)
    among = draft_uniforms(column(1, 3, 2), column(4, 8, 9), 5)
    assert torch.equal(alone[0], among[1])
    assert torch.equal(match_gumbel(column(3), column(8), 50)[0], match_gumbel(column(1, 3), column(2, 8), 50)[1])


def test_match_noise_is_that_of_the_engine() -> None:
    """The published rule, word for word, on Python's own integers."""
    seed, position, token = 7, 11, 3
    key = finish((finish(splitmix(seed)) + position) & MASK)
    uniform = ((finish((key + (token + 1) * STEP) & MASK) >> 12) + 0.5) * 2.0**-52
    drawn = match_gumbel(column(seed), column(position), 5)[0, token]
    assert float(drawn) == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_match_noise_is_gumbel() -> None:
    drawn = match_gumbel(column(1), column(2), 200_000)
    assert float(drawn.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(drawn.var()) == pytest.approx(1.6449, abs=0.04)
