"""Owns counting the tokens of long text: word by word, with the counts of words that were seen before.

Ids of text are the business of `tokenizer`.
"""

import json
import re
from typing import Final

import tokenizers

_SPLITS: Final = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
        "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
)
_RELEASED: Final = {
    "type": "Sequence",
    "pretokenizers": [
        *({"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in _SPLITS),
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}
"""How the released vocabularies cut text before they look for tokens."""

_UNCHANGED: Final = {"type": "Sequence", "normalizers": []}

_WORD_START: Final = re.compile(r"(?<=[!-~])(?= [A-Za-z])")
"""A place where the released splits always cut: what stands in front ends there whatever follows, and a blank with a
letter behind it always begins a new part."""

_LONGEST_WORD: Final = 48
_MOST_WORDS: Final = 1 << 16
_MOST_LEARNED: Final = 128


class WordCounts:
    """Counts tokens as the whole vocabulary would encode the text; exact for every vocabulary.

    Where the vocabulary cuts text as the released ones do, counts of words are remembered, a few new ones at each call.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._by_word = _cuts_at_words(inner)
        self._known: dict[str, int] = {}

    def count(self, text: str) -> int:
        """How many tokens the text has."""
        if not self._by_word:
            return self._encoded([text])[0]
        known = self._known
        words = _WORD_START.split(text)
        new = dict.fromkeys(word for word in words if word not in known)
        learned = [word for word in new if len(word) <= _LONGEST_WORD][:_MOST_LEARNED]
        if len(known) + len(learned) > _MOST_WORDS:
            self._known = {}
            return self._encoded([text])[0]
        # All other new words, one after the other, are one text with the same tokens, which costs less than many.
        others = new.keys() - learned
        *counts, rest = self._encoded([*learned, "".join(word for word in words if word in others)])
        known.update(zip(learned, counts, strict=True))
        return rest + sum(known[word] for word in words if word not in others)

    def _encoded(self, texts: list[str]) -> list[int]:
        return [*map(len, self._inner.encode_batch_fast(texts, add_special_tokens=False))]


def _cuts_at_words(inner: tokenizers.Tokenizer) -> bool:
    """Whether the ids of every text are the ids of its words, one after the other."""
    model, normalizer, cuts = inner.model, inner.normalizer, inner.pre_tokenizer
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or cuts is None:
        return False
    if normalizer is not None and json.loads(normalizer.__getstate__()) != _UNCHANGED:
        return False
    added = inner.get_added_tokens_decoder().values()
    if any(token.rstrip or _WORD_START.search(token.content) for token in added):
        return False
    return bool(json.loads(cuts.__getstate__()) == _RELEASED)
