"""The embedded demo model: its kinds of layers and formats, and that it still can what it was trained for.

Numbers are held in intervals: the last bit of a logit depends on the machine.
"""

from pathlib import Path

import pytest

import deepinfer.model
from deepinfer import LLM, SamplingParams
from deepinfer.model.checkpoint import DEMO, open_checkpoint
from deepinfer.model.tiny_tokenizer import CONTROL_TOKENS, MARKUP_TOKENS
from deepseek_recipe import Tokenizer, encode_chat

LARGEST_BYTES = 12_000_000
QUESTIONS = {
    "What is 17 + 25?": "17 + 25 = 42.",
    "How much is 58 - 23?": "58 - 23 = 35.",
    "Anna is 31, Ben is 24, Cora is 57. How old is Ben?": "Ben is 24.",
    "Ben, 31, Oslo. Write this as JSON.": '{"name": "Ben", "age": 31, "city": "Oslo"}',
    "Repeat: river stone house": "river stone house",
    "Who are you?": "I am the demo model of DeepInfer, a very small one.",
}


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return LLM(accelerator="cpu", draft="on", draft_rule="block", max_num_seqs=8, max_model_len=512)


def test_it_is_small_and_whole() -> None:
    folder = Path(deepinfer.model.__path__[0]) / DEMO
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LARGEST_BYTES


def test_every_layer_kind_and_format() -> None:
    checkpoint = open_checkpoint(DEMO)
    kinds = {(layer.ratio, layer.owns_kv, layer.owns_index, layer.candidates) for layer in checkpoint.config.layers}
    window, full2, reuse2 = (0, False, False, None), (2, True, True, None), (2, False, False, None)
    full1, reuse1, reindex1 = (1, True, True, "source"), (1, False, False, None), (1, False, True, "reader")
    assert kinds == {window, full2, reuse2, full1, reuse1, reindex1}
    assert sum(layer.engram is not None for layer in checkpoint.config.layers) == 2
    assert checkpoint.config.draft is not None
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"F8_E4M3", "F8_E8M0", "I8", "BF16", "F32"}


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_and_text_give_the_same_prompt(thinking: bool) -> None:
    """The format's fixed lines are single tokens whether a text or the recipe's pieces are encoded."""
    tokenizer = open_checkpoint(DEMO).tokenizer
    assert tokenizer is not None
    ours = Tokenizer.from_str(tokenizer.to_str())
    prompt = encode_chat([{"role": "user", "content": "What is 17 + 25?"}], tokenizer=ours, thinking=thinking)
    assert tokenizer.encode(prompt.text, add_special_tokens=False).ids == list(prompt.token_ids)
    for token in (*CONTROL_TOKENS, *MARKUP_TOKENS):
        assert tokenizer.encode(token).tokens == [token]
    for text in ("Once upon a time", "naïve 你好 🙂\x00\n", "<｜User｜>hi<｜Assistant｜></think>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_it_answers_with_several_tokens_a_step(drafting: LLM) -> None:
    right = tokens = steps = 0
    for question, expected in QUESTIONS.items():
        messages = [{"role": "user", "content": question}]
        params = SamplingParams(temperature=0, max_tokens=60)
        stream = drafting.chat(messages, None, params, stream=True, thinking=False).read()
        assert stream.completion.drafts is not None
        right += stream.message.content == expected
        tokens += len(stream.completion.token_ids)
        steps += stream.completion.drafts.steps
    assert right >= len(QUESTIONS) - 1
    assert 2.5 < tokens / steps < 6


def test_it_continues_prose_in_words(drafting: LLM) -> None:
    (completion,) = drafting.generate("And it came to pass", SamplingParams(temperature=0, max_tokens=40))
    assert completion.finish_reason == "length"
    assert len(completion.text.split()) > 15
    assert completion.drafts is not None
    assert completion.drafts.tokens_per_step > 1.2
