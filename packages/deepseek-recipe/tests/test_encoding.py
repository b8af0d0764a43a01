"""Vocabularies, special tokens in prompts and plain text, JSON reading and writing."""

import hashlib
import json
import math
import random
import struct
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import deepseek_recipe as recipe
from deepseek_recipe.json_reader import JsonSyntaxError, parse_json, parse_object
from deepseek_recipe.json_writer import compact_json, debug_string, f32_text, float_text, spaced_json, to_f32
from deepseek_recipe.vocabulary import V41_SHA256, vocabulary_text

SPELLINGS = [token.default_str() for token in recipe.SpecialToken]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def test_the_v41_vocabulary_is_the_released_one() -> None:
    assert hashlib.sha256(vocabulary_text("v4.1").encode()).hexdigest() == V41_SHA256


WORD_PARTS = [" the", " a", "word", "  ", "\n\n", "123", ", ", "'", "é", "中文", "\u0301", "\u2028", *SPELLINGS]


@pytest.mark.parametrize("version", ["v4", "v4.1"])
@given(parts=st.lists(st.sampled_from(WORD_PARTS) | st.text(max_size=4), max_size=40))
def test_counting_word_by_word_equals_encoding(version: Any, parts: list[str]) -> None:
    tokenizer = recipe.Tokenizer.bundled(version)
    text = "".join(parts)
    assert tokenizer.count(text) == tokenizer.count(text) == len(tokenizer.encode(text))


def test_a_vocabulary_that_cuts_elsewhere_is_not_counted_word_by_word() -> None:
    """The token ` of the` spans two words, and a normalizer that drops blanks joins them."""
    settings = json.loads(vocabulary_text("v4.1"))
    text = "one of the words"
    spanning = {"id": 129_000, "content": "e of the", "single_word": False, "lstrip": False, "rstrip": False}
    changes: list[dict[str, Any]] = [
        {"added_tokens": [*settings["added_tokens"], spanning | {"normalized": False, "special": False}]},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ]
    for change in changes:
        tokenizer = recipe.Tokenizer.from_str(json.dumps(settings | change))
        assert tokenizer.count(text) == len(tokenizer.encode(text))


def test_the_image_token_is_right_in_the_short_way_and_missing_in_the_long_way(tokenizer: recipe.Tokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    prompt = recipe.encode_chat(messages)
    assert prompt.token_ids.count(recipe.IMAGE_SPECIAL_TOKEN_ID) == 1
    assert [source.url for source in prompt.image_sources] == ["https://example.org/a.png"]
    body = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
    converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    with pytest.raises(RuntimeError, match="is not in the added vocabulary"):
        recipe.DeepseekV41Encoding().with_tokenizer(tokenizer).encode(converted.conversation)


@pytest.mark.parametrize("version", ["v4", "v4.1"])
@given(texts=st.lists(st.sampled_from(SPELLINGS) | st.text(max_size=5), max_size=12))
def test_user_text_never_becomes_a_control_token(version: Any, texts: list[str]) -> None:
    tokenizer = recipe.Tokenizer.bundled(version)
    text = "".join(texts)
    talk = [recipe.UserMessage(text), recipe.ToolMessage(text)]
    plain = recipe.encode_chat([recipe.UserMessage("x"), recipe.ToolMessage("x")], version=version)
    prompt = recipe.encode_chat(talk, version=version)
    controls = [i for i in prompt.token_ids if i in tokenizer.added_tokens]
    assert controls == [i for i in plain.token_ids if i in tokenizer.added_tokens]
    assert tokenizer.decode_bytes(prompt.token_ids).decode() == prompt.text


def test_pieces_are_encoded_as_by_the_base_model() -> None:
    vocabulary = json.loads(vocabulary_text("v4"))
    vocabulary["added_tokens"] = []
    base = tokenizers.Tokenizer.from_str(json.dumps(vocabulary))
    pieces = ["a b", "<think> 12 34567", "", "数据库 é😀", "\n\n<", "｜DSML｜", "a b"]
    wanted = [base.encode(piece, add_special_tokens=False).ids for piece in pieces]
    assert recipe.Tokenizer.bundled("v4").encode_pieces(pieces) == wanted


def test_a_tokenizer_from_a_file_and_from_bad_text(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(vocabulary_text("v4"), encoding="utf-8")
    loaded = recipe.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode("hi <think>") == recipe.Tokenizer.bundled("v4").encode("hi <think>")
    with pytest.raises(ValueError, match=r"expected the text of a tokenizer\.json"):
        recipe.Tokenizer.from_str("{}")


@given(JSON)
def test_written_json_reads_back(value: Any) -> None:
    for text in (compact_json(value), spaced_json(value, python_floats=True), spaced_json(value, python_floats=False)):
        back = parse_json(text)
        assert compact_json(back) == compact_json(value)
        assert json.loads(text) == value


@given(st.text('{}[]",:\\ntrue 0123456789.eE+-ud8f\n', max_size=30) | JSON.map(json.dumps))
def test_json_is_read_as_the_standard_library_reads_it_where_both_accept(text: str) -> None:
    try:
        value = parse_json(text)
    except JsonSyntaxError:
        value = JsonSyntaxError
    try:
        other = json.loads(text)
    except ValueError:
        assert value is JsonSyntaxError
        return
    if value is not JsonSyntaxError:
        # An integer beyond 64 bits is read as a float, as the API's own reader does.
        assert value == other or "-0" in text or repr(value) == repr(_as_floats(other))
    else:
        assert any(mark in text for mark in ("NaN", "Infinity", "\\u", "e", "E")) or len(text) > 300


def _as_floats(value: Any) -> Any:
    """The value with integers beyond 64 bits as floats."""
    if isinstance(value, dict):
        return {key: _as_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_floats(item) for item in value]
    is_large = type(value) is int and not -(2**63) <= value < 2**64
    return float(value) if is_large else value


def test_json_objects_keep_the_first_place_and_the_last_value() -> None:
    assert list((parse_object('{"a":1,"b":2,"a":3}') or {}).items()) == [("a", 3), ("b", 2)]
    assert parse_object("[1]") is None
    assert parse_object('{"a":1e400}') is None
    assert str((parse_object('{"a":-0}') or {})["a"]) == "-0.0"


def test_floats_are_spelled_as_the_prompts_spell_them() -> None:
    spelled = {
        1e-7: "1e-7",
        1e16: "1e+16",
        1e-5: "0.00001",
        1.5e-5: "0.000015",
        5e-324: "5e-324",
        0.1: "0.1",
        -0.0: "-0.0",
    }
    assert {number: float_text(number) for number in spelled} == spelled
    singles = {
        -0.1: "-0.1",
        -123456.79: "-123456.79",
        1e-6: "0.000001",
        1e-7: "1e-7",
        1e13: "1e+13",
        1e12: "1000000000000.0",
    }
    assert {number: f32_text(number) for number in singles} == singles
    assert f32_text(math.inf) == f32_text(math.nan) == "null"
    assert [f32_text(zero) for zero in (0.0, -0.0, 0.0)] == ["0.0", "-0.0", "0.0"]


@given(st.integers(0, 2**32 - 1))
def test_a_single_is_spelled_with_the_fewest_digits_that_read_back(bits: int) -> None:
    number = struct.unpack("f", struct.pack("I", bits))[0]
    text = f32_text(number)
    if text == "null":
        assert not math.isfinite(number)
        return
    assert to_f32(float(text)) == number
    digits = len(text.lower().partition("e")[0].replace(".", "").strip("-0").rstrip("0"))
    assert all(to_f32(float(f"{number:.{p}g}")) != number for p in range(1, digits))


def test_strings_in_error_texts_are_escaped() -> None:
    assert debug_string('a"b\\\n\x00\x1b\u200b\u0301é 😀') == '"a\\"b\\\\\\n\\0\\u{1b}\\u{200b}\\u{301}é 😀"'


def test_a_repeated_piece_costs_nothing_and_changes_nothing(tokenizer: recipe.Tokenizer) -> None:
    rng = random.Random(0)
    pieces = [rng.choice(("a", " b", "c d e", "")) for _ in range(200)]
    assert tokenizer.encode_pieces(pieces) == [tokenizer.encode_pieces([piece])[0] for piece in pieces]
