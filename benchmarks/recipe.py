"""Speed of deepseek-recipe: prompts against `tokenizers` alone on the same pieces, and streaming in tokens per second.

    python benchmarks/recipe.py [--tokens 100000] [--repeat 7]

The first table interleaves both sides in one run and gives the ratio of their best times. The second is processor time
of this process: push of every chunk and to_json of every event, for three protocols.
"""

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import tokenizers

import deepseek_recipe as recipe
from deepseek_recipe.encoding import encode_prompt
from deepseek_recipe.vocabulary import vocabulary_text

WORD_TEXT = (
    "the request failed because of a missing index on orders.created_at; retry with exponential backoff and log "
    'def handler(event, context):\n    return {"status": 200, "body": json.dumps(rows)}\n '
    "数据库 连接 超时 需要 增加 重试 机制 并 记录 日志 。 résumé naïve 12,345.67 0xFF  https://example.org/a?b=c#d "
    "\n\n | col | val |\n"
)
WORDS = WORD_TEXT.split(" ")
PARAGRAPH = (
    "The quick brown fox jumps over the lazy dog; 1 < 2 and 3 > 2.\n\n- 第一，检查输入 😀\n"
    '- then write the code: `x = {"a": [1, 2]}`\n'
)
D = "｜DSML｜"


def words(rng: random.Random, count: int) -> str:
    """Random text of some words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def conversation(tokens: int) -> recipe.Conversation:
    """A conversation of about this many tokens, with many turns, tool calls and results."""
    rng = random.Random(0)
    properties = {f"p{i}": {"type": "string", "description": words(rng, 8)} for i in range(6)}
    schema = {"type": "object", "properties": properties, "required": ["p0"]}
    tools = [recipe.ToolDefinition(f"tool_{i:02d}", words(rng, 30), schema) for i in range(24)]
    messages: list[recipe.Message] = [recipe.SystemMessage(words(rng, 400))]
    written = number = 0
    while written < tokens * 0.43:
        messages.append(recipe.UserMessage(words(rng, 60)))
        for _ in range(4):
            calls = []
            for _ in range(2):
                number += 1
                arguments = {"p0": words(rng, 40), "p1": number, "p2": [number, {"a": words(rng, 10)}]}
                text = json.dumps(arguments, ensure_ascii=False)
                calls.append(recipe.ToolCall(f"call_{number:04d}", f"tool_{number % 24:02d}", text))
            messages.append(recipe.AssistantMessage("", words(rng, 80), calls))
            messages += [recipe.ToolMessage(words(rng, 220), call.id) for call in reversed(calls)]
        messages.append(recipe.AssistantMessage(words(rng, 90), words(rng, 40)))
        written += 60 + 4 * 620 + 130
    return recipe.Conversation([*messages, recipe.UserMessage(words(rng, 20))], tools=tools)


def best(repeat: int, *sides: Callable[[], object]) -> list[float]:
    """The best time of each side, taken in turns."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeat):
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def prompts(tokens: int, repeat: int) -> None:
    """Render and encode against encode_batch alone."""
    print("| version | tokens | render | render + encode | encode_batch alone | speed, ratio |")
    print("|---|---|---|---|---|---|")
    for version, encoding in (("v4", recipe.DeepseekV4Encoding()), ("v4.1", recipe.DeepseekV41Encoding())):
        text = vocabulary_text("v4" if version == "v4" else "v4.1")
        tokenizer, talk = recipe.Tokenizer.from_str(text), conversation(tokens)
        rendered = encoding.render_conversation(talk)
        plain = json.loads(text) | {"added_tokens": []}
        bare = tokenizers.Tokenizer.from_str(json.dumps(plain))
        ends = [0, *(end for _, end in rendered.special_ranges)]
        starts = [*(start for start, _ in rendered.special_ranges), len(rendered.prompt)]
        pieces = [piece for a, b in zip(ends, starts, strict=True) if (piece := rendered.prompt[a:b])]
        attached = encoding.with_tokenizer(tokenizer)

        def alone(bare: tokenizers.Tokenizer = bare, pieces: list[str] = pieces) -> list[list[int]]:
            return [one.ids for one in bare.encode_batch_fast(pieces, add_special_tokens=False)]

        def ours(attached: Any = attached, talk: recipe.Conversation = talk) -> list[int]:
            ids: list[int] = attached.encode(talk)
            return ids

        assert len(ours()) == sum(map(len, alone())) + len(rendered.special_ranges)
        assert ours() == encode_prompt(rendered, tokenizer)
        times = best(repeat, lambda e=encoding, t=talk: e.render_conversation(t), ours, alone)
        shown = " | ".join(f"{one * 1000:.1f} ms" for one in times)
        print(f"| {version} | {len(ours())} | {shown} | {times[2] / times[1]:.2f} |")


def output(tokenizer: recipe.Tokenizer, tokens: int) -> str:
    """Reasoning, an answer and a call with a long argument."""
    part = PARAGRAPH * max(1, tokens // len(tokenizer.encode(PARAGRAPH)) // 3)
    return (
        f'{part}\n</think>\n\n{part}\n\n<{D} calls>\n<{D} invoke name="f">\n'
        f'<{D} parameter name="code" string="true">{part}</{D} parameter>\n</{D} invoke>\n</{D} calls>'
    )


def chunks(tokenizer: recipe.Tokenizer, ids: list[int], kind: str, size: int) -> list[recipe.InferenceChunk]:
    """The ids in chunks, as ids or as decoded text."""
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    if kind == "ids":
        return [recipe.InferenceChunk.tokens(part) for part in parts]
    made, held = [], b""
    for part in parts:
        held += tokenizer.decode_bytes(part)
        text = held.decode("utf-8", "ignore")
        held = held[len(text.encode()) :]
        made.append(recipe.InferenceChunk.text(text, len(part)))
    return made


def generators() -> dict[str, Callable[[], tuple[Any, recipe.ParsingOptions]]]:
    """For each protocol, what makes a fresh generator."""
    user = [{"role": "user", "content": "x"}]
    function = {"type": "function", "function": {"name": "f"}}
    tool = {"name": "f", "input_schema": {"type": "object"}}
    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        "chat": (recipe.ChatCompletionRequest, {"messages": user, "tools": [function]}),
        "messages": (recipe.MessagesRequest, {"messages": user, "tools": [tool]}),
        "responses": (recipe.ResponsesRequest, {"input": "x", "tools": [{"type": "function", "name": "f"}]}),
    }

    def maker(request: Any, body: dict[str, Any]) -> Callable[[], tuple[Any, recipe.ParsingOptions]]:
        def make() -> tuple[Any, recipe.ParsingOptions]:
            full = body | {"model": "DeepSeek-V4.1-Flash", "stream": True}
            converted = request(full).convert(recipe.ConversionOptions())
            return request.chunk_generator(converted, "ID", "M"), converted.parsing_options

        return make

    return {name: maker(*pair) for name, pair in bodies.items()}


def tenths(
    make: Callable[[], tuple[Any, recipe.ParsingOptions]],
    tokenizer: recipe.Tokenizer,
    sent: list[recipe.InferenceChunk],
) -> list[float]:
    """Processor time of each tenth of one stream, the last with the closing events."""
    generator, parsing = make()
    processor = recipe.StreamProcessor(generator, parsing, tokenizer)
    whole = [recipe.InferenceChunk.ready(), *sent, recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)]
    size = len(whole) // 10 + 1
    times = []
    for first in range(0, len(whole), size):
        start = time.process_time()
        for chunk in whole[first : first + size]:
            for event in processor.push(chunk):
                event.to_json()
        times.append(time.process_time() - start)
    return times


def streams(repeat: int) -> None:
    """Tokens per second, how time grows with length, and memory."""
    tokenizer = recipe.Tokenizer.bundled("v4.1")
    ids, more = (tokenizer.encode(output(tokenizer, count)) for count in (12_000, 120_000))
    print("\n| protocol | chunks | tokens a chunk | tokens/s | 9th tenth / 2nd tenth of 10 times the length |")
    print("|---|---|---|---|---|")
    for name, make in generators().items():
        for kind in ("text", "ids"):
            for size in (1, 6):
                sent, long = chunks(tokenizer, ids, kind, size), chunks(tokenizer, more, kind, size)
                once = min(sum(tenths(make, tokenizer, sent)) for _ in range(repeat))
                runs = [tenths(make, tokenizer, long) for _ in range(max(1, repeat // 2))]
                growth = min(run[8] for run in runs) / min(run[1] for run in runs)
                print(f"| {name} | {kind} | {size} | {len(ids) / once:,.0f} | {growth:.2f} |")
    processor = recipe.StreamProcessor(
        recipe.MessagesChunkGenerator("ID", "M", False), recipe.ParsingOptions(), tokenizer
    )
    word = recipe.InferenceChunk.text(" word", 1)
    processor.push(word)
    tracemalloc.start()
    for _ in range(1_000_000):
        for event in processor.push(word):
            event.to_json()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"\nMemory grown over a million tokens of a Messages stream: {grown:,} bytes.")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="length of the conversation")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    prompts(options.tokens, options.repeat)
    streams(options.repeat)


if __name__ == "__main__":
    main()
