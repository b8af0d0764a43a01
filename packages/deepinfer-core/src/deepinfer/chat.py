"""Chat over a model: messages become a prompt and output becomes a message, exactly as the DeepSeek API does it.

The formats are deepseek-recipe's; running the prompt is `llm.py`'s, which loads this module by name, so that
everything else works where that wheel is missing or a stranger's is installed.
"""

from collections.abc import Iterator, Sequence
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
        try:
            prompt = encode_chat(messages, tools, version=self.version, tokenizer=self.tokenizer, **choices)
        except (ConversionError, ValueError, TypeError) as error:
            raise RequestError(f"the conversation cannot become a prompt: {error}") from None
        if prompt.image_sources:
            raise RequestError(f"images are not supported yet, got {len(prompt.image_sources)}: send text only")
        return prompt

    def parser(self, prompt: EncodedPrompt) -> CompletionParser:
        """A parser for the answer to `prompt`; its calls are repeated byte for byte in the next prompt."""
        return CompletionParser(prompt.parsing, tokenizer=self.tokenizer, exact_replay=True)


class ChatStream(Iterator[Increment]):
    """The increments of an answer as they come; after the last one, `message` and `completion` are there.

    An increment adds to the reasoning, the content, or a tool call's arguments; see `deepseek_recipe.Increment`.
    """

    def __init__(self, steps: Iterator[Generated], parser: CompletionParser) -> None:
        self._parser = parser
        self._message: Message | None = None
        self._completion: Completion | None = None
        self._increments = self._parsed(steps)

    @override
    def __next__(self) -> Increment:
        return next(self._increments)

    @property
    def message(self) -> Message:
        """The whole message; raises RuntimeError before the stream has ended."""
        if self._message is None:
            raise RuntimeError("the answer is not complete: iterate to the end of the stream first")
        return self._message

    @property
    def completion(self) -> Completion:
        """The completion behind the message; raises RuntimeError before the stream has ended."""
        if self._completion is None:
            raise RuntimeError("the answer is not complete: iterate to the end of the stream first")
        return self._completion

    def read(self) -> "ChatStream":
        """Run to the end; raises RequestError when the request failed."""
        for _ in self._increments:
            pass
        return self

    def _parsed(self, steps: Iterator[Generated]) -> Iterator[Increment]:
        for step in steps:
            if step.token_ids and not self._parser.finished:
                yield from self._parser.push(step.token_ids)
            if step.completion is not None:
                self._completion = step.completion
        assert self._completion is not None
        if self._completion.error is not None:
            raise RequestError(self._completion.error)
        ended = self._completion.finish_reason
        reason = InferenceFinishReason.Length if ended == "length" else InferenceFinishReason.Stop
        rest, self._message = self._parser.finish(reason)
        yield from rest
