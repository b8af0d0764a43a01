"""What is rendered parses back: the assistant's part of a prompt, given as output, is the message it was made of."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepseek_recipe as recipe

from .output_texts import CALLS

EOS = recipe.SpecialToken.Eos.default_str()
PLAIN = st.text("ab c.\né", max_size=20).map(lambda text: text.strip("\n"))


@pytest.mark.parametrize("version", ["v4", "v4.1"])
@given(reasoning=PLAIN, content=PLAIN, calls=CALLS)
def test_rendered_calls_parse_back(
    version: Any, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    made = [recipe.ToolCall(f"c{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(calls)]
    tools = [recipe.ToolDefinition(name, "", {"type": "object"}) for name in ("f", "g_2", "get-it")]
    before: list[recipe.Message] = [recipe.UserMessage("q")]
    answer = recipe.AssistantMessage(content, reasoning, made)
    prompt = recipe.encode_chat(before, tools, version=version)
    whole = recipe.encode_chat([*before, answer, recipe.UserMessage("z")], tools, version=version)
    output = whole.text[len(prompt.text) :].partition(EOS)[0]
    parsed = recipe.parse_completion(output, prompt)
    assert (parsed.content, parsed.reasoning_content) == (content, reasoning)
    got = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls or ()]
    assert got == calls
    count = len(prompt.token_ids)
    by_ids = recipe.parse_completion(whole.token_ids[count:], prompt) if version == "v4.1" else parsed
    assert by_ids.content.startswith(content)


@given(calls=CALLS)
def test_exact_replay_repeats_the_written_block(calls: list[tuple[str, dict[str, Any]]]) -> None:
    dsml = recipe.SpecialToken.Dsml.default_str()
    written = "\n\n\n" + f"<{dsml} calls>\n"
    for name, arguments in calls:
        written += f'<{dsml} invoke name="{name}">'
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            kind = "true" if isinstance(value, str) else "false"
            written += f'<{dsml} parameter name="{key}" string="{kind}">{text}</{dsml} parameter>'
        written += f"</{dsml} invoke>"
    written += f"</{dsml} calls>"
    prompt = recipe.encode_chat([recipe.UserMessage("q")], [recipe.ToolDefinition("f")])
    message = recipe.parse_completion("why</think>so" + written, prompt, exact_replay=True)
    again = recipe.encode_chat(
        [recipe.UserMessage("q"), message, recipe.ToolMessage("r")], [recipe.ToolDefinition("f")]
    )
    assert again.text.startswith(prompt.text + "why</think>so" + written + EOS)


def test_a_memory_recalls_what_comes_back_from_a_client(tokenizer: recipe.Tokenizer) -> None:
    dsml = recipe.SpecialToken.Dsml.default_str()
    written = (
        f'\n\n<{dsml} calls>\n<{dsml} invoke name="f"><{dsml} parameter name="n" string="false">1.50</{dsml} parameter>'
        f"</{dsml} invoke></{dsml} calls>"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "q"}],
        "tools": tools,
    }
    converted = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(converted, "ID", "M")
    memory = recipe.ReplayMemory()
    processor = recipe.StreamProcessor(generator, converted.parsing_options, tokenizer, replay=memory)
    response = recipe.ChatCompletionResponse("ID", "M", 0, 0, 0)
    events: list[Any] = []
    for token_id in tokenizer.encode("t</think>" + written):
        events += processor.push(recipe.InferenceChunk.tokens([token_id]))
    for event in events + processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)):
        response.accumulate(event)
    answer = json.loads(response.to_json())["choices"][0]["message"]
    call_id = answer["tool_calls"][0]["id"]
    body["messages"] += [answer, {"role": "tool", "tool_call_id": call_id, "content": "r"}]
    back = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    encoding = recipe.DeepseekV41Encoding()
    assert written not in encoding.render_conversation(back.conversation).prompt
    back.conversation.messages = memory.recall(back.conversation.messages)
    rendered = encoding.render_conversation(back.conversation)
    assert written in rendered.prompt
    changed = [
        m.changed(tool_calls=[recipe.ToolCall(call_id, "f", '{"n": 2}')]) for m in back.conversation.messages[1:2]
    ]
    assert memory.recall([m.changed(replay=()) for m in changed])[0].replay == ()
