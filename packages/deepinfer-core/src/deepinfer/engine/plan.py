"""What passes between scheduler, builder and sampler: `Plan` on the way to the model, `Sampled` on the way back.

Both hold plain numbers, so that they can cross ranks; the tensors in between are `Batch` and `ModelOutput`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.draft_report import DraftStep
from deepinfer.engine.request import Logprobs
from deepinfer.engine.sequence import Integers

NOT_FINITE = (
    "the model gave logits that are not finite (NaN or infinity) after {} tokens of this request; which layer began "
    'it is not known: compare the files of the checkpoint with their checksums, and try dtype="float32" and '
    'kv_cache_dtype="model"'
)
"""Why a request ends whose next token cannot be drawn; others of its step go on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes; an empty one is legal.

    rows [R]          table row of each sequence
    starts [R]        its first position in this step
    counts [R]        how many positions
    logit_counts [R]  of how many of the last ones logits are wanted
    samples [R] bool  whether the last one is the sequence's newest token, so that the next one is drawn
    prompt_rows       places (in R) of the sequences whose logits are wanted as rows of the prompt
    decoding          every sequence computes its newest token and nothing else
    drafts [R]        how many of `counts` are draft tokens, laid behind the newest token; None = none of any sequence
    """

    rows: Integers
    starts: Integers
    counts: Integers
    logit_counts: Integers
    samples: NDArray[np.bool_]
    prompt_rows: tuple[int, ...] = ()
    decoding: bool = False
    drafts: Integers | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens [R, W] of the sequences in `rows` [R] (of the table), of which the first `counts` [R] are verified.

    Plain numbers, so that it can cross ranks.
    """

    rows: Integers
    draft_tokens: Integers
    counts: Integers


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the logits became.

    token_ids [N]     the tokens of all drawing sequences, one sequence behind the other
    counts [samples]  how many each gained: accepted drafts and one more, so at least one
    logprobs          by table row, an item for each of its tokens; prompt_logprobs the same for rows of its prompt
    lost              table rows whose logits are not finite: their tokens mean nothing
    proposal          what the next step verifies; None = nothing
    draft_steps       by table row, what became of this step's drafts
    """

    token_ids: Integers
    counts: Integers
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    proposal: Proposal | None = None
    draft_steps: Mapping[int, DraftStep] = field(default_factory=dict)
