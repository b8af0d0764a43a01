"""Model output for property tests: strategies that mix markup of calls and plain text, and ways to run it."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

import deepseek_recipe as recipe

D = "｜DSML｜"
MARKUP = (
    f"\n\n<{D}tool_calls>\n",
    f"\n\n<{D} calls>\n",
    f'<{D}invoke name="f">\n',
    f'<{D} invoke name="g">\n',
    f'<{D}parameter name="q" string="true">',
    f'<{D} parameter name="n" string="false">',
    f"<{D} parameter name='x'>",
    f"</{D}parameter>\n",
    f"</{D} parameter>\n",
    f"</{D}invoke>\n",
    f"</{D} invoke>\n",
    f"</{D}tool_calls>",
    f"</{D} calls>",
    f"<{D}",
    f"</{D}",
    D,
    D[:3],
    "</think>",
    "<think>",
    "</th",
    "<",
    "\n",
    "\n\n",
    "```json\n",
    "\n```",
    '{"a": [1, "}"]}',
    '"',
    'name="',
    "true",
    "1.5",
    "STOP",
    "ST",
    "the answer",
    "é😀",
    " ",
)
OUTPUTS = st.lists(st.sampled_from(MARKUP) | st.text(max_size=6), max_size=30).map("".join)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(("f", "g_2", "get-it")),
        st.dictionaries(
            st.text("abcxyz_", min_size=1, max_size=5),
            st.text(max_size=12).filter(lambda text: D not in text and "</" not in text and "<" not in text)
            | st.integers(-(2**53), 2**53)
            | st.booleans()
            | st.none()
            | st.lists(st.text("ab\n", max_size=4), max_size=3),
            max_size=4,
        ),
    ),
    min_size=1,
    max_size=3,
)
REQUEST = recipe.ChatCompletionRequest(
    {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}], "stream": True}
).convert(recipe.ConversionOptions())
PARSINGS = st.builds(
    lambda **options: options,
    parse_tool_calls=st.booleans(),
    starts_in_tool_calls=st.sampled_from((False, False, True)),
    thinking_initial_stage=st.sampled_from((None, *recipe.ThinkingInitialStage)),
    stop_sequences=st.lists(st.sampled_from(("STOP", "\n\n", "\n", "answer", "T")), max_size=2),
)


def cut(text: str, points: list[int]) -> list[str]:
    """Text cut at some points."""
    places = sorted({point % (len(text) + 1) for point in points} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)] or [""]


def chunks_of(pieces: list[str]) -> list[recipe.InferenceChunk]:
    return [recipe.InferenceChunk.text(piece, 1) for piece in pieces]


def final(
    chunks: list[recipe.InferenceChunk],
    parsing: recipe.ParsingOptions,
    tokenizer: recipe.Tokenizer | None = None,
    reason: recipe.InferenceFinishReason = recipe.InferenceFinishReason.Stop,
) -> tuple[dict[str, Any], list[str]]:
    """The message that chunks add up to, and the names of the warnings."""
    generator = recipe.ChatCompletionRequest.chunk_generator(REQUEST, "ID", "M")
    processor = recipe.StreamProcessor(generator, parsing, tokenizer)
    response = recipe.ChatCompletionResponse("ID", "M", 0, 0, 0)
    events: list[Any] = []
    for chunk in chunks:
        if not processor.finished:
            events += processor.push(chunk)
    if not processor.finished:
        events += processor.push(recipe.InferenceChunk.finish(reason))
    for event in events:
        assert event.to_json().endswith("}")
        response.accumulate(event)
    message: dict[str, Any] = json.loads(response.to_json())["choices"][0]["message"]
    for index, call in enumerate(message.get("tool_calls", ())):
        call["id"] = index
    return message, sorted(warning.partition(":")[0] for warning in processor.warnings)
