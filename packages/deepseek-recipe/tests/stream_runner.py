"""Running a recorded stream case: chunks in, events and the accumulated response out, as plain JSON values."""

import re
from collections.abc import Callable
from typing import Any

import deepseek_recipe as recipe

from .request_runner import REQUESTS, RESPONSES, TokenizerOf

type Json = Any

CALL_ID = re.compile(r"call_(\d{2,})_(ET_)?[A-Za-z0-9]{20}\d{4}(?![A-Za-z0-9])")
CLOCK = re.compile(r'"(created|created_at|completed_at)":\s*(\d{9,})')
CREATED = 1700000001


class Mask:
    """Blanks clock values, and numbers call ids in the order in which they appear."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        def call(match: re.Match[str]) -> str:
            number = self._seen.setdefault(match[0], len(self._seen) + 1)
            return f"call_{match[1]}_{match[2] or ''}#{number}"

        def clock(match: re.Match[str]) -> str:
            return match[0] if match[2] == str(CREATED) else f'"{match[1]}":0'

        return CLOCK.sub(clock, CALL_ID.sub(call, text))


def chunk(given: Json) -> recipe.InferenceChunk:
    """A chunk as a case spells it."""
    make = recipe.InferenceChunk
    if "ready" in given:
        ready = given["ready"] or {}
        options: Json = {"system_fingerprint": ready["fp"]} if "fp" in ready else {}
        if "prompt_tokens" in ready or "hit" in ready:
            options["prompt_usage"] = recipe.PromptUsage(
                prompt_tokens=ready.get("prompt_tokens", 0), prompt_cache_hit_tokens=ready.get("hit", 0)
            )
        return make.ready(**options)
    if "text" in given:
        return make.text(given["text"], given["n"]) if "n" in given else make.text(given["text"])
    if "tokens" in given:
        logprobs = given.get("logprobs")
        if logprobs is None:
            return make.tokens(given["tokens"])
        return make.tokens(given["tokens"], [(float(a), [(i, float(p)) for i, p in top]) for a, top in logprobs])
    names = {reason.value: reason for reason in recipe.InferenceFinishReason}
    return make.finish(names[given["finish"]])


def parsing_options(given: Json) -> recipe.ParsingOptions:
    options = dict(given)
    if options.get("thinking_initial_stage") is not None:
        options["thinking_initial_stage"] = recipe.ThinkingInitialStage[options["thinking_initial_stage"]]
    if "special_tokens" in options:
        options["special_tokens"] = recipe.SpecialTokens(**options["special_tokens"])
    return recipe.ParsingOptions(**options)


def generator_and_parsing(given: Json) -> tuple[Any, recipe.ParsingOptions | None]:
    response_id, model = given.get("id", "ID"), given.get("model", "MODEL")
    parsing: recipe.ParsingOptions | None = None
    generator: Any
    if "generator" in given:
        generator = recipe.MessagesChunkGenerator(response_id, model, given["generator"]["thinking_mode"])
    else:
        request = REQUESTS[given["protocol"]](given["body"])
        echo = request.echo() if given.get("echo") is True else recipe.ResponsesEcho()
        options = dict(given.get("options") or {})
        tokens = options.pop("special_tokens", None)
        conversion = recipe.ConversionOptions(**options)
        if tokens is not None:
            conversion = conversion.with_special_tokens(recipe.SpecialTokens(**tokens))
        converted = request.convert(conversion)
        generator = REQUESTS[given["protocol"]].chunk_generator(converted, response_id, model)
        parsing = converted.parsing_options
        if given.get("echo"):
            generator = generator.with_echo(echo)
    if "namespace_map" in given:
        pairs = {name: (pair[0], pair[1]) for name, pair in given["namespace_map"].items()}
        generator = generator.with_namespace_tool_map(pairs)
    if "signature" in given:
        generator = generator.with_signature(given["signature"])
    return generator, parsing_options(given["parsing"]) if "parsing" in given else parsing


def run(given: Json, tokenizer_of: TokenizerOf) -> Json:
    """The pushes of a case, the response they add up to, and how it ended."""
    generator, parsing = generator_and_parsing(given)
    assert parsing is not None
    name = given.get("tokenizer")
    tokenizer = None if name is None else tokenizer_of("v4" if name == "v4" else "v4.1-streams")
    processor = recipe.StreamProcessor(generator, parsing, tokenizer)
    maker = RESPONSES[given["protocol"]]
    mask, pushes, flat = Mask(), [], []

    def step(do: Callable[[], Any]) -> None:
        try:
            events = do()
        except Exception as raised:  # noqa: BLE001 - the cases say which one
            pushes.append({"error": [type(raised).__name__, str(raised)]})
            return
        pushes.append([[maker.sse_event_name(event), mask(event.to_json())] for event in events or []])
        flat.extend(events or [])

    for one in given["steps"]:
        if "op" in one:
            step(processor.close if one["op"] == "close" else processor.finish)
        else:
            step(lambda one=one: processor.push(chunk(one)))
    if not given.get("no_final_finish"):
        step(processor.finish)
    other = given.get("response", {})
    response = maker(
        other.get("id", given.get("id", "ID")),
        other.get("model", given.get("model", "MODEL")),
        given.get("created", CREATED),
        other.get("prompt_tokens", 7),
        other.get("hit", 2),
    )
    start, end = given.get("take") or (0, len(flat))
    for event in flat[start:end]:
        response.accumulate(event)
    return {
        "pushes": pushes,
        "response": mask(response.to_json()),
        "finished": processor.finished,
        "done": maker.sse_done_data(),
    }
