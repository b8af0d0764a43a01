"""Owns cutting chunks into pieces: runs of text that keep their token count and their log probabilities together.

What the text of a piece means is the business of `output_parser`.
"""

from codecs import utf_8_decode
from enum import IntEnum

from deepseek_recipe.inference_chunk import TokenLogprobs
from deepseek_recipe.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Kind(IntEnum):
    """What the characters of a piece may match: anything, ordinary characters only, special spellings only."""

    TEXT = 0
    RUN = 1
    CONTROL = 2


class Piece:
    """A run of text with its number of tokens and their log probabilities, or None if some token has none."""

    __slots__ = ("count", "kind", "logprobs", "text")

    def __init__(
        self, text: str, count: int, kind: Kind = Kind.TEXT, logprobs: list[tuple[int, TokenLogprobs]] | None = None
    ) -> None:
        self.text = text
        self.count = count
        self.kind = kind
        self.logprobs = logprobs


class TokenRuns:
    """Turns token ids into pieces; keeps back the end of a run that may be half a character.

    With `lossless`, only the half character is kept back, and at the end it is counted.
    """

    def __init__(self, tokenizer: Tokenizer, *, lossless: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._added = tokenizer.added_tokens
        self._whole_text = tokenizer.whole_text
        self._lossless = lossless
        self._texts: list[str] = []
        self._half = b""
        self._logprobs: list[tuple[int, TokenLogprobs]] | None = []
        self.count = 0
        """How many tokens are kept back."""

    def pieces(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> list[Piece]:
        """The pieces that are complete after these tokens."""
        if logprobs is None and (text := self.plain_text(token_ids)):
            return [Piece(text, len(token_ids), Kind.RUN)]
        pieces = []
        for position, token_id in enumerate(token_ids):
            entry = None if logprobs is None else (token_id, logprobs[position])
            spelling = self._added.get(token_id)
            if spelling is None:
                self._add(token_id, entry)
                continue
            run = self._take("".join(self._texts) + utf_8_decode(self._half, "replace", True)[0])
            if run.text or self._lossless:
                pieces += [run] if run.count else []
                run = Piece("", 0, logprobs=[])
            entries = None if entry is None or run.logprobs is None else [*run.logprobs, entry]
            pieces.append(Piece(spelling, run.count + 1, Kind.CONTROL, entries))
        if self.count:
            pieces += self._end_of_chunk()
        return pieces

    def is_held(self) -> bool:
        """Whether tokens or half a character are kept back."""
        return self.count > 0 or self._half != b""

    def plain_text(self, token_ids: list[int]) -> str:
        """The text of ids that are all whole characters; empty if they are not, or if something is kept back."""
        if self.count or self._half:
            return ""
        if len(token_ids) == 1:
            return self._whole_text[token_ids[0]]
        texts = [*map(self._whole_text.__getitem__, token_ids)]
        if "" not in texts:
            return "".join(texts)
        if not self._added.keys().isdisjoint(token_ids):
            return ""
        try:
            text = b"".join(map(self._bytes.__getitem__, token_ids)).decode()
        except UnicodeDecodeError:
            return ""
        return "" if text.endswith(_REPLACEMENT) else text

    def last(self) -> list[Piece]:
        """What is still kept back at the end of output."""
        if not self._lossless or not self.count:
            return []
        return [self._take("".join(self._texts))]

    def _add(self, token_id: int, entry: tuple[int, TokenLogprobs] | None) -> None:
        data = self._half + self._bytes[token_id]
        text, used = utf_8_decode(data, "replace")
        self._half = data[used:]
        if text:
            self._texts.append(text)
        self.count += 1
        if entry is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs.append(entry)

    def _end_of_chunk(self) -> list[Piece]:
        half = self._half
        if not self._lossless:
            kept = half or not self._texts or self._texts[-1][-1] == _REPLACEMENT
            return [] if kept else [self._take("".join(self._texts))]
        if half and not self._texts:
            return []
        piece = self._take("".join(self._texts))
        self._half = half
        return [piece]

    def _take(self, text: str) -> Piece:
        piece = Piece(text, self.count, Kind.RUN, self._logprobs)
        self._half = b""
        self._texts = []
        self._logprobs = []
        self.count = 0
        return piece
