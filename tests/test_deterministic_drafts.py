"""With `deterministic=True` drafts change no bit: verified rows are the same among drafts as alone."""

import pytest
import torch

from deepinfer import LLM, ConfigError, SamplingParams
from deepinfer.engine.config import DraftRule

PROMPTS = [list(range(30, 60)), [5, 6, 7], list(range(40, 180))]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True, seed=3, logprobs=-1)
    for temperature in (0.0, 0.9, 1.0)
]


@pytest.mark.parametrize("rule", ["match", "greedy"])
def test_tokens_and_log_probabilities_are_those_without_drafts(rule: DraftRule) -> None:
    plain = LLM("tiny", accelerator="cpu", deterministic=True, max_model_len=512, max_num_seqs=8)
    drafting = LLM(
        "tiny", accelerator="cpu", deterministic=True, draft="on", draft_rule=rule, max_model_len=512, max_num_seqs=8
    )
    for one, other in zip(plain.generate(PROMPTS, PARAMS), drafting.generate(PROMPTS, PARAMS), strict=True):
        assert one.token_ids == other.token_ids
        assert isinstance(one.logprobs, torch.Tensor)
        assert isinstance(other.logprobs, torch.Tensor)
        assert torch.equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_rules_whose_text_depends_on_load_are_refused(rule: DraftRule) -> None:
    with pytest.raises(ConfigError, match=f'must be "match" or "greedy" with deterministic=True, got {rule!r}'):
        LLM("tiny", deterministic=True, draft="on", draft_rule=rule)
