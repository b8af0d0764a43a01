"""Owns cutting chunks into pieces: runs of text that keep their token count and their log probabilities together.

What the text of a piece means is the business of `output_parser`.
"""

import codecs
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
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts: list[str] = []
        self._logprobs: list[tuple[int, TokenLogprobs]] | None = []
        self._unfinished = False
        self.count = 0
        """How many tokens are kept back."""

    def pieces(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> list[Piece]:
        """The pieces that are complete after these tokens."""
        pieces = []
        for position, token_id in enumerate(token_ids):
            entry = None if logprobs is None else (token_id, logprobs[position])
            spelling = self._added.get(token_id)
            if spelling is None:
                self._add(token_id, entry)
                continue
            run = self._take(self._decoded() + self._decoder.decode(b"", True))
            if run.text or self._lossless:
                pieces += [run] if run.count else []
                run = Piece("", 0, logprobs=[])
            entries = None if entry is None or run.logprobs is None else [*run.logprobs, entry]
            pieces.append(Piece(spelling, run.count + 1, Kind.CONTROL, entries))
        if self.count:
            pieces += self._end_of_chunk()
        return pieces

    def plain_text(self, token_ids: list[int]) -> str:
        """The text of ids that are all whole characters; empty if they are not, or if something is kept back."""
        if self.count or self._unfinished:
            return ""
        if len(token_ids) == 1:
            return self._whole_text[token_ids[0]]
        texts = [*map(self._whole_text.__getitem__, token_ids)]
        return "" if "" in texts else "".join(texts)

    def last(self) -> list[Piece]:
        """What is still kept back at the end of output."""
        if not self._lossless or not self.count:
            return []
        return [self._take(self._decoded())]

    def _add(self, token_id: int, entry: tuple[int, TokenLogprobs] | None) -> None:
        self._texts.append(self._decoder.decode(self._bytes[token_id]))
        self.count += 1
        if entry is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs.append(entry)

    def _decoded(self) -> str:
        return "".join(self._texts)

    def _end_of_chunk(self) -> list[Piece]:
        unfinished = bool(self._decoder.getstate()[0])
        if not self._lossless:
            last = next((text for text in reversed(self._texts) if text), "")
            return [] if unfinished or not last or last[-1] == _REPLACEMENT else [self._take(self._decoded())]
        if unfinished and not any(self._texts):
            return []
        state = self._decoder.getstate()
        piece = self._take(self._decoded())
        self._decoder.setstate(state)
        self._unfinished = unfinished
        return [piece]

    def _take(self, text: str) -> Piece:
        piece = Piece(text, self.count, Kind.RUN, self._logprobs)
        self._decoder.reset()
        self._unfinished = False
        self._texts = []
        self._logprobs = []
        self.count = 0
        return piece
