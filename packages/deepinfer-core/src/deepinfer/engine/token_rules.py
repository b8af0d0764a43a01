"""What the parameters of one request do to its logits before temperature: penalties, bias, bad words, min_tokens.

The arithmetic is `accelerator/ops/sampling.py`'s; which sequence stands in which row of logits is the `Sampler`'s.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer.engine.request import SamplingParams, check_integer, check_number
from deepinfer.errors import RequestError

MOST_BIAS = 100.0
MOST_PENALTY = 2.0

_Numbers = NDArray[np.float64]

Entries = tuple[NDArray[np.int64], _Numbers, _Numbers]
"""(tokens, repetition, addend) [N]: what changes in one row of logits."""


class TokenRules:
    """The rules of one request, up to date with the tokens it was last asked about.

    It holds one entry for each token that may change: those of the bias, of the prompt (for the repetition penalty) and
    of the output.  Everything follows from the tokens, so that a preempted sequence, or one whose draft tokens are
    taken back, goes on as if nothing had been.
    """

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int], words: Iterable[tuple[int, ...]], stops: Iterable[int]
    ) -> None:
        """`words` are token sequences that must not be written, `stops` the tokens that end the request."""
        self._repetition, self._presence = float(params.repetition_penalty), float(params.presence_penalty)
        self._frequency = float(params.frequency_penalty)
        self._penalises = (self._repetition, self._presence, self._frequency) != (1, 0, 0)
        self._min_tokens, self._stops = params.min_tokens, tuple(stops)
        self._phrases = [word for word in words if len(word) > 1]
        self._history: list[int] = []
        self._followed: Sequence[int] = self._history
        self._places: dict[int, int] = {}
        self._tokens = np.empty(0, dtype=np.int64)
        self._counts, self._bias = np.empty(0), np.empty(0)
        self._seen = np.empty(0, dtype=np.bool_)
        for token, bias in (params.logit_bias or {}).items():
            place = self._place(int(token))
            self._bias[place] = bias
        for word in words:
            if len(word) == 1:
                place = self._place(word[0])
                self._bias[place] = -np.inf
        if self._repetition != 1:
            for token in set(prompt):
                place = self._place(token)
                self._seen[place] = True

    def entries(self, generated: Sequence[int], *, ending: bool = False) -> Entries:
        """Return the entries for the token behind `generated`; no token comes twice.

        The same list may have grown since the last call; another list may differ anywhere.  `ending` says that the
        output can only end now: then min_tokens does not hold it back.
        """
        self._follow(generated)
        return self._entries(ending)

    def entries_along(self, generated: Sequence[int], drafts: Sequence[int], endings: Sequence[bool]) -> list[Entries]:
        """Return `entries` behind `generated` and behind each of `drafts` laid after it, an item for each ending."""
        self._follow(generated)
        found = [self._entries(endings[0])]
        for token, ending in zip(drafts, endings[1:], strict=True):
            self._history.append(token)
            self._count(token, 1)
            found.append(self._entries(ending))
        for _ in drafts:
            self._count(self._history.pop(), -1)
        return found

    def _entries(self, ending: bool) -> Entries:
        banned = [self._place(token) for token in self._banned(ending)]
        count = len(self._places)
        counts, seen = self._counts[:count], self._seen[:count]
        repetition = np.where(seen | (counts > 0), self._repetition, 1.0)
        addend = self._bias[:count] - self._frequency * counts - self._presence * (counts > 0)
        addend[banned] = -np.inf
        return self._tokens[:count], repetition, addend

    def _banned(self, ending: bool) -> list[int]:
        """Tokens that must not come next, though they may later."""
        banned = [word[-1] for word in self._phrases if tuple(self._history[1 - len(word) :]) == word[:-1]]
        early = len(self._history) < self._min_tokens and not ending
        return [*banned, *self._stops] if early else banned

    def _follow(self, generated: Sequence[int]) -> None:
        """Count what is new in `generated`, and take back what is no longer there."""
        history = self._history
        if generated is not self._followed:
            pairs = enumerate(zip(history, generated, strict=False))
            same = next((at for at, (old, new) in pairs if old != new), min(len(history), len(generated)))
            while len(history) > same:
                self._count(history.pop(), -1)
            self._followed = generated
        for token in generated[len(history) :]:
            history.append(token)
            self._count(token, 1)

    def _count(self, token: int, change: int) -> None:
        if self._penalises:
            place = self._place(token)  # which may give `_counts` more room, so it comes first
            self._counts[place] += change

    def _place(self, token: int) -> int:
        """The entry of `token`, made when there is none."""
        place = self._places.setdefault(token, len(self._places))
        if place >= len(self._tokens):
            more = max(16, len(self._tokens))
            self._tokens = np.append(self._tokens, np.zeros(more, dtype=np.int64))
            self._counts, self._bias = np.append(self._counts, np.zeros(more)), np.append(self._bias, np.zeros(more))
            self._seen = np.append(self._seen, np.zeros(more, dtype=np.bool_))
        self._tokens[place] = token
        return place


def make_rules(
    params: SamplingParams, prompt: Iterable[int], stops: Iterable[int], vocab_size: int, tokenizer: Tokenizer | None
) -> TokenRules:
    """Check the parameters and return their rules; raises RequestError for the first that cannot be honoured."""
    check_number("repetition_penalty", params.repetition_penalty, 0, 1e6, "1 switches it off, above 1 repeats less")
    if params.repetition_penalty == 0:
        raise RequestError("repetition_penalty must be above 0, got 0: 1 switches it off, above 1 repeats less")
    for name, penalty in (("presence", params.presence_penalty), ("frequency", params.frequency_penalty)):
        check_number(f"{name}_penalty", penalty, -MOST_PENALTY, MOST_PENALTY, "0 switches it off, above 0 repeats less")
    check_integer("min_tokens", params.min_tokens, 0, None, "0 lets the output end at once")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens={params.min_tokens} must be at most max_tokens={params.max_tokens}: lower it")
    _check_bias(params.logit_bias, vocab_size)
    words = [*_spelled(params.bad_words, tokenizer), *_given(params.bad_words_token_ids, vocab_size)]
    if len({word for word in words if len(word) == 1}) >= vocab_size:
        raise RequestError("bad_words ban every token of the vocabulary: nothing is left to write")
    return TokenRules(params, prompt, list(dict.fromkeys(words)), stops)


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A row of logits: its place among them, the rules, what was generated, and whether nothing but an end may come."""

    place: int
    rules: TokenRules
    generated: Sequence[int]
    ending: bool = False


def gather(ruled: Sequence[RuledRow]) -> list[NDArray[Any]]:
    """Lay the entries of rows of logits behind one another, as columns of `TokenAdjustments`."""
    return lay([(one.place, one.rules.entries(one.generated, ending=one.ending)) for one in ruled])


def lay(found: Sequence[tuple[int, Entries]]) -> list[NDArray[Any]]:
    """Lay the entries of rows of logits, each with the row's place, behind one another, as `gather` does."""
    rows = np.repeat([place for place, _ in found], [len(entries[0]) for _, entries in found])
    return [rows, *(np.concatenate(column) for column in zip(*(entries for _, entries in found), strict=True))]


def _check_bias(bias: Mapping[int, float] | None, vocab_size: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must be a mapping of token ids to numbers, got {bias!r}")
    for token, value in bias.items():
        number = int(token) if isinstance(token, str) and token.isdecimal() else token  # JSON has no other keys
        check_integer("each token of logit_bias", number, 0, vocab_size - 1, f"the vocabulary has {vocab_size} ids")
        check_number(f"logit_bias of token {token}", value, -MOST_BIAS, MOST_BIAS, "0 changes nothing")


def _spelled(words: Sequence[str] | None, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Tokens of each word as it stands at the start of a text and behind other words."""
    if words is None:
        return []
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise RequestError(f"bad_words must be a list of texts, got {words!r}: put one word into a list, too")
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer.json, the model has none: use bad_words_token_ids")
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str) or not word:
            raise RequestError(f"each of bad_words must be a text of at least one character, got {word!r}")
        forms = (word,) if word[0].isspace() else (word, " " + word)
        found += (tuple(tokenizer.encode(form, add_special_tokens=False).ids) for form in forms)
    return found


def _given(words: Sequence[Sequence[int]] | None, vocab_size: int) -> list[tuple[int, ...]]:
    if words is None:
        return []
    if not isinstance(words, Sequence) or not all(isinstance(word, Sequence) and len(word) for word in words):
        raise RequestError(f"bad_words_token_ids must be lists of at least one token id, got {words!r}")
    for token in (token for word in words for token in word):
        check_integer("each of bad_words_token_ids", token, 0, vocab_size - 1, f"the vocabulary has {vocab_size} ids")
    return [tuple(word) for word in words]
