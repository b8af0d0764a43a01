"""Owns turning a conversation into a prompt and into token ids, for V4 and V4.1.

The order of a prompt is in `render_v4` and `render_v41`; ids of plain pieces come from `tokenizer`.
"""

from collections.abc import Callable
from copy import copy
from typing import Self

from deepseek_recipe.conversation import Conversation, RenderedPrompt
from deepseek_recipe.render_v4 import render_v4
from deepseek_recipe.render_v41 import render_v41
from deepseek_recipe.special_tokens import SpecialTokens
from deepseek_recipe.tokenizer import Tokenizer

type _Render = Callable[[Conversation, SpecialTokens], RenderedPrompt]


class _Encoding:
    """Renders conversations; with a tokenizer attached, encodes them too. `with_*` return changed copies."""

    def __init__(self, render: _Render) -> None:
        self._render = render
        self._tokenizer: Tokenizer | None = None
        self._tokens = SpecialTokens()

    def with_tokenizer(self, tokenizer: Tokenizer) -> Self:
        """A copy that encodes with `tokenizer`."""
        return self._copy(tokenizer, self._tokens)

    def with_special_tokens(self, special_tokens: SpecialTokens) -> Self:
        """A copy that spells control tokens as `special_tokens` says."""
        return self._copy(self._tokenizer, special_tokens)

    def _copy(self, tokenizer: Tokenizer | None, tokens: SpecialTokens) -> Self:
        twin = copy(self)
        twin._tokenizer, twin._tokens = tokenizer, tokens
        return twin

    def render_conversation(self, conversation: Conversation) -> RenderedPrompt:
        """The prompt of a conversation: text, ranges of control tokens, images in order."""
        return self._render(conversation, self._tokens)

    def encode(self, conversation: Conversation) -> list[int]:
        """The token ids of a conversation's prompt.

        Raises:
            RuntimeError: without a tokenizer, or if a control token is not in its added vocabulary.
        """
        if self._tokenizer is None:
            raise RuntimeError("no tokenizer is attached to the encoding")
        return encode_prompt(self.render_conversation(conversation), self._tokenizer)


class DeepseekV4Encoding(_Encoding):
    """Prompts of DeepSeek-V4."""

    def __init__(self) -> None:
        super().__init__(render_v4)


class DeepseekV41Encoding(_Encoding):
    """Prompts of DeepSeek-V4.1."""

    def __init__(self) -> None:
        super().__init__(render_v41)


def encode_prompt(rendered: RenderedPrompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a rendered prompt: one id for each control token, the base model's ids for the text between.

    Raises:
        RuntimeError: if a control token is not in the tokenizer's added vocabulary.
    """
    prompt = rendered.prompt
    pieces: list[str] = []
    specials: list[int] = []
    done = 0
    for start, end in rendered.special_ranges:
        pieces.append(prompt[done:start])
        done = end
        token_id = tokenizer.added_token_id(prompt[start:end])
        if token_id is None:
            raise RuntimeError(
                f'failed to encode conversation: special token "{prompt[start:end]}" is not in the added vocabulary'
            )
        specials.append(token_id)
    *heads, last = tokenizer.encode_pieces([*pieces, prompt[done:]])
    ids: list[int] = []
    for piece, special in zip(heads, specials, strict=True):
        ids += piece
        ids.append(special)
    return ids + last
