"""How token ids become rows of an Engram table: compressed ids, hash multipliers and prime bucket counts.

The hash itself, which runs every step, is the ops'; finding and opening the tokenizer is `checkpoint.py`'s.
Source: section on Engram of the model card; tokens that read alike (case, accents, spaces) share one compressed id.
"""

from itertools import count

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.model.config import EngramHashConfig

SEED_STRIDE = 10007
"""Multipliers of layer L come from a generator seeded with SEED_STRIDE * L."""

LONE_SPACE = "\ue000"
"""Stands in for a text that is one space while outer spaces are stripped; a private character no token holds."""


def compress_token_ids(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int64]:
    """Map every token id to its compressed id: int64 [vocab_size].

    Ids whose normalised text is equal share a compressed id; compressed ids are numbered by first appearance, so the
    number of distinct ones is the largest plus 1.  A token that is no whole text (part of a character) is told apart
    by its spelling in the vocabulary; an id without a token has the empty text.
    """
    texts = tokenizer.decode_batch([[token] for token in range(vocab_size)], skip_special_tokens=False)
    normalize = _normalizer().normalize_str
    seen: dict[str, int] = {}
    result = np.empty(vocab_size, dtype=np.int64)
    for token, text in enumerate(texts):
        key = (tokenizer.id_to_token(token) or "") if "\ufffd" in text else normalize(text) or text
        result[token] = seen.setdefault(key, len(seen))
    return result


def multipliers(config: EngramHashConfig) -> NDArray[np.int64]:
    """Draw the odd hash multipliers: int64 [layers, max_ngram], the first for the token itself.

    They are small enough that a compressed id times a multiplier stays below 2^63.
    """
    bound = (2**63 - 1) // config.compressed_vocab_size // 2
    rows = [
        np.random.default_rng(SEED_STRIDE * layer).integers(0, bound, config.max_ngram) * 2 + 1
        for layer in config.layer_ids
    ]
    return np.array(rows, dtype=np.int64)


def primes(config: EngramHashConfig) -> NDArray[np.int64]:
    """Return the number of table rows per hash: int64 [layers, max_ngram - 1, heads], all different primes.

    Entry [l, n - 2, h] belongs to n-grams of order n: the next unused prime from vocab_size on.  The rows of a layer's
    table lie in this order, so its length is the sum over its entries.
    """
    used: set[int] = set()
    shape = (len(config.layer_ids), config.max_ngram - 1, config.heads)
    result = np.empty(shape, dtype=np.int64)
    for index in np.ndindex(shape[:2]):
        free = (n for n in count(max(config.vocab_size, 2)) if n not in used and _is_prime(n))
        result[index] = [next(free) for _ in range(config.heads)]
        used.update(result[index].tolist())
    return result


def _is_prime(number: int) -> bool:
    """Trial division: numbers are near engram_vocab_size (16 million), so at most 2,000 odd divisors each."""
    if number % 2 == 0:
        return number == 2
    divisors = np.arange(3, int(number**0.5) + 2, 2)
    return bool((number % divisors[divisors < number]).all())


def _normalizer() -> normalizers.Normalizer:
    """Compose the normalisation of token texts from the tokenizers library's own steps.

    Python's unicodedata differs from them on about 800 code points.
    """
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(LONE_SPACE, " "),
        ]
    )
