"""Fixtures that the tests of the recipe share: tokenizers, loaded once."""

import json
from collections.abc import Callable
from functools import cache

import pytest

from deepseek_recipe import Tokenizer
from deepseek_recipe.vocabulary import vocabulary_text

_STREAM_SPELLINGS = {128799: "<｜System｜>", 129264: "<｜image｜>", 129279: "<|place_holder_mm_span_0442|>"} | {
    129265 + k: f"<|place_holder_mm_span_{436 + k:04d}|>" for k in range(6)
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The bundled tokenizer of V4.1."""
    return Tokenizer.bundled("v4.1")


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Tokenizer]:
    """A function that gives the tokenizer of a version; `v4.1-streams` is the one the stream cases were made with."""

    @cache
    def get(version: str) -> Tokenizer:
        if version != "v4.1-streams":
            return Tokenizer.bundled("v4" if version == "v4" else "v4.1")
        vocabulary = json.loads(vocabulary_text("v4"))
        for token in vocabulary["added_tokens"]:
            if token["id"] in _STREAM_SPELLINGS:
                token["content"], token["special"] = _STREAM_SPELLINGS[token["id"]], True
        return Tokenizer.from_str(json.dumps(vocabulary, ensure_ascii=False))

    return get
