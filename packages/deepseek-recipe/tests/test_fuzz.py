"""Random requests and outputs, made by mutating recorded ones, raise nothing but the errors that are promised."""

import json
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import deepseek_recipe as recipe

from .case_files import packed_cases
from .output_texts import MARKUP, chunks_of, cut, final
from .request_runner import REQUESTS, encoding, version_of

REQUEST_COUNT = 15_000
OUTPUT_COUNT = 5_000
SOAK_COUNT = 200_000
SCALARS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**64 - 1,
    1.5,
    1e-7,
    1e300,
    "",
    "x",
    "json",
    "\n",
    "<｜image｜>",
)


class Seeds(NamedTuple):
    """What mutations start from: (protocol, body) pairs, parts of bodies, outputs."""

    bodies: list[tuple[str, Any]]
    parts: list[Any]
    outputs: list[str]


def walk(value: Any, limit: int = 40) -> list[Any]:
    """Some of the values inside a value."""
    found, todo = [], [value]
    while todo and len(found) < limit:
        one = todo.pop()
        found.append(one)
        if isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return found


@pytest.fixture(scope="module")
def seeds() -> Seeds:
    inputs = [case["input"] for case in packed_cases("requests")]
    bodies = [(one["protocol"], one["body"]) for one in inputs if "protocol" in one and "body" in one]
    parts = [part for _, body in bodies for part in walk(body)]
    outputs = []
    for case in packed_cases("streams"):
        text = "".join(step.get("text", "") for step in case["input"]["steps"])
        outputs += [text] if text else []
    return Seeds(bodies, parts, outputs)


def mutated(value: Any, rng: random.Random, parts: list[Any]) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(("type", "role", "content", "name", "tools", "strict", "zz"))] = rng.choice(parts)
            case _:
                changed[key] = mutated(changed[key], rng, parts)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:index] + value[index + 1 :]
            case 1:
                return [*value, rng.choice(value)]
            case 2:
                return [*value[:index], rng.choice(parts), *value[index:]]
        return [*value[:index], mutated(value[index], rng, parts), *value[index + 1 :]]
    return rng.choice(parts) if rng.random() < 0.5 else rng.choice(SCALARS)


def options(rng: random.Random) -> recipe.ConversionOptions:
    return recipe.ConversionOptions(
        default_thinking_mode=rng.random() < 0.5,
        reasoning_content_behavior=rng.choice(list(recipe.ReasoningContentBehavior)),
        responses_web_search=rng.choice(list(recipe.WebSearchBehavior)),
        messages_web_search=rng.choice(list(recipe.WebSearchBehavior)),
        lenient=rng.random() < 0.2,
    )


def attempt(do: Callable[[], Any], allowed: type[Exception]) -> tuple[Any, Exception | None]:
    """The result of a call, or the allowed error that it raised; any other error fails the test."""
    try:
        return do(), None
    except allowed as raised:
        return None, raised


def try_request(rng: random.Random, seeds: Seeds) -> str:
    """Run one mutated request through everything; say how it ended."""
    protocol, body = rng.choice(seeds.bodies)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        body = mutated(body, rng, seeds.parts)
    request, problem = attempt(lambda: REQUESTS[protocol](json.dumps(body)), ValueError)
    if request is None:
        assert str(problem).startswith(("invalid request body: ", "invalid JSON request: "))
        return "shape"
    converted, refusal = attempt(lambda: request.convert(options(rng)), recipe.ConversionError)
    if converted is None:
        assert isinstance(refusal, recipe.ConversionError)
        assert 400 <= refusal.status_code < 500
        assert json.loads(refusal.body)["error"]["message"] == str(refusal)
        return "refused"
    rendered = encoding(version_of(converted)).render_conversation(converted.conversation)
    assert all(0 <= start <= end <= len(rendered.prompt) for start, end in rendered.special_ranges)
    return "converted"


def try_output(rng: random.Random, seeds: Seeds) -> None:
    """Parse one mutated output, whole and in pieces."""
    text = rng.choice(seeds.outputs)
    for _ in range(rng.randrange(5)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        text = (
            text[:a] + rng.choice((rng.choice(MARKUP), rng.choice(seeds.outputs)[:40], "")) + text[rng.choice((a, b)) :]
        )
    parsing = recipe.ParsingOptions(
        parse_tool_calls=rng.random() < 0.9,
        starts_in_tool_calls=rng.random() < 0.1,
        thinking_initial_stage=rng.choice((None, *recipe.ThinkingInitialStage)),
        stop_sequences=rng.sample(("STOP", "\n\n", "}", "answer"), rng.choice((0, 0, 1, 2))),
        repair=rng.random() < 0.4,
    )
    whole = final(chunks_of([text]), parsing)
    pieces = cut(text, [rng.randrange(1 + len(text)) for _ in range(rng.randrange(12))])
    assert final(chunks_of(pieces), parsing) == whole


def test_mutated_requests_are_converted_or_refused(seeds: Seeds) -> None:
    rng = random.Random(1)
    ends = [try_request(rng, seeds) for _ in range(REQUEST_COUNT)]
    assert min(ends.count(end) for end in ("shape", "refused", "converted")) > REQUEST_COUNT // 20


def test_mutated_outputs_are_parsed(seeds: Seeds) -> None:
    rng = random.Random(2)
    for _ in range(OUTPUT_COUNT):
        try_output(rng, seeds)


def test_many_more(seeds: Seeds, soak_s: float) -> None:
    """At least SOAK_COUNT cases, and as many as fit into the time."""
    rng = random.Random()
    end = time.monotonic() + soak_s
    count = 0
    while count < SOAK_COUNT or time.monotonic() < end:
        for _ in range(100):
            try_request(rng, seeds)
            try_output(rng, seeds)
        count += 200
