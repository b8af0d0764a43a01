"""The command line does what its help says, and says what is wrong with a request."""

import io
import json
import sys
from pathlib import Path

import pytest

import deepseek_recipe as recipe
from deepseek_recipe.cli import main

BODY = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(BODY))
    return str(file)


def give_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_render_encode_and_count(request_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = recipe.encode_chat(BODY["messages"])  # type: ignore[arg-type]
    assert main(["render", request_file]) == 0
    assert capsys.readouterr().out == prompt.text + "\n"
    assert main(["render", "--color", "always", request_file]) == 0
    assert "\033[1;36m<｜User｜>\033[0mhi" in capsys.readouterr().out
    assert main(["encode", request_file]) == 0
    assert json.loads(capsys.readouterr().out) == prompt.token_ids
    assert main(["count", request_file, "--version", "v41"]) == 0
    assert int(capsys.readouterr().out) == len(prompt.token_ids)
    assert main(["render", request_file, "--version", "v4"]) == 0
    assert "Absolute maximum" in capsys.readouterr().out


def test_count_of_a_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, "hello world")
    assert main(["count", "--text", "-"]) == 0
    assert int(capsys.readouterr().out) == len(recipe.Tokenizer.bundled().encode("hello world"))


def test_other_protocols(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"model": "DeepSeek-V4-Pro", "input": "hi"}))
    assert main(["count", "--protocol", "responses", str(file)]) == 0
    assert int(capsys.readouterr().out) > 50


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses"])
def test_parse(protocol: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, "why</think>\n\nbecause\n")
    assert main(["parse", "--protocol", protocol]) == 0
    assert "because" in json.dumps(json.loads(capsys.readouterr().out))
    ids = recipe.Tokenizer.bundled().encode("why</think>so")
    give_input(monkeypatch, json.dumps(ids))
    assert main(["parse", "--ids", "--protocol", protocol]) == 0
    assert '"so"' in json.dumps(json.loads(capsys.readouterr().out))


def test_parse_with_repair_and_stop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, '<｜DSML｜ invoke name="f">{"a": 1}')
    assert main(["parse", "--no-thinking", "--repair"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert "mended json_body" in shown.err
    give_input(monkeypatch, "one STOP two")
    assert main(["parse", "--no-thinking", "--stop", "STOP"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["message"]["content"] == "one "


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"model": "m", "messages": []}, "The supported API model names are"),
        ({"model": "DeepSeek-V4-Pro", "messages": [{"role": 1}]}, "variant identifier (at messages[0].role)"),
        ({"model": "DeepSeek-V4-Pro", "messages": []}, "Empty input messages"),
    ],
)
def test_what_is_wrong_is_told(body: object, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(body))
    assert main(["render", str(file)]) == 1
    assert text in capsys.readouterr().err


def test_lenient_says_what_it_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(BODY | {"messages": [{"role": "developer", "content": "x"}]}))
    assert main(["count", str(file)]) == 1
    capsys.readouterr()
    assert main(["count", "--lenient", str(file)]) == 0
    assert "mended developer_role: messages[0]" in capsys.readouterr().err


def test_a_missing_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "no-such-file.json"]) == 1
    assert "no-such-file.json" in capsys.readouterr().err
