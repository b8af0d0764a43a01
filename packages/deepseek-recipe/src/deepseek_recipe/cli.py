"""Owns the command `deepseek-recipe`: prompts, token ids and counts of requests, and parsed output, at a terminal.

All the work is done by the package; nothing here is needed to use it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deepseek_recipe.chat_request import ChatCompletionRequest
from deepseek_recipe.encoding import DeepseekV4Encoding, DeepseekV41Encoding
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.inference_chunk import InferenceChunk, InferenceFinishReason
from deepseek_recipe.messages_request import MessagesRequest
from deepseek_recipe.options import ConversationRequest, ConversionOptions, ModelVersion
from deepseek_recipe.parsing_options import ParsingOptions, ThinkingInitialStage
from deepseek_recipe.response_chat import ChatCompletionResponse
from deepseek_recipe.response_messages import MessagesResponse
from deepseek_recipe.response_responses import ResponsesResponse
from deepseek_recipe.responses_request import ResponsesRequest
from deepseek_recipe.simple import EncodedPrompt, chat_options, encode_request
from deepseek_recipe.stream_processor import StreamProcessor
from deepseek_recipe.tokenizer import Tokenizer
from deepseek_recipe.vocabulary import Version

_REQUESTS: Final = {"chat": ChatCompletionRequest, "messages": MessagesRequest, "responses": ResponsesRequest}
_RESPONSES: Final = {"chat": ChatCompletionResponse, "messages": MessagesResponse, "responses": ResponsesResponse}
_VERSIONS: Final[dict[str, Version]] = {"v4": "v4", "v41": "v4.1", "v4.1": "v4.1"}
_MODEL_VERSIONS: Final[dict[Version, ModelVersion]] = {
    "v4": ModelVersion.DeepseekV4Pro,
    "v4.1": ModelVersion.DeepseekV41Flash,
}
_COLOUR, _PLAIN = "\033[1;36m", "\033[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 1 for a request or a file that is not right."""
    options = _parser().parse_args(arguments)
    try:
        run: Any = options.run
        run(options)
    except (ConversionError, ValueError, OSError) as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"deepseek-recipe: {error}{notes}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepseek-recipe", description="API-exact prompts, tokens and parsing for DeepSeek models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("render", _render, "print the prompt of a request"),
        ("encode", _encode, "print the token ids of a request's prompt, as a JSON list"),
        ("count", _count, "print how many tokens a request's prompt, or a text, has"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("file", metavar="REQUEST.json", help="the request; - for standard input")
        _shared(command)
        command.add_argument("--lenient", action="store_true", help="accept what the API refuses but users often send")
        if name == "render":
            command.add_argument("--color", choices=("auto", "always", "never"), default="auto")
        if name == "count":
            command.add_argument("--text", action="store_true", help="the file is plain text, not a request")
    command = commands.add_parser("parse", help="read model output from standard input, print a response")
    command.set_defaults(run=_parse)
    _shared(command)
    command.add_argument("--ids", action="store_true", help="the input is a JSON list of token ids")
    command.add_argument("--no-thinking", action="store_true", help="the output is not one of thinking mode")
    command.add_argument("--repair", action="store_true", help="mend broken tool calls and report what was mended")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a stop sequence")
    return parser


def _shared(command: argparse.ArgumentParser) -> None:
    command.add_argument("--protocol", choices=tuple(_REQUESTS), default="chat")
    command.add_argument("--version", choices=tuple(_VERSIONS), help="model family; by default the model name decides")


def _read(file: str) -> bytes:
    return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()


def _version(options: argparse.Namespace, request: ConversationRequest | None = None) -> Version:
    if request is not None:
        return "v4" if request.model_version is ModelVersion.DeepseekV4Pro else "v4.1"
    return _VERSIONS[options.version or "v41"]


def _convert(options: argparse.Namespace) -> ConversationRequest:
    body = _read(options.file)
    if options.protocol == "chat":
        request: Any = ChatCompletionRequest(body, lenient=options.lenient)
    else:
        request = _REQUESTS[options.protocol](body)
    chosen: Version | None = _VERSIONS[options.version] if options.version else None
    conversion = ConversionOptions()
    if chosen is not None:
        conversion = conversion.with_model_versions_by_name({request.model: _MODEL_VERSIONS[chosen]})
    version: Version = chosen or ("v4" if "V4-" in request.model else "v4.1")
    conversion = conversion.with_special_tokens(chat_options(version).special_tokens).with_lenient(options.lenient)
    converted: ConversationRequest = request.convert(conversion)
    for warning in converted.warnings:
        print(f"deepseek-recipe: mended {warning}", file=sys.stderr)
    return converted


def _encoded(options: argparse.Namespace) -> EncodedPrompt:
    request = _convert(options)
    return encode_request(request, _version(options, request))


def _render(options: argparse.Namespace) -> None:
    request = _convert(options)
    encoding = DeepseekV4Encoding() if _version(options, request) == "v4" else DeepseekV41Encoding()
    encoding = encoding.with_special_tokens(request.parsing_options.special_tokens)
    rendered = encoding.render_conversation(request.conversation)
    text = rendered.prompt
    if options.color == "always" or (options.color == "auto" and sys.stdout.isatty()):
        for start, end in reversed(rendered.special_ranges):
            text = f"{text[:start]}{_COLOUR}{text[start:end]}{_PLAIN}{text[end:]}"
    print(text)


def _encode(options: argparse.Namespace) -> None:
    print(json.dumps(_encoded(options).token_ids))


def _count(options: argparse.Namespace) -> None:
    if options.text:
        print(Tokenizer.bundled(_version(options)).count(_read(options.file).decode()))
    else:
        print(len(_encoded(options).token_ids))


def _parse(options: argparse.Namespace) -> None:
    """Print the response of the protocol for model output."""
    version = _version(options)
    names = {"model": _MODEL_VERSIONS[version]}
    thinking = not options.no_thinking
    conversion = ConversionOptions(default_thinking_mode=thinking).with_model_versions_by_name(names)
    body: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": ""}], "input": ""}
    request_class: Any = _REQUESTS[options.protocol]
    request = request_class(body).convert(conversion)
    parsing = ParsingOptions(
        thinking_initial_stage=ThinkingInitialStage.ReasoningStart if thinking else None,
        stop_sequences=options.stop,
        repair=options.repair,
    )
    processor = StreamProcessor(
        request_class.chunk_generator(request, "response", "model"), parsing, Tokenizer.bundled(version)
    )
    data = _read("-").decode()
    chunk = InferenceChunk.tokens(json.loads(data)) if options.ids else InferenceChunk.text(data.removesuffix("\n"))
    events = processor.push(chunk)
    if not processor.finished:
        events += processor.push(InferenceChunk.finish(InferenceFinishReason.Stop))
    response: Any = _RESPONSES[options.protocol]("response", "model", 0, 0, 0)
    for event in events:
        response.accumulate(event)
    for warning in processor.warnings:
        print(f"deepseek-recipe: mended {warning}", file=sys.stderr)
    print(response.to_json())


if __name__ == "__main__":
    sys.exit(main())
