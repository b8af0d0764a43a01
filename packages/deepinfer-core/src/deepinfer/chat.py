"""Chat over a model: messages become a prompt and output becomes a message, exactly as the DeepSeek API does it.

The formats are deepseek-recipe's; running the prompt is `llm.py`'s, which loads this module by name, so that
everything else works where that wheel is missing or a stranger's is installed.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, override

import tokenizers

from deepinfer.engine.constraint import Constraint
from deepinfer.engine.grammar.tool_calls import ToolCalls
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.engine.request import Increment as Generated
from deepinfer.errors import CheckpointError, RequestError
from deepinfer.model.config import ModelConfig
from deepseek_recipe import (
    CompletionParser,
    ConversionError,
    EncodedPrompt,
    Increment,
    InferenceFinishReason,
    Message,
    ThinkingInitialStage,
    Tokenizer,
    ToolDefinition,
    encode_chat,
)

Version = Literal["v4", "v4.1"]


class ChatFormat:
    """The prompt format of one checkpoint, over its own vocabulary."""

    def __init__(self, tokenizer: tokenizers.Tokenizer | None, config: ModelConfig) -> None:
        """Raises CheckpointError for a model without a tokenizer."""
        if tokenizer is None:
            raise CheckpointError("the model has no tokenizer.json: chat needs the model's vocabulary, download it")
        self.version: Version = "v4" if config.family == "deepseek_v4" else "v4.1"
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())

    def encode(self, messages: Sequence[dict[str, Any] | Message], tools: Any, **choices: Any) -> EncodedPrompt:
        """Render and tokenise a conversation; raises RequestError for one that the API would refuse."""
        given = list(messages)
        if not all(isinstance(message, Message) for message in given):
            given = [_as_dict(message) if isinstance(message, Message) else message for message in given]
        try:
            prompt = encode_chat(given, tools, version=self.version, tokenizer=self.tokenizer, **choices)
        except (ConversionError, ValueError, TypeError) as error:
            raise RequestError(f"the conversation cannot become a prompt: {error}") from None
        if prompt.image_sources:
            raise RequestError(f"images are not supported yet, got {len(prompt.image_sources)}: send text only")
        return prompt

    def constrained(
        self,
        params: SamplingParams,
        prompt: EncodedPrompt,
        tools: Sequence[dict[str, Any] | ToolDefinition] | None,
        *,
        constrain: bool | None,
        **choices: Any,
    ) -> SamplingParams:
        """Return `params` with what the tools and the response format of a conversation ask of its answer."""
        constraint = None
        if constrain is not False:
            choice, answer = choices.get("tool_choice", "auto"), choices.get("response_format") or {}
            callable_tools = [_tool(tool) for tool in tools or () if choice != "none"]
            if callable_tools:
                constraint = self._calls(prompt, callable_tools, choice) if constrain or choice != "auto" else None
            else:
                constraint = _answer(answer)
        if constraint is None:
            return params
        if params.structured is not None:
            raise RequestError(
                "structured and a tool_choice or response_format both constrain the answer: leave one out"
            )
        stages = (ThinkingInitialStage.ReasoningStart, ThinkingInitialStage.ReasoningContinuation)
        thinking = prompt.parsing.thinking_initial_stage in stages
        return replace(params, structured=replace(constraint, thinking=thinking))

    def _calls(self, prompt: EncodedPrompt, tools: list[dict[str, Any]], choice: Any) -> Constraint:
        """What a choice of tools allows: "auto", "required", or the one function that it names."""
        if isinstance(choice, dict):
            name = choice.get("function", {}).get("name")
            tools = [tool for tool in tools if tool.get("function", {}).get("name") == name]
        opened = prompt.parsing.starts_in_tool_calls
        calls = ToolCalls(tools=tools, required=choice != "auto", opened=opened, version=self.version)
        return Constraint(tool_calls=calls)

    def parser(self, prompt: EncodedPrompt) -> CompletionParser:
        """A parser for the answer to `prompt`; its calls are repeated byte for byte in the next prompt."""
        return CompletionParser(prompt.parsing, tokenizer=self.tokenizer, exact_replay=True)


def _tool(tool: dict[str, Any] | ToolDefinition) -> dict[str, Any]:
    """A tool in the form of Chat Completions."""
    if isinstance(tool, ToolDefinition):
        return {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
    return tool


def _answer(form: dict[str, Any]) -> Constraint | None:
    """What a response format asks; None for text."""
    match form.get("type"):
        case "json_schema":
            return Constraint(json_schema=form["json_schema"]["schema"])
        case "json_object":
            return Constraint(json_object=True)
        case "regex":
            return Constraint(regex=form["regex"])
    return None


@dataclass
class _Outcome:
    """What a stream leaves when it has ended."""

    message: Message | None = None
    completion: Completion | None = None


class ChatStream(Iterator[Increment]):
    """The increments of an answer as they come; after the last one, `message` and `completion` are there.

    An increment adds to the reasoning, the content, or a tool call's arguments; see `deepseek_recipe.Increment`.
    A stream that is closed, or forgotten, ends its request.
    """

    def __init__(self, steps: Iterator[Generated], parser: CompletionParser) -> None:
        self._outcome = _Outcome()
        # The generator knows nothing of this object: when it is forgotten, so are the generator and its request.
        self._increments = _parsed(steps, parser, self._outcome)

    @override
    def __next__(self) -> Increment:
        return next(self._increments)

    @property
    def message(self) -> Message:
        """The whole message; raises RuntimeError before the stream has ended."""
        return _present(self._outcome.message)

    @property
    def completion(self) -> Completion:
        """The completion behind the message; raises RuntimeError before the stream has ended."""
        return _present(self._outcome.completion)

    def close(self) -> None:
        """End the request, if it has not ended."""
        self._increments.close()

    def read(self) -> "ChatStream":
        """Run to the end; raises RequestError when the request failed."""
        for _ in self._increments:
            pass
        return self


def _parsed(steps: Iterator[Generated], parser: CompletionParser, outcome: _Outcome) -> Generator[Increment]:
    for step in steps:
        if step.token_ids and not parser.finished:
            yield from parser.push(step.token_ids)
        if step.completion is not None:
            outcome.completion = step.completion
    completion = _present(outcome.completion)
    if completion.error is not None:
        raise RequestError(completion.error)
    reason = InferenceFinishReason.Length if completion.finish_reason == "length" else InferenceFinishReason.Stop
    rest, outcome.message = parser.finish(reason)
    yield from rest


def _present[T](value: T | None) -> T:
    if value is None:
        raise RuntimeError("the answer is not complete: iterate to the end of the stream first")
    return value


def _as_dict(message: Message) -> dict[str, Any]:
    """A message object in the form of Chat Completions, to stand among messages of that form."""
    form: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        form["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        form["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        form["tool_call_id"] = message.tool_call_id
    return form
