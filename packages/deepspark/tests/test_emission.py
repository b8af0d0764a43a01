import pytest
import torch

from deepspark.emission import cut, longest_draft, token_logprobs
from deepspark.errors import InputError


def test_no_step_can_pass_a_limit() -> None:
    for n_before in range(12):
        ell = longest_draft(5, position=100 + n_before, n_before=n_before, max_new=12, max_context=None)
        assert ell == max(min(5, 12 - n_before - 1), 0)
        assert n_before + ell + 1 <= 12
    assert longest_draft(5, position=95, n_before=0, max_new=None, max_context=100) == 4
    assert longest_draft(5, position=99, n_before=0, max_new=None, max_context=100) == 0
    assert longest_draft(5, position=7, n_before=0, max_new=None, max_context=None) == 5


def test_a_stop_within_the_limit_wins() -> None:
    assert cut([4, 7, 9], {7}, 3, 0).finish == "stop"
    assert cut([4, 7, 9], {7}, 2, 0) == cut([4, 7], {7}, 2, 0)
    assert cut([4, 7, 9], {9}, 2, 0).finish == "length"
    assert cut([], {9}, None, 3).finish is None


def test_logprobs_need_a_row_a_token() -> None:
    with pytest.raises(InputError, match="2 emitted tokens need as many target rows, got 1"):
        token_logprobs(torch.ones(1, 3) / 3, [0, 1])
    ties = token_logprobs(torch.tensor([[0.25, 0.5, 0.25]]), [2], top=3)
    assert [token for token, _ in ties.top[0]] == [1, 0, 2]
