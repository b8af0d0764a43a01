"""Running a recorded request case: prompts, conversions, token ids, images, interface facts, as plain JSON values."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import deepseek_recipe as recipe

type Json = Any
type TokenizerOf = Callable[[str], recipe.Tokenizer]

CALL_ID = re.compile(r"call_(\d\d)_(ET_)?[A-Za-z0-9]{20}\d{4}(?![A-Za-z0-9])")
REQUESTS: dict[str, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "messages": recipe.MessagesRequest,
    "responses": recipe.ResponsesRequest,
}
RESPONSES: dict[str, Any] = {
    "chat": recipe.ChatCompletionResponse,
    "messages": recipe.MessagesResponse,
    "responses": recipe.ResponsesResponse,
}


def error(stage: str, raised: Exception) -> Json:
    """An exception as the cases show it."""
    shown: Json = {"stage": stage, "type": type(raised).__name__}
    for name in ("status_code", "body", "kind", "is_retryable"):
        if hasattr(raised, name):
            shown[name] = getattr(raised, name)
    return {"error": shown | {"message": str(raised)}}


def ids(token_ids: list[int]) -> Json:
    """Token ids, long lists by their digest."""
    if len(token_ids) <= 400:
        return token_ids
    digest = hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
    return {"n": len(token_ids), "sha256": digest, "head": token_ids[:12], "tail": token_ids[-12:]}


def enum_name(value: Any) -> str | None:
    """The name of an enum member."""
    return None if value is None else value.name


def image_source(given: Json) -> recipe.ImageSource:
    options = {key: given[key] for key in ("detail", "path") if key in given}
    if given["kind"] == "bytes":
        return recipe.BytesImageSource(base64.b64decode(given["data_b64"]), **options)
    if given["kind"] == "url":
        return recipe.UrlImageSource(given["url"], **options)
    return recipe.DataUrlImageSource(given["data_url"], **options)


def show_image(source: recipe.ImageSource) -> Json:
    reference = source.url or source.data_url or base64.b64encode(source.data or b"").decode()
    return {"kind": source.kind, "detail": source.detail, "path": source.path, "ref": reference}


def message(given: Json) -> recipe.Message:
    images = [image_source(image) for image in given["image_sources"]] if given.get("image_sources") else None
    if images is None and given.get("image_sources") is not None:
        images = []
    options = {"image_token": given["image_token"]} if "image_token" in given else {}
    match given["role"]:
        case "system":
            tools = given.get("tools")
            defined = None if tools is None else [recipe.ToolDefinition(**tool) for tool in tools]
            return recipe.SystemMessage(given["content"], images, defined, **options)
        case "user":
            return recipe.UserMessage(given["content"], images, **options)
        case "tool":
            return recipe.ToolMessage(given["content"], given.get("tool_call_id"), images, **options)
        case "latest_reminder":
            return recipe.LatestReminderMessage(given["content"])
    calls = given.get("tool_calls")
    made = None if calls is None else [recipe.ToolCall(**call) for call in calls]
    return recipe.AssistantMessage(given["content"], given.get("reasoning_content"), made, given.get("prefix", False))


def conversation(given: Json) -> recipe.Conversation:
    names = ("thinking_mode", "tool_choice", "reasoning_effort", "response_format", "response_schema", "response_regex")
    options = {name: given[name] for name in names if name in given}
    if "tools" in given:
        options["tools"] = [recipe.ToolDefinition(**tool) for tool in given["tools"]]
    return recipe.Conversation([message(one) for one in given.get("messages", [])], **options)


def encoding(version: str, tokens: Json = None) -> Any:
    made: Any = recipe.DeepseekV4Encoding() if version == "v4" else recipe.DeepseekV41Encoding()
    return made.with_special_tokens(recipe.SpecialTokens(**tokens)) if tokens else made


def show_rendered(rendered: recipe.RenderedPrompt) -> Json:
    return {
        "prompt": rendered.prompt,
        "special_ranges": [list(span) for span in rendered.special_ranges],
        "images": [show_image(source) for source in rendered.image_sources],
    }


def conversion_options(given: Json) -> recipe.ConversionOptions:
    given = dict(given or {})
    made: Json = {}
    for name in ("default_thinking_mode", "thinking_max_tokens_upper_bound", "non_thinking_max_tokens_upper_bound"):
        if name in given:
            made[name] = given[name]
    if "reasoning_content_behavior" in given:
        made["reasoning_content_behavior"] = recipe.ReasoningContentBehavior[given["reasoning_content_behavior"]]
    for name in ("responses_web_search", "messages_web_search"):
        if name in given:
            made[name] = recipe.WebSearchBehavior[given[name]]
    options = recipe.ConversionOptions(**made)
    for alias, version in given.get("aliases", {}).items():
        options = options.with_model_alias(alias, recipe.ModelVersion[version])
    if "models" in given:
        models = {name: recipe.ModelVersion[version] for name, version in given["models"].items()}
        options = options.with_model_versions_by_name(models)
    if "special_tokens" in given:
        options = options.with_special_tokens(recipe.SpecialTokens(**given["special_tokens"]))
    return options


def python_body(name: str, body: Json) -> Json:
    """A request body that JSON text cannot spell."""
    if name.startswith("depth"):
        value: Json = 1
        for _ in range(int(name[5:])):
            value = [value]
        return body | {"zz": value}
    values = {
        "nan": float("nan"),
        "inf": float("inf"),
        "bigint": 10**30,
        "negbigint": -(10**20),
        "set": {"a"},
        "bytes": b"bytes",
        "object": object(),
        "int_key": {1: 2},
        "tuple": (1, ["x"]),
        "surrogate": "\ud800",
    }
    return body | {"zz": values[name]}


def request_body(given: Json) -> Json:
    if "raw" in given:
        return given["raw"]
    if "raw_b64" in given:
        return base64.b64decode(given["raw_b64"])
    if "py" in given:
        return python_body(given["py"], given["body"])
    if given.get("as") == "json":
        return json.dumps(given["body"], ensure_ascii=False).encode()
    return json.dumps(given["body"]) if given.get("as") == "str" else given["body"]


def show_message(shown: recipe.Message) -> Json:
    result: Json = {"role": shown.role, "content": shown.content}
    if shown.reasoning_content is not None:
        result["reasoning_content"] = shown.reasoning_content
    if shown.tool_calls is not None:
        result["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in shown.tool_calls]
    if shown.tool_call_id is not None:
        result["tool_call_id"] = shown.tool_call_id
    if shown.prefix:
        result["prefix"] = True
    if shown.image_sources:
        result["image_sources"] = [show_image(source) for source in shown.image_sources]
    if shown.tools is not None:
        result["tools"] = [tool.name for tool in shown.tools]
    return result


def show_request(converted: recipe.ConversationRequest) -> Json:
    """A converted request."""
    talk, sampling, parsing = converted.conversation, converted.inference_options, converted.parsing_options
    tool_members = ("name", "description", "parameters", "strict", "defer_loading")
    constraint = sampling.output_constraint
    shown_talk = {
        "messages": [show_message(one) for one in talk.messages],
        "thinking_mode": talk.thinking_mode,
        "tools": [{name: getattr(tool, name) for name in tool_members} for tool in talk.tools],
    }
    names = ("tool_choice", "reasoning_effort", "response_format", "response_schema", "response_regex")
    shown_talk |= {name: getattr(talk, name) for name in names}
    shown_sampling: Json = {
        name: getattr(sampling, name)
        for name in ("max_tokens", "temperature", "top_p", "logprobs", "top_logprobs", "seed")
    }
    shown_sampling["output_constraint"] = constraint and {"kind": constraint.kind, "schema": constraint.schema}
    shown_parsing: Json = {
        name: getattr(parsing, name) for name in ("parse_tool_calls", "starts_in_tool_calls", "parse_json_output")
    }
    shown_parsing["thinking_initial_stage"] = enum_name(parsing.thinking_initial_stage)
    shown_parsing["stop_sequences"] = parsing.stop_sequences
    return {
        "model_version": enum_name(converted.model_version),
        "stream": converted.stream,
        "conversation": shown_talk,
        "inference": shown_sampling,
        "parsing": shown_parsing,
    }


def version_of(converted: recipe.ConversationRequest) -> str:
    return "v4" if converted.model_version is recipe.ModelVersion.DeepseekV4Pro else "v4.1"
