"""What a caller asks and what it gets: `SamplingParams`, `Request`, `Progress`, `Completion`, `Increment`.

Running a request is the `Scheduler`'s; turning text into prompt ids and `Progress` into `Completion` is `llm.py`'s.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from torch import Tensor

from deepinfer.engine.draft_report import DraftReport, DraftStep
from deepinfer.errors import RequestError

if TYPE_CHECKING:
    from deepinfer.engine.constraint import Constraint

FinishReason = Literal["stop", "length", "abort", "error"]
CacheMode = Literal["exact", "replay", "off"]

SEEDS = 2**63
"""A request's seed is 0 .. SEEDS - 1."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends; checked when the request is added.

    temperature      divides the logits; 0 (or below 1e-5) takes the best token, the filters are ignored then
    top_k            keep the k best tokens; 0 or -1 = all
    top_p            of these keep the smallest set of best tokens whose probability reaches top_p; 1 = all
    min_p            of these keep the tokens of at least min_p times the best one's probability; 0 = all
    repetition_penalty   a token of the prompt or the output: its logit is divided by this if positive, else multiplied
    presence_penalty     taken off the logit of each token that the output has
    frequency_penalty    taken off the same logits once for each time that the output has the token
    logit_bias       token id -> -100 to 100, added to its logit
    bad_words        texts that the output must not write: the last token of each, as the tokenizer spells it with and
                     without a space in front, is banned where the tokens before it stand
    bad_words_token_ids  the same as token ids
    structured       what the output must match: a `Constraint`, a mapping of its fields, or the text of a JSON schema
    min_tokens       before so many tokens no end-of-sequence, no stop token, and no stop string counts; a constraint
                     that allows nothing more ends the output all the same
    max_tokens       end after so many tokens; None = as many as fit into max_model_len
    stop             end where one of these strings is complete; the text ends before it
    stop_token_ids   end after one of these tokens, as after end-of-sequence; the text does not show it
    ignore_eos       go on after end-of-sequence
    seed             of the noise; None = from the engine's seed and the request's index in the call
    logprobs         n = for each generated token its log-probability and the n best; -1 = the whole rows
    logprobs_mode    "raw" = of the model; "processed" = of what the token was drawn from, all of the above applied
    prompt_logprobs  the same for each prompt token, raw: row i is the distribution after token i; ends decoder replay

    The order is repetition, frequency and presence penalty, logit_bias, bad words and min_tokens, the constraint; then
    temperature, top_k, top_p, min_p.  Penalties count the request's own tokens alone: 1, 0, 0 switch them off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    structured: "Constraint | Mapping[str, Any] | str | None" = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    prompt_logprobs: int | None = None

    @property
    def has_rules(self) -> bool:
        """Whether anything changes logits before temperature: these parameters are checked by `token_rules.py`."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        words = (self.logit_bias, self.bad_words, self.bad_words_token_ids)
        return penalties != (1, 0, 0) or self.min_tokens != 0 or any(given is not None for given in words)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self, vocab_size: int | None = None) -> None:
        """Raise RequestError for the first value that cannot be honoured; None = by any vocabulary."""
        check_number(
            "temperature", self.temperature, 0, math.inf, "0 for the best token, 1 for the model's distribution"
        )
        check_number("top_p", self.top_p, 0, 1, "1 switches it off")
        if self.top_p == 0:
            raise RequestError("top_p must be above 0, got 0: 1 switches it off, temperature=0 takes the best token")
        check_number("min_p", self.min_p, 0, 1, "0 switches it off")
        check_integer("top_k", self.top_k, -1, SEEDS - 1, "0 or -1 switches it off")
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None, "None generates as many tokens as fit")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, SEEDS - 1, "None derives one from the engine's seed")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                check_integer(name, count, -1, vocab_size, "-1 returns whole rows, None returns nothing")
        if self.logprobs_mode not in ("raw", "processed"):
            raise RequestError(f'logprobs_mode must be "raw" or "processed", got {self.logprobs_mode!r}')
        for name, values in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if values is not None and not isinstance(values, Sequence):
                raise RequestError(f"{name} must be a list, got {values!r}: leave it out for none")
        for token in self.stop_token_ids or ():
            last = None if vocab_size is None else vocab_size - 1
            advice = "token ids begin at 0" if vocab_size is None else f"the vocabulary has {vocab_size} ids"
            check_integer("each of stop_token_ids", token, 0, last, advice)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError(f"each stop string must be a text of at least one character, got {text!r}")


def check_number(name: str, value: float, low: float, high: float, advice: str) -> None:
    """Raise RequestError unless `value` is a number from `low` to `high`."""
    plain = isinstance(value, Real) and not isinstance(value, bool)
    if not plain or not low <= value <= min(high, sys.float_info.max):  # an integer may be larger than any float
        limits = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        raise RequestError(f"{name} must be a number, {limits}, got {value!r}: {advice}")


def check_integer(name: str, value: int, low: int, high: int | None, advice: str) -> None:
    """Raise RequestError unless `value` is an integer from `low` to `high`."""
    plain = isinstance(value, Integral) and not isinstance(value, bool)
    if not plain or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"{low} to {high}"
        raise RequestError(f"{name} must be an integer, {limits}, got {value!r}: {advice}")


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    prompt_token_ids  at least one id, each inside the vocabulary
    params            how tokens are chosen
    images            reserved: must be empty until the image tower is built
    index             place in the call that brought it: without a seed of its own, a request draws from
                      (engine seed, index)
    priority          its class, any integer: a higher one gets a place first and loses it last
    timeout_s         seconds from `Engine.add` after which it is aborted with what it has; None = never
    cache_salt        requests share cached blocks with those of the same salt only
    prefix_cache      how it uses the prefix cache; None = as the engine
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    images: tuple[object, ...] = ()
    index: int = 0
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None
    prefix_cache: CacheMode | None = None

    def check(self) -> None:
        """Raise RequestError for a priority, a timeout or a use of the prefix cache that cannot be honoured."""
        check_integer("priority", self.priority, -(2**31), 2**31 - 1, "0 is the class of requests that name none")
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 0, math.inf, "None waits as long as it takes")
        check_cache_choice(self.cache_salt, self.prefix_cache)


def check_cache_choice(salt: object, mode: object) -> None:
    """Raise RequestError for a `cache_salt` or a `prefix_cache` that no engine takes; None = not given."""
    if mode is not None and mode not in get_args(CacheMode):
        raise RequestError(f'prefix_cache must be "exact", "replay" or "off", got {mode!r}')
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a text, got {salt!r}: leave it out to share with everybody")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the prefix cache did for one prompt.

    mode      "exact": the numbers are those of a cold run; "replay": approximate; "off"
    hit       prompt tokens whose compressed KV was found
    replayed  of these, how many ran again all the same, because window KV was not kept at the end of the hit
    computed  prompt tokens that ran, the replayed ones included
    miss_at   the first prompt token that was not found; None = as much was found as can be used
    why       "token 812 differs" from every text that is known up to there; "evicted"; "other salt": known to requests
              with another `cache_salt` only; "never seen"; "shorter than a block ..."; "" where nothing was missed
    """

    mode: CacheMode
    hit: int
    replayed: int
    computed: int
    miss_at: int | None
    why: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: of the token that came (None behind the prompt), and the n best."""

    token_id: int | None
    logprob: float | None
    top: dict[int, float]


Logprobs = list[TokenLogprobs] | Tensor
"""One item a token; with -1 a float32 tensor [tokens, V] on the host."""


class Progress(NamedTuple):
    """What one step gave to one request; `finish_reason` is None while it goes on.

    `text` is what the new tokens add to the text, less what may still become a stop string or an unfinished
    character.  `stop_reason` is the stop string or token id that ended it.  `prompt_logprobs` are the rows of the
    prompt tokens that this step computed.  `draft_step` tells of the drafts that it verified, None without any; `cache`
    comes with the end.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    draft_step: DraftStep | None = None
    cache: CacheUse | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request.

    prompt_token_ids   what the model read
    token_ids          what it wrote, the token that ended it included
    text               the same as text, without special tokens and without the stop string
    finish_reason      "stop": end-of-sequence, a stop token or a stop string; "length": max_tokens or max_model_len;
                       "abort": ended from outside or by its timeout, see `error`; "error": see `error`
    stop_reason        the stop string or token id that ended it, else None
    error              what went wrong and what to do, else None
    logprobs           one item a generated token, where asked for
    prompt_logprobs    one item a prompt token, where asked for
    cache              what the prefix cache did for the prompt; None = the request never ran
    num_cached_tokens  prompt tokens that did not run: `cache.hit - cache.replayed` (a property)
    decoder_replay     how many last prompt tokens ran the decoder half; None = all of them
    drafts             what became of its drafts; None where the engine drafts nothing
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    decoder_replay: int | None = None
    drafts: DraftReport | None = None
    cache: CacheUse | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not run."""
        return 0 if self.cache is None else self.cache.hit - self.cache.replayed


@dataclass(slots=True)  # not frozen: a frozen one takes four times as long to make, one a token
class Increment:
    """What one step added to the completion of prompt number `index` of the call.

    `text` and `token_ids` are new; all texts of a prompt, joined, are its completion's.  `draft_step` tells of the
    drafts among them.  The last increment has the whole `completion`.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    draft_step: DraftStep | None = None
