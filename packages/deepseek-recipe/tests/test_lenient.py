"""What lenient conversion mends, and that it mends nothing unless asked."""

from typing import Any

import pytest

import deepseek_recipe as recipe

USER = {"role": "user", "content": "x"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REJECT = recipe.ReasoningContentBehavior.Reject


def chat(**members: Any) -> dict[str, Any]:
    return {"model": "DeepSeek-V4.1-Flash", "messages": [USER]} | members


def test_a_developer_message_is_a_system_message() -> None:
    body = chat(messages=[{"role": "developer", "content": "Be brief."}, USER])
    with pytest.raises(ValueError, match="unknown variant `developer`"):
        recipe.ChatCompletionRequest(body)
    request = recipe.ChatCompletionRequest(body, lenient=True).convert(recipe.ConversionOptions(lenient=True))
    assert [message.role for message in request.conversation.messages] == ["system", "user"]
    assert request.warnings == ["developer_role: messages[0]"]


def test_max_completion_tokens_counts_where_max_tokens_is_absent() -> None:
    body = chat(max_completion_tokens=7)
    strict = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    assert strict.inference_options.max_tokens is None
    lenient = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions(lenient=True))
    assert lenient.inference_options.max_tokens == 7
    assert lenient.warnings == ["max_completion_tokens: max_completion_tokens"]
    both = recipe.ChatCompletionRequest(chat(max_completion_tokens=7, max_tokens=9))
    assert both.convert(recipe.ConversionOptions(lenient=True)).inference_options.max_tokens == 9


def test_lacking_reasoning_of_a_tool_turn_is_taken_as_empty() -> None:
    history = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1", "content": "r"}]
    body = chat(messages=history, tools=TOOLS)
    options = recipe.ConversionOptions(reasoning_content_behavior=REJECT)
    with pytest.raises(recipe.ConversionError, match="must be passed back to the API"):
        recipe.ChatCompletionRequest(body).convert(options)
    request = recipe.ChatCompletionRequest(body).convert(options.with_lenient(True))
    assert request.conversation.messages[1].reasoning_content == ""
    assert request.warnings == ["missing_reasoning: messages[1]"]


def test_options_are_changed_in_copies() -> None:
    options = recipe.ConversionOptions()
    assert options.with_lenient(True).lenient
    assert not options.lenient
    assert options.with_model_alias("m", recipe.ModelVersion.DeepseekV4Pro).model_versions_by_name.keys() - {
        "DeepSeek-V4-Pro",
        "DeepSeek-V4.1-Flash",
    } == {"m"}


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_the_three_protocols_make_one_conversation(protocol: str) -> None:
    texts = ("S", "q", "thought", "answer", "call", "result", "z")
    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        "chat": (
            recipe.ChatCompletionRequest,
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "answer", "reasoning_content": "thought", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "1", "content": "result"},
                    {"role": "user", "content": "z"},
                ]
            },
        ),
        "messages": (
            recipe.MessagesRequest,
            {
                "system": "S",
                "messages": [
                    {"role": "user", "content": "q"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "thought"},
                            {"type": "text", "text": "answer"},
                            {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                        ],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "result"}]},
                    {"role": "user", "content": "z"},
                ],
            },
        ),
        "responses": (
            recipe.ResponsesRequest,
            {
                "instructions": "S",
                "input": [
                    {"role": "user", "content": "q"},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "thought"}]},
                    {"role": "assistant", "content": "answer"},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "result"},
                    {"role": "user", "content": "z"},
                ],
            },
        ),
    }
    make, body = bodies[protocol]
    request = make(body | {"model": "DeepSeek-V4.1-Flash"}).convert(recipe.ConversionOptions())
    messages = request.conversation.messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "user"]
    shown = (messages[0].content, messages[1].content, messages[2].reasoning_content, messages[2].content)
    assert shown == texts[:4]
    assert messages[2].tool_calls == [recipe.ToolCall("1", "f", "{}")]
    assert (messages[3].content, messages[3].tool_call_id, messages[4].content) == ("result", "1", "z")
