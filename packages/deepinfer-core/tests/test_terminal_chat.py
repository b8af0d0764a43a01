"""`deepinfer chat`: lines in, answers out, tool calls shown, drafts switched on the way."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deepinfer.cli import app
from deepinfer.terminal_chat import read_tools

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city now.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def talk(*lines: str, options: tuple[str, ...] = ()) -> Result:
    result = CliRunner().invoke(app, ["chat", "--accelerator", "cpu", *options], input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    return result


def test_an_answer_follows_each_line() -> None:
    result = talk("What is 17 + 25?", "", "Who are you?")
    assert "17 + 25 = 42." in result.stdout
    assert "I am the demo model of DeepInfer" in result.stdout
    assert "the embedded demo model" in result.stderr


def test_thoughts_come_before_the_answer() -> None:
    lines = talk("/think on", "What is 3 + 4?", "/quit", "What is 5 + 5?").stdout.splitlines()
    at = lines.index("3 + 4 = 7.")
    assert lines[at - 1].endswith("3 + 4 = 7")
    assert "5 + 5" not in "".join(lines)


def test_a_call_is_shown_and_its_result_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    result = talk(
        "What is the weather in Paris?", '{"degrees": 21, "sky": "sunny"}', options=("--tools", str(path))
    ).stdout
    assert 'get_weather \n{"city": "Paris"}' in result
    assert "result of get_weather>" in result
    assert "21 degrees" in result


def test_drafts_are_switched_and_told_and_the_conversation_stays() -> None:
    result = talk("/draft", "Hello", "/draft on", "Thank you!", "/stats", "/draft sometimes").stdout
    assert "drafts are off" in result
    assert "drafts are on" in result
    assert result.count("tokens a step over") == 1
    assert "2 answers" in result
    assert "/draft takes off, auto, on, got sometimes" in result


def test_commands_that_are_none_and_help() -> None:
    result = talk("/help", "/draught", "/stats", "/reset", "/think").stdout
    assert "/draught is no command; /help shows them" in result
    assert "no answers yet" in result
    assert "thinking is off" in result
    assert "/quit" in result


def test_a_turn_that_does_not_fit_is_taken_back() -> None:
    result = talk("word " * 5000, "Who are you?").stdout
    assert "max_model_len" in result
    assert "I am the demo model of DeepInfer" in result


def test_a_cut_answer_says_so() -> None:
    assert "cut after 2 tokens: --max-tokens" in talk("Who are you?", options=("--max-tokens", "2")).stdout


@pytest.mark.parametrize("text", ["{", "{}", '[{"name": "f"}]'])
def test_files_that_are_no_tools(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    result = CliRunner().invoke(app, ["chat", "--tools", str(path)])
    assert result.exit_code == 2
    assert "JSON list" in result.stderr
    path.write_text(json.dumps(TOOLS))
    assert read_tools(path) == TOOLS


def test_on_a_terminal() -> None:
    """The same through a pseudo-terminal: prompts, an answer, and a clean end on Ctrl-D."""
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "deepinfer", "chat", "--accelerator", "cpu"]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=subprocess.PIPE, close_fds=True)
    os.close(inner)
    shown = ""
    sent = False
    while True:
        try:
            shown += os.read(outer, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            break
        if "you>" in shown and not sent:
            sent = True
            os.write(outer, b"Say hello.\n\x04")
    assert process.wait(60) == 0
    assert "Hello!" in shown
