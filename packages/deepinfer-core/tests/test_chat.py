"""`LLM.chat`: the prompt of the API, the answer as a message, whole or as it grows."""

from typing import Any

import pytest

from deepinfer import LLM, RequestError, SamplingParams
from deepinfer.errors import AcceleratorError, CheckpointError
from deepinfer.model.tiny import write_tiny
from deepseek_recipe import AssistantMessage, IncrementKind, Tokenizer, encode_chat, parse_completion

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
    }
]
SHORT = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", accelerator="cpu", max_num_seqs=4, max_model_len=1024)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chat_is_encode_generate_parse(llm: LLM, thinking: bool, tools: list[dict[str, Any]] | None) -> None:
    assert llm.tokenizer is not None
    tokenizer = Tokenizer.from_str(llm.tokenizer.to_str())
    prompt = encode_chat(QUESTION, tools, thinking=thinking, tokenizer=tokenizer)
    completion = llm.generate({"prompt_token_ids": prompt.token_ids}, SHORT)[0]
    expected = parse_completion(completion.token_ids, prompt, tokenizer=tokenizer)
    message = llm.chat(QUESTION, tools, SHORT, thinking=thinking)
    assert (message.content, message.reasoning_content) == (expected.content, expected.reasoning_content)
    assert message.content or message.reasoning_content


def test_a_stream_adds_up_to_the_message(llm: LLM) -> None:
    stream = llm.chat(QUESTION, None, SHORT, stream=True, thinking=False)
    with pytest.raises(RuntimeError, match="not complete"):
        assert stream.message
    increments = list(stream)
    assert len(increments) > 3
    assert {step.kind for step in increments} == {IncrementKind.Content}
    assert "".join(step.text for step in increments) == stream.message.content
    assert stream.message.content == llm.chat(QUESTION, None, SHORT, thinking=False).content
    assert stream.completion.finish_reason == "length"


def test_an_answer_goes_into_the_next_turn(llm: LLM) -> None:
    assert llm.tokenizer is not None
    first = llm.chat(QUESTION, None, SHORT, thinking=False)
    history = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Again."}]
    assert isinstance(llm.chat(history, None, SHORT, thinking=False), AssistantMessage)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "conversation cannot become a prompt"),
        ([{"role": "nobody", "content": "x"}], "conversation cannot become a prompt"),
        ([{"role": "user"}], "conversation cannot become a prompt"),
        ([{"role": "user", "content": "word " * 9000}], "max_model_len"),
    ],
)
def test_a_bad_conversation_ends_that_request(llm: LLM, messages: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        llm.chat(messages, None, SHORT)
    assert llm.chat(QUESTION, None, SHORT, thinking=False).content


def test_v4_has_its_own_format(tmp_path_factory: pytest.TempPathFactory, llm: LLM) -> None:
    folder = tmp_path_factory.mktemp("v4") / "tiny"
    write_tiny(folder, family="deepseek_v4")
    v4 = LLM(folder, accelerator="cpu", max_num_seqs=2)
    completion = v4.chat(QUESTION, None, SHORT, stream=True, thinking=False).read().completion
    assert v4.tokenizer is not None
    expected = encode_chat(QUESTION, version="v4", thinking=False, tokenizer=Tokenizer.from_str(v4.tokenizer.to_str()))
    assert list(completion.prompt_token_ids) == expected.token_ids


def test_without_a_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bare") / "tiny"
    write_tiny(folder, family="deepseek_v4")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        LLM(folder, accelerator="cpu", max_num_seqs=2).chat(QUESTION)


def test_a_missing_recipe_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.installation.RECIPE", "deepseek-recipe-that-nobody-has")
    monkeypatch.setattr("deepinfer.installation.REQUIRED", ("deepseek-recipe-that-nobody-has",))
    with pytest.raises(AcceleratorError, match="is not installed"):
        llm.chat(QUESTION)
