"""Chat over a model: messages become a prompt and output becomes a message, exactly as the DeepSeek API does it.

The formats are deepseek-recipe's; running the prompt is `llm.py`'s, which loads this module by name, so that
everything else works where that wheel is missing or a stranger's is installed.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, override

import tokenizers

from deepinfer.engine.request import Completion
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
    Tokenizer,
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

    def parser(self, prompt: EncodedPrompt) -> CompletionParser:
        """A parser for the answer to `prompt`; its calls are repeated byte for byte in the next prompt."""
        return CompletionParser(prompt.parsing, tokenizer=self.tokenizer, exact_replay=True)


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
