"""Every recorded case of prompts, requests, token ids and images gives exactly the recorded result."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepseek_recipe as recipe

from .case_files import Case, by_area, compare, folder_cases, packed_cases
from .request_runner import (
    REQUESTS,
    RESPONSES,
    conversation,
    conversion_options,
    encoding,
    enum_name,
    error,
    ids,
    image_source,
    request_body,
    show_rendered,
    show_request,
    version_of,
)

type Json = Any
type TokenizerOf = Callable[[str], recipe.Tokenizer]

CASES = by_area(packed_cases("requests"))


def encoded(given: Any, talk: recipe.Conversation, tokenizer: recipe.Tokenizer) -> Json:
    try:
        return ids(given.with_tokenizer(tokenizer).encode(talk))
    except RuntimeError as raised:
        return error("encode", raised)


def run_render(given: Json, tokenizer_of: TokenizerOf) -> Json:
    try:
        talk = conversation(given["conversation"])
    except ValueError as raised:
        return error("construct", raised)
    made = encoding(given["version"], given.get("special_tokens"))
    shown = show_rendered(made.render_conversation(talk))
    if given.get("encode", True):
        shown["ids"] = encoded(made, talk, tokenizer_of(given.get("tokenizer", given["version"])))
    return shown


def convert(given: Json) -> recipe.ConversationRequest | Json:
    try:
        request = REQUESTS[given["protocol"]](request_body(given))
    except Exception as raised:  # noqa: BLE001 - the cases say which one
        return error("construct", raised)
    try:
        return request.convert(conversion_options(given.get("options")))
    except recipe.ConversionError as raised:
        return error("convert", raised)


def run_convert(given: Json, tokenizer_of: TokenizerOf) -> Json:
    converted = convert(given)
    if not isinstance(converted, recipe.ConversationRequest):
        return converted
    shown = show_request(converted)
    if given.get("render", True):
        version = version_of(converted)
        made = encoding(version, (given.get("options") or {}).get("special_tokens"))
        shown |= show_rendered(made.render_conversation(converted.conversation))
        if given.get("encode", True):
            shown["ids"] = encoded(made, converted.conversation, tokenizer_of(version))
    return shown


def run_tokenize(given: Json, tokenizer_of: TokenizerOf) -> Json:
    return {"ids": ids(tokenizer_of(given["tokenizer"]).encode(given["text"]))}


def run_encode(given: Json, tokenizer_of: TokenizerOf) -> Json:
    made = encoding(given["version"], given.get("special_tokens"))
    tokenizer = tokenizer_of(given.get("tokenizer", given["version"]))
    shown = encoded(made, conversation(given["conversation"]), tokenizer)
    return shown if isinstance(shown, dict) and "error" in shown else {"ids": shown}


def run_max_tokens(given: Json, tokenizer_of: TokenizerOf) -> Json:
    converted = convert(given)
    resolved: Json = []
    for prompt_tokens, limit in given["pairs"]:
        try:
            resolved.append(converted.resolve_max_tokens(prompt_tokens, limit))
        except recipe.ConversionError as raised:
            resolved.append(error("resolve", raised))
    return {"resolved": resolved}


def run_namespace_map(given: Json, tokenizer_of: TokenizerOf) -> Json:
    found = recipe.ResponsesRequest(request_body(given)).namespace_tool_map(conversion_options(given.get("options")))
    return {"map": {name: list(found[name]) for name in sorted(found)}}


def run_echo(given: Json, tokenizer_of: TokenizerOf) -> Json:
    echo = recipe.ResponsesRequest(request_body(given)).echo()
    names = ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "user")
    return {name: getattr(echo, name) for name in names}


def run_image_tokens(given: Json, tokenizer_of: TokenizerOf) -> Json:
    groups = [[recipe.ImageInfo(b"", width, height) for width, height in group] for group in given["groups"]]
    return {"adjustments": [recipe.MultiModalData(group).image_token_adjustment() for group in groups]}


def webp_facts(data: bytes) -> Json:
    """Format and size of an encoded image, from its header."""
    assert data[:4] == b"RIFF"
    assert data[8:12] == b"WEBP"
    match data[12:16]:
        case b"VP8X":
            return ["webp", 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")]
        case b"VP8 ":
            sides = int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
            return ["webp", *sides]
    packed = int.from_bytes(data[21:25], "little")
    return ["webp", 1 + (packed & 0x3FFF), 1 + ((packed >> 14) & 0x3FFF)]


def run_preprocess(given: Json, tokenizer_of: TokenizerOf) -> Json:
    options = recipe.PreprocessOptions(given["detail"], given["max_dimension_px"], given["low_detail_max_dimension_px"])
    try:
        image = recipe.OpenCvImagePreprocessor().preprocess(base64.b64decode(given["data_b64"]), options)
    except recipe.ImageError as raised:
        return error("preprocess", raised)
    return {"width": image.width, "height": image.height, "data": webp_facts(image.data)}


def run_resolve(given: Json, tokenizer_of: TokenizerOf) -> Json:
    quota = recipe.ImageQuota()
    resolver = recipe.ImageResolver(recipe.ReqwestImageFetcher(), recipe.OpenCvImagePreprocessor())
    shown: Json = []
    for call in given["calls"]:
        sources = [image_source(source) for source in call for _ in range(source.get("times", 1))]
        try:
            data = resolver.resolve(sources, quota)
            sizes = [[image.width, image.height] for image in data.images]
            adjustment = data.image_token_adjustment()
            shown.append({"sizes": sizes[:8], "n": len(sizes), "empty": data.is_empty(), "adjustment": adjustment})
        except recipe.ImageError as raised:
            shown.append(error("resolve", raised))
        shown.append({"quota": [quota.image_count(), quota.byte_size()]})
    return {"calls": shown}


def attempt(use: Callable[[], object]) -> Json:
    try:
        use()
    except RuntimeError as raised:
        return error("use", raised)
    return "ok"


def run_reuse(given: Json, tokenizer_of: TokenizerOf) -> Json:
    request = REQUESTS[given["protocol"]](given["body"])
    converted = request.convert(conversion_options(given.get("options")))
    shown = {
        "convert_again": attempt(lambda: request.convert(recipe.ConversionOptions())),
        "model_again": attempt(lambda: request.model),
    }
    generator = REQUESTS[given["protocol"]].chunk_generator(converted, "ID", "M")
    processor = recipe.StreamProcessor(generator, converted.parsing_options)
    shown["generator_again"] = attempt(lambda: recipe.StreamProcessor(generator, converted.parsing_options))
    event = processor.push(recipe.InferenceChunk.ready())[0]
    make_response = RESPONSES[given["protocol"]]
    make_response("ID", "M", 1, 2, 1).accumulate(event)
    shown["event_again"] = attempt(lambda: make_response("ID", "M", 1, 2, 1).accumulate(event))
    return shown


def run_api(given: Json, tokenizer_of: TokenizerOf) -> Json:
    return API[given["what"]](given)


def special_tokens(given: Json) -> Json:
    table = recipe.SpecialTokens(**given.get("overrides", {}))
    kinds = {name: recipe.SpecialToken[name] for name in given["names"]}
    return {"tokens": {name: [kind.default_str(), table.token(kind)] for name, kind in kinds.items()}}


def options_defaults(given: Json) -> Json:
    options = recipe.ConversionOptions()
    return {
        "default_thinking_mode": options.default_thinking_mode,
        "models": {name: enum_name(version) for name, version in sorted(options.model_versions_by_name.items())},
        "bounds": [options.thinking_max_tokens_upper_bound, options.non_thinking_max_tokens_upper_bound],
        "reasoning": enum_name(options.reasoning_content_behavior),
        "web": [enum_name(options.responses_web_search), enum_name(options.messages_web_search)],
        "image": options.special_tokens.token(recipe.SpecialToken.Image),
    }


def parsing_defaults(given: Json) -> Json:
    parsing = recipe.ParsingOptions()
    flags = [parsing.parse_tool_calls, parsing.starts_in_tool_calls, parsing.parse_json_output]
    return {"v": [*flags, parsing.thinking_initial_stage, parsing.stop_sequences]}


def conversation_request(given: Json) -> Json:
    version = recipe.ModelVersion[given["model_version"]]
    shown = show_request(recipe.ConversationRequest(conversation(given["conversation"]), version))
    return {name: shown[name] for name in ("model_version", "stream", "inference", "parsing")}


def message_properties(given: Json) -> Json:
    messages = (
        recipe.SystemMessage("a"),
        recipe.UserMessage("b"),
        recipe.AssistantMessage("c"),
        recipe.ToolMessage("d"),
        recipe.LatestReminderMessage("e"),
    )
    return {
        "v": [
            [m.role, m.content, m.reasoning_content, m.tool_calls is None, m.tool_call_id, m.prefix, m.image_sources]
            for m in messages
        ]
    }


def no_tokenizer(given: Json) -> Json:
    with pytest.raises(RuntimeError) as raised:
        encoding(given["version"]).encode(recipe.Conversation())
    return error("encode", raised.value)


def image_sources(given: Json) -> Json:
    sources = (
        recipe.UrlImageSource("http://h/x"),
        recipe.DataUrlImageSource("data:,x", "low", path="p"),
        recipe.BytesImageSource(b"ab", detail="auto"),
    )
    return {"v": [[s.kind, s.detail, s.path, s.url, s.data_url, s.data and list(s.data)] for s in sources]}


def chunk_properties(given: Json) -> Json:
    chunk = recipe.InferenceChunk
    usage = recipe.PromptUsage(prompt_tokens=5, prompt_cache_hit_tokens=2)
    chunks = (
        chunk.ready(),
        chunk.ready(prompt_usage=usage, system_fingerprint="fp"),
        chunk.text("a"),
        chunk.text("b", 3),
        chunk.tokens([1, 2]),
        chunk.finish(recipe.InferenceFinishReason.Length),
    )
    shown = []
    for one in chunks:
        usage_of = one.prompt_usage
        counts = None if usage_of is None else [usage_of.prompt_tokens, usage_of.prompt_cache_hit_tokens]
        facts = [one.kind, one.content, one.token_ids, enum_name(one.finish_reason), counts, one.token_count]
        shown.append([*facts, one.system_fingerprint])
    return {"v": shown}


API: dict[str, Callable[[Json], Json]] = {
    "names": lambda given: {"missing": [name for name in given["names"] if not hasattr(recipe, name)]},
    "special_tokens": special_tokens,
    "image_token_id": lambda given: {"id": recipe.IMAGE_SPECIAL_TOKEN_ID},
    "options_defaults": options_defaults,
    "parsing_defaults": parsing_defaults,
    "stages": lambda given: {"v": {stage.name: stage.starts_in_reasoning() for stage in recipe.ThinkingInitialStage}},
    "conversation_request": conversation_request,
    "message_properties": message_properties,
    "no_tokenizer": no_tokenizer,
    "chunk_properties": chunk_properties,
    "image_sources": image_sources,
}
KINDS: dict[str, Callable[[Json, TokenizerOf], Json]] = {
    "render": run_render,
    "convert": run_convert,
    "tokenize": run_tokenize,
    "encode": run_encode,
    "max_tokens": run_max_tokens,
    "namespace_map": run_namespace_map,
    "echo": run_echo,
    "image_tokens": run_image_tokens,
    "preprocess": run_preprocess,
    "resolve": run_resolve,
    "reuse": run_reuse,
    "api": run_api,
}


def failures(cases: list[Case], tokenizer_of: TokenizerOf) -> list[str]:
    results = ((case, KINDS[case["input"]["kind"]](case["input"], tokenizer_of)) for case in cases)
    return [line for case, got in results if (line := compare(case, json.loads(json.dumps(got))))]


def test_all_cases_are_there() -> None:
    assert sum(map(len, CASES.values())) == 2487


@pytest.mark.parametrize("area", CASES)
def test_cases(area: str, tokenizer_of: TokenizerOf) -> None:
    assert failures(CASES[area], tokenizer_of) == []


def test_cases_of_a_folder(extra_data: Path, tokenizer_of: TokenizerOf) -> None:
    cases = [case for case in folder_cases(extra_data / "vectors" / "recipe") if "kind" in case["input"]]
    assert cases
    assert failures(cases, tokenizer_of) == []
