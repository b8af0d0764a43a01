"""Texts that grow token by token are the whole text, and stop strings end them wherever they fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from deepinfer.engine.detokenizer import Detokenizer, TextStream
from deepinfer.errors import CheckpointError
from deepinfer.model.tiny_tokenizer import make_tokenizer

TINY = make_tokenizer()
SIZE = TINY.get_vocab_size()


def mixed() -> Tokenizer:
    """A byte-level tokenizer with added tokens of every kind, and ids that it leaves out."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<｜special｜>", special=True)])
    tokenizer.add_tokens([AddedToken("<thought>"), AddedToken("｜plain｜"), AddedToken("naïve")])
    return tokenizer


def grown(detokenizer: Detokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    stream = TextStream(detokenizer, stops)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stop is not None:
            return pieces, stream.stop
    return [*pieces, stream.close()], stream.stop


@given(ids=st.lists(st.integers(0, SIZE + 3), max_size=60))
def test_grown_text_is_the_library_text(ids: list[int]) -> None:
    tokenizer = mixed()
    pieces, _ = grown(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=30))
def test_no_piece_has_half_a_character(text: str) -> None:
    ids = TINY.encode(text, add_special_tokens=False).ids
    if TINY.decode(ids) == text:
        pieces, _ = grown(Detokenizer(TINY), ids)
        assert "".join(pieces) == text
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) or "\N{REPLACEMENT CHARACTER}" in text


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first (the longest of several), found in the whole text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    ids=st.lists(st.integers(0, SIZE - 1), max_size=40),
    extra=st.lists(st.text("abo e", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_stop_strings_end_the_text_wherever_they_fall(ids: list[int], extra: list[str], data: st.DataObject) -> None:
    whole = TINY.decode(ids, skip_special_tokens=True)
    stops = list(extra)
    if whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 6))])
    pieces, stop = grown(Detokenizer(TINY), ids, tuple(stops))
    text, wanted = _first_stop(whole, tuple(stops))
    assert "".join(pieces) == text
    assert stop == wanted


def test_what_may_become_a_stop_string_is_held_back() -> None:
    ids = [TINY.encode(letter, add_special_tokens=False).ids[0] for letter in "xENE"]
    stream = TextStream(Detokenizer(TINY), ("END",))
    assert [stream.push(token) for token in ids] == ["x", "", "", "EN"]
    assert stream.close() == "E"


def test_another_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="must have a ByteLevel decoder, got WordPiece"):
        Detokenizer(tokenizer)
