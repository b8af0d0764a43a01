"""Owns the tokenizer: a whole vocabulary for plain text, and its base model for the text between control tokens.

Where vocabularies come from is in `vocabulary`, how tokens are counted in `word_counts`, and prompts are in `encoding`.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import tokenizers

from deepseek_recipe.vocabulary import Version, vocabulary_text
from deepseek_recipe.word_counts import WordCounts

_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF_CHARACTER: Final = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)
}
"""The byte-level map: printable bytes stand for themselves, the other 68 for U+0100, U+0101, ... in byte order."""


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token id, worked out when first asked for; unknown ids have none."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._token_of = inner.id_to_token

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        try:
            data = bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
        except KeyError:
            data = token.encode()
        self[token_id] = data
        return data


class _WholeText(dict[int, str]):
    """The text of each ordinary token whose bytes are whole characters; empty for all others."""

    def __init__(self, token_bytes: dict[int, bytes], added: dict[int, str]) -> None:
        super().__init__()
        self._token_bytes = token_bytes
        self._added = added

    def __missing__(self, token_id: int) -> str:
        try:
            text = "" if token_id in self._added else self._token_bytes[token_id].decode()
        except UnicodeDecodeError:
            text = ""
        self[token_id] = text = "" if text.endswith("\ufffd") else text
        return text


class Tokenizer:
    """A DeepSeek vocabulary. Make one with `bundled`, `from_file`, `from_str` or `from_pretrained`."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._base = tokenizers.Tokenizer(inner.model)
        if inner.normalizer is not None:
            self._base.normalizer = inner.normalizer
        if inner.pre_tokenizer is not None:
            self._base.pre_tokenizer = inner.pre_tokenizer
        self._word_counts = WordCounts(inner)
        added = {token_id: token.content for token_id, token in inner.get_added_tokens_decoder().items()}
        self.added_tokens: dict[int, str] = added
        """Spelling of each added token by id."""
        self._added_ids = {spelling: token_id for token_id, spelling in added.items()}
        self.token_bytes: dict[int, bytes] = _TokenBytes(inner)
        """Bytes of each token by id, through `[]` only; an unknown id has none."""
        self.whole_text: dict[int, str] = _WholeText(self.token_bytes, added)
        """Text of each ordinary token by id, through `[]` only; empty if its bytes are not whole characters."""
        self.token_bytes.update((token_id, spelling.encode()) for token_id, spelling in added.items())

    @staticmethod
    def from_file(path: str) -> "Tokenizer":
        """Load a tokenizer.json.

        Raises:
            OSError: if the file cannot be read. ValueError: if it is no tokenizer.json.
        """
        return Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))

    @staticmethod
    def from_str(text: str) -> "Tokenizer":
        """Load the text of a tokenizer.json.

        Raises:
            ValueError: if it is no tokenizer.json.
        """
        try:
            return Tokenizer(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"expected the text of a tokenizer.json: {error}") from error

    @staticmethod
    def from_pretrained(identifier: str, revision: str | None = None, token: str | None = None) -> "Tokenizer":
        """Load the tokenizer.json of a repository on the Hugging Face hub (needs a network or a filled cache)."""
        return Tokenizer(tokenizers.Tokenizer.from_pretrained(identifier, revision=revision or "main", token=token))

    @staticmethod
    def bundled(version: Version = "v4.1") -> "Tokenizer":
        """The released vocabulary of `version`, from this package: no network, loaded once."""
        return _bundled(version)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text with the whole vocabulary; nothing is added around it."""
        # The batch call is the one that does not work out offsets.
        return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def count(self, text: str) -> int:
        """How many ids `encode` gives."""
        return self._word_counts.count(text)

    def added_token_id(self, spelling: str) -> int | None:
        """The id of the added token with this spelling, or None."""
        return self._added_ids.get(spelling)

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Token ids of each piece by the base model alone: control tokens spelled in it are ordinary text."""
        distinct = list(dict.fromkeys(pieces))
        encodings = self._base.encode_batch_fast(distinct, add_special_tokens=False)
        ids_of = {piece: encoding.ids for piece, encoding in zip(distinct, encodings, strict=True)}
        return [ids_of[piece] for piece in pieces]

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The bytes that these tokens stand for; unknown ids stand for none."""
        return b"".join(map(self.token_bytes.__getitem__, token_ids))


@cache
def _bundled(version: Version) -> Tokenizer:
    return Tokenizer.from_str(vocabulary_text(version))
