"""Token ids become text while they come: never half a character, and never the beginning of a stop string.

Which tokens belong to a text and when a request ends for other reasons is the `Scheduler`'s.
"""

import codecs

from tokenizers import Tokenizer, decoders

from deepinfer.errors import CheckpointError


def _byte_of_character() -> dict[str, int]:
    """Invert the spelling of bytes in byte-level vocabularies: printable ones are themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Detokenizer:
    """The bytes of each token of one byte-level vocabulary; special tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            kind = type(tokenizer.decoder).__name__
            raise CheckpointError(f"tokenizer.json must have a ByteLevel decoder, got {kind}: use the model's own file")
        self._tokenizer = tokenizer
        self._byte_of_character = _byte_of_character()
        self._bytes = {number: b"" for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def bytes_of(self, token_id: int) -> bytes:
        """Return what `token_id` adds to the text, in UTF-8; nothing for an id that the vocabulary leaves out."""
        known = self._bytes.get(token_id)
        if known is None:
            spelling = self._tokenizer.id_to_token(token_id) or ""
            try:
                known = bytes(self._byte_of_character[character] for character in spelling)
            except KeyError:  # an added token is spelled as it is
                known = spelling.encode()
            self._bytes[token_id] = known
        return known


class TextStream:
    """The growing text of one request. `stop` holds the stop string that ended it, once there is one.

    Of several stop strings the one that is complete first ends the text, the longest of those that end together, so
    that the result does not depend on how the text was cut into tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: tuple[str, ...]) -> None:
        self.stop: str | None = None
        self._detokenizer = detokenizer
        self._stops = stop_strings
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token and return the text that is now certain; without `may_stop` it completes no stop string."""
        return self._release(self._decoder.decode(self._detokenizer.bytes_of(token_id)), may_stop=may_stop)

    def close(self) -> str:
        """Return the rest, when the request ended otherwise; an unfinished character becomes U+FFFD."""
        released = self._release(self._decoder.decode(b"", final=True))
        if self.stop is None:
            released, self._held = released + self._held, ""
        return released

    def _release(self, piece: str, *, may_stop: bool = True) -> str:
        if not self._stops:
            return piece
        text, old = self._held + piece, len(self._held)
        # What was held may have a stop string that did not count: only one that `piece` completes does.
        starts = ((stop, text.find(stop, max(old - len(stop) + 1, 0))) for stop in self._stops)
        found = [(at + len(stop), at, stop) for stop, at in starts if at >= 0]
        if found and may_stop:
            _, at, self.stop = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop`, short of all of it, that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
