"""Ask a question that needs a tool, run the tool, and let the model answer with its result.

Run as `python examples/chat_tools.py`.  The prompt and the parsing are those of the DeepSeek API.  The embedded demo
model knows these tools from its training, another model (`DEEPINFER_HF_MODEL_DIR`) takes any.
"""

import json
from pathlib import Path

from deepinfer import LLM, SamplingParams
from deepinfer.environment import read_environment

TOOLS = json.loads((Path(__file__).parent / "tools.json").read_text())
WEATHER = {"Paris": {"degrees": 21, "sky": "sunny"}, "Oslo": {"degrees": 4, "sky": "cloudy"}}


def run_tool(name: str, arguments: dict[str, object]) -> str:
    """What the tools do: both are pretended here."""
    if name == "get_weather":
        return json.dumps(WEATHER.get(str(arguments["city"]), {"degrees": 10, "sky": "foggy"}))
    return str(int(str(arguments["a"])) + int(str(arguments["b"])))


def main() -> None:
    """Hold one conversation with a call in it."""
    environment = read_environment()
    llm = LLM(environment.model or "demo", accelerator=environment.accelerator)
    params = SamplingParams(temperature=0, max_tokens=200)

    messages: list[object] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = llm.chat(messages, TOOLS, params, thinking=False)  # type: ignore[arg-type]
    messages.append(answer)
    for call in answer.tool_calls or []:
        result = run_tool(call.name, json.loads(call.arguments))
        print(f"{call.name}({call.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(llm.chat(messages, TOOLS, params, thinking=False).content)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
