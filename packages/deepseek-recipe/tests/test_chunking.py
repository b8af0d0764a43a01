"""What comes out does not depend on how the output is cut into chunks, and no output makes parsing fail."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

import deepseek_recipe as recipe

from .output_texts import OUTPUTS, PARSINGS, chunks_of, cut, final

POINTS = st.lists(st.integers(0, 400), max_size=12)


@given(OUTPUTS, POINTS, PARSINGS)
def test_any_split_of_text_gives_the_same_message(output: str, points: list[int], parsing: dict[str, object]) -> None:
    whole, _ = final(chunks_of([output]), recipe.ParsingOptions(**parsing))
    split, _ = final(chunks_of(cut(output, points)), recipe.ParsingOptions(**parsing))
    single, _ = final(chunks_of(list(output)), recipe.ParsingOptions(**parsing))
    assert split == whole
    assert single == whole


@given(OUTPUTS, POINTS, PARSINGS)
def test_any_split_of_ids_gives_the_same_message(
    tokenizer: recipe.Tokenizer, output: str, points: list[int], parsing: dict[str, object]
) -> None:
    ids = tokenizer.encode(output)
    places = sorted({point % (len(ids) + 1) for point in points} | {0, len(ids)})
    parts = [ids[a:b] for a, b in pairwise(places)]
    chunks = [recipe.InferenceChunk.tokens(part) for part in parts]
    whole, _ = final([recipe.InferenceChunk.tokens(ids)], recipe.ParsingOptions(**parsing), tokenizer)
    split, _ = final(chunks, recipe.ParsingOptions(**parsing), tokenizer)
    if not output.endswith("\ufffd"):
        assert split == whole


@given(OUTPUTS, POINTS, PARSINGS, st.booleans())
def test_repaired_output_does_not_depend_on_the_split(
    output: str, points: list[int], parsing: dict[str, object], json_mode: bool
) -> None:
    options = recipe.ParsingOptions(repair=True, parse_json_output=json_mode, **parsing)
    whole = final(chunks_of([output]), options)
    assert final(chunks_of(cut(output, points)), options) == whole
    assert final(chunks_of(list(output)), options) == whole


@given(OUTPUTS, PARSINGS)
def test_repaired_arguments_are_json_objects(output: str, parsing: dict[str, object]) -> None:
    message, _ = final(chunks_of([output]), recipe.ParsingOptions(repair=True, **parsing))
    for call in message.get("tool_calls", ()):
        pairs = json.loads(call["function"]["arguments"], object_pairs_hook=list)
        assert len({name for name, _ in pairs}) == len(pairs)


@given(st.binary(max_size=200), st.integers(1, 7), PARSINGS, st.booleans())
def test_no_bytes_make_parsing_fail(
    tokenizer: recipe.Tokenizer, data: bytes, size: int, parsing: dict[str, object], repair: bool
) -> None:
    byte_token = {tokenizer.token_bytes[token_id]: token_id for token_id in range(400)}
    ids = [byte_token.get(bytes([byte]), byte) for byte in data]
    chunks = [recipe.InferenceChunk.tokens(ids[i : i + size]) for i in range(0, len(ids), size)]
    final(chunks, recipe.ParsingOptions(repair=repair, **parsing), tokenizer)


@given(st.lists(st.integers(0, 130_000), max_size=40), st.booleans(), st.booleans())
def test_no_ids_make_parsing_fail(tokenizer: recipe.Tokenizer, ids: list[int], json_mode: bool, repair: bool) -> None:
    options = recipe.ParsingOptions(parse_json_output=json_mode, repair=repair)
    final([recipe.InferenceChunk.tokens(ids)], options, tokenizer)


@given(OUTPUTS)
def test_with_repair_every_token_is_counted(tokenizer: recipe.Tokenizer, output: str) -> None:
    ids = tokenizer.encode(output)
    parser = recipe.StreamProcessor(
        recipe.MessagesChunkGenerator("ID", "M", False), recipe.ParsingOptions(repair=True), tokenizer
    )
    events = [event for token_id in ids for event in parser.push(recipe.InferenceChunk.tokens([token_id]))]
    events += parser.finish()
    usage = json.loads(events[-2].to_json())["usage"]
    assert usage["output_tokens"] == len(ids)
