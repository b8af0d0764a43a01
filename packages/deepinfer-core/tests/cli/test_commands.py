"""The commands: what they print, what they refuse, how they end."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deepinfer import LLM, SamplingParams
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.report import report_ops
from deepinfer.cli import app
from deepinfer.command_options import ENGINE_OPTIONS, memory_bytes
from deepinfer.doctor import RELEASED
from deepinfer.draft_output import summary
from deepinfer.engine.draft_report import RESTED, DraftReport, DraftStep
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ConfigError
from deepinfer.model.tiny import write_tiny

PROMPT = "Once upon a time"
GREEDY = ("--max-tokens", "12", "--temperature", "0", "--dtype", "float64", "--kv-cache-dtype", "model")
"""The same tokens alone and among others: no rounding is near enough to a tie."""


def run(*arguments: str, text: str | None = None, **environment: str) -> Result:
    plain = {"DEEPINFER_ACCELERATOR": "cpu", "DEEPINFER_HF_MODEL_DIR": "", "DEEPINFER_LOG_LEVEL": ""}
    return CliRunner(env=plain | environment).invoke(app, arguments, input=text)


@pytest.fixture(scope="module")
def greedy() -> str:
    """What the demo model says, by the Python interface."""
    llm = LLM(accelerator="cpu", dtype="float64", kv_cache_dtype="model")
    (completion,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0))
    return completion.text


def test_generate_prints_the_completion_and_says_which_model(greedy: str) -> None:
    result = run("generate", PROMPT, *GREEDY)
    assert result.exit_code == 0
    assert result.stdout == greedy + "\n"
    assert "the embedded demo model" in result.stderr
    assert "deepinfer: cpu: " in result.stderr
    assert "deepinfer: 12 tokens in" in result.stderr


def test_generate_reads_a_prompt_from_stdin(greedy: str) -> None:
    for arguments in ((), ("-",)):
        result = run("generate", *arguments, *GREEDY, text=PROMPT + "\n")
        assert result.stdout == greedy + "\n"


def test_generate_continues_a_file_in_its_order(tmp_path: Path, greedy: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'[5, 6, 7]\n\n"{PROMPT}"\n{{"prompt": "The sea"}}\n{{"prompt_token_ids": [5, 6, 7]}}\n')
    result = run("generate", "--prompts", str(path), *GREEDY, "--json")
    assert result.exit_code == 0
    completions = [json.loads(line) for line in result.stdout.splitlines()]
    assert [completion["index"] for completion in completions] == [0, 1, 2, 3]
    assert completions[1]["text"] == greedy
    assert completions[0]["token_ids"] == completions[3]["token_ids"]
    assert completions[0]["prompt_token_ids"] == [5, 6, 7]
    assert all(completion["finish_reason"] == "length" for completion in completions)
    text = run("generate", "--prompts", "-", *GREEDY, text=path.read_text())
    assert text.stdout == "".join(
        f"[prompt {number} of 4]\n{completion['text']}\n" for number, completion in enumerate(completions, start=1)
    )


def test_a_line_may_have_its_own_parameters() -> None:
    lines = (
        '{"prompt": "The sea", "max_tokens": 3}\n"The sea"\n{"prompt_token_ids": [5], "ignore_eos": true, "top_k": 1}\n'
    )
    result = run("generate", "--prompts", "-", "--max-tokens", "5", "--ignore-eos", "--json", text=lines)
    assert result.exit_code == 0
    assert [len(json.loads(line)["token_ids"]) for line in result.stdout.splitlines()] == [3, 5, 5]


def test_a_line_separator_inside_a_prompt_ends_no_line() -> None:
    lines = json.dumps("one\u2028two", ensure_ascii=False) + "\n"
    result = run("generate", "--prompts", "-", "--max-tokens", "1", "--json", text=lines)
    assert len(result.stdout.splitlines()) == 1


def test_text_that_is_not_utf_8_is_told() -> None:
    result = CliRunner(env={"DEEPINFER_ACCELERATOR": "cpu"}).invoke(app, ["generate"], input=b"caf\xe9")
    assert result.exit_code == 2
    assert "error: stdin: expected UTF-8, byte 3 is 0xe9" in result.stderr
    assert "the prompt is expected in UTF-8" in run("generate", "caf\udce9").stderr


def test_one_bad_prompt_is_told_and_the_others_go_on(tmp_path: Path, greedy: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'""\n"{PROMPT}"\n')
    result = run("generate", "--prompts", str(path), *GREEDY)
    assert result.exit_code == 1
    assert result.stdout == f"[prompt 1 of 2]\n\n[prompt 2 of 2]\n{greedy}\n"
    assert "error: prompt 1: the prompt is empty" in result.stderr


def test_log_probabilities_come_with_json() -> None:
    result = run("generate", PROMPT, "--max-tokens", "2", "--logprobs", "3", "--json")
    (line,) = result.stdout.splitlines()
    assert [len(item["top"]) for item in json.loads(line)["logprobs"]] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "text", "told"),
    [
        (("generate", "x", "--accelerator", "abacus"), None, "no accelerator is named 'abacus'"),
        (("generate", "x", "--dtype", "int8"), None, "dtype must be one of auto, bfloat16"),
        (("generate", "x", "--kv-cache-dtype", "int8"), None, "kv_cache_dtype must be"),
        (("generate", "x", "--decoder-replay", "some"), None, 'decoder_replay must be "auto", "off" or a number'),
        (("generate", "x", "--decoder-replay", "3"), None, "decoder_replay=3 must be at least the window"),
        (("generate", "x", "--max-model-len", "1"), None, "max_model_len must be an integer"),
        (("generate", "x", "--model", "no/such/folder"), None, "no such folder"),
        (("generate", "x", "--prompts", "y.jsonl"), None, "got both: leave one out"),
        (("generate", "--prompts", "no-such.jsonl"), None, "no-such.jsonl: No such file"),
        (
            ("generate", "--prompts", "-"),
            '"a"\n{"text": 1}\n',
            "stdin, line 2: expected a JSON string, a list of token",
        ),
        (("generate", "--prompts", "-"), '"a"\n"b\n', "stdin, line 2: expected"),
        (("generate", "--prompts", "-"), "[1, true]\n", "got [1, true]"),
        (("generate", "--prompts", "-"), "\n", "expected one prompt a line, found none"),
        (("plan", "tiny", "--memory", "much"), None, "memory is expected as 141GB"),
        (("plan", "tiny", "--sequences", "0"), None, "sequences is expected to be at least 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], text: str | None, told: str
) -> None:
    result = run(*arguments, text=text)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert told in line
    assert "Traceback" not in result.output


def test_debug_shows_where_an_error_came_from() -> None:
    result = run("generate", "x", "--accelerator", "abacus", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "AcceleratorError" in result.stderr


def test_the_environment_chooses_and_options_win(tmp_path: Path) -> None:
    assert "'abacus'" in run("generate", "x", DEEPINFER_ACCELERATOR="abacus").stderr
    assert (
        run("generate", "x", "--max-tokens", "1", "--accelerator", "cpu", DEEPINFER_ACCELERATOR="abacus").exit_code == 0
    )
    missing = str(tmp_path / "gone")
    assert missing in run("generate", "x", DEEPINFER_HF_MODEL_DIR=missing).stderr
    quiet = run("generate", "x", "--max-tokens", "1", "--model", "tiny", DEEPINFER_LOG_LEVEL="warning")
    assert "tokens in" not in quiet.stderr
    assert "did you mean DEEPINFER_ACCELERATOR?" in run("accelerators", DEEPINFER_ACELERATOR="cpu").stderr
    loud = run("accelerators", DEEPINFER_LOG_LEVEL="loud")
    assert loud.exit_code == 2
    assert "DEEPINFER_LOG_LEVEL is expected to be one of" in loud.stderr


def test_accelerators_are_listed_with_reasons(site: Any) -> None:
    site.accelerator("fake-absent", "absent", "AcceleratorEntry(1, 3000, 'm:C', lambda: 'no such device')")
    lines = run("accelerators").stdout.splitlines()
    assert any(line.startswith("cpu ") and line.endswith(": usable") for line in lines)
    assert any(line.startswith("absent ") and "fake-absent 1.0: no such device" in line for line in lines)
    listed = {entry["name"]: entry for entry in json.loads(run("accelerators", "--json").stdout)}
    assert listed["absent"]["reason"] == "no such device"
    assert listed["cpu"]["reason"] is None


def test_doctor_names_the_implementation_of_each_op() -> None:
    result = run("doctor", "--model", "tiny")
    assert result.exit_code == 0
    assert "ok    accelerator      cpu: " in result.stdout
    device = CpuAccelerator()
    for report in report_ops(device, device.ops(RELEASED)):
        assert f"  {report.op:<16}{report.implementation}" in result.stdout
    told = json.loads(run("doctor", "--json").stdout)
    assert told["healthy"] is True
    assert {check["topic"] for check in told["checks"]} >= {
        "system",
        "python",
        "deepinfer-core",
        "torch",
        "accelerator",
    }
    assert all(report["reason"] for report in told["ops"] if report["implementation"] == "reference")


def test_warm_says_what_it_compiled() -> None:
    result = run("warm", "--accelerator", "cpu")
    assert result.exit_code == 0
    assert re.fullmatch(r"cpu: [02] kernels compiled and kept, \d+\.\d s\n", result.stdout)


def test_doctor_tells_what_is_wrong(site: Any) -> None:
    site.accelerator("fake-absent", "absent", "AcceleratorEntry(1, 3000, 'm:C', lambda: 'no such device')")
    site.accelerator("fake-broken", "broken", "1 / 0")
    site.install("deepseek-recipe", version="0.2.0")
    result = run("doctor", "--accelerator", "absent")
    assert result.exit_code == 1
    assert "FAIL  deepseek-recipe  deepseek-recipe 0.2.0 is installed" in result.stdout
    assert "FAIL  broken           fake-broken 1.0: does not import: ZeroDivisionError" in result.stdout
    assert (
        "FAIL  accelerator      accelerator 'absent' of fake-absent 1.0 cannot be used: no such device" in result.stdout
    )


def test_doctor_compares_ops_when_asked(site: Any) -> None:
    wrong = """
    from deepinfer.accelerator.cpu import CpuAccelerator
    from deepinfer.accelerator.ops import Ops

    class WrongOps(Ops):
        def greedy(self, logits):
            return super().greedy(logits) + 1

    class Device(CpuAccelerator):
        name = "wrong"
        def ops(self, precision):
            return WrongOps(self.device, precision)
    """
    site.accelerator(
        "fake-wrong", "wrong", "AcceleratorEntry(1, 1, 'fake_wrong_device:Device', lambda: None)", target=wrong
    )
    result = run("doctor", "--check", "--accelerator", "wrong")
    assert result.exit_code == 1
    assert "FAIL  conformance      greedy, sample: not the reference's results" in result.stdout
    assert "tokens differs in 24 of 24 elements" in result.stdout


def test_plan_sums_the_bytes_of_a_folder(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model")
    result = run("plan", str(tmp_path / "model"), "--memory", "1GiB", "--sequences", "2", "--json")
    told = json.loads(result.stdout)
    assert told["memory_bytes"] == 2**30
    assert told["sequences"] == 2
    size = (tmp_path / "model/model.safetensors").stat().st_size
    assert size * 0.9 < told["total_bytes"] < size
    assert f"{told['total_bytes']:,} bytes" in run("plan", str(tmp_path / "model")).stdout


def test_tiny_writes_a_checkpoint_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert run("tiny", str(folder), "--seed", "3", "--family", "deepseek_v4").exit_code == 0
    result = run("generate", PROMPT, "--model", str(folder), "--max-tokens", "3")
    assert result.exit_code == 0
    assert "embedded" not in result.stderr
    again = run("tiny", str(folder))
    assert again.exit_code == 2
    assert "exists already and is not empty" in again.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("12", 12), ("141GB", 141 * 10**9), ("128 GiB", 128 * 2**30), ("8x141GB", 8 * 141 * 10**9), ("1.5T", 15 * 10**11)],
)
def test_memory_is_read_with_its_unit(text: str, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "12 parsec"])
def test_memory_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="memory is expected as 141GB"):
        memory_bytes(text)


def test_help_teaches() -> None:
    overview = run("--help").stdout
    assert "DEEPINFER_HF_MODEL_DIR" in overview
    for command in ("generate", "doctor", "plan"):
        assert command in overview
        assert f"deepinfer {command} " in run(command, "--help").stdout
    assert run("--version").stdout.startswith("deepinfer-core ")


def test_bench_prints_json_and_writes_a_timeline(tmp_path: Path) -> None:
    short = ("--requests", "2", "--prompt-tokens", "4", "--output-tokens", "2", "--max-model-len", "128")
    trace = tmp_path / "trace.json"
    result = run("bench", *short, "--rate", "100", "--rate", "inf", "--json", "--trace", str(trace))
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(one["rate"], one["output_tokens"]) for one in told["runs"]] == [(100, 4), ("inf", 4)]
    assert {event["name"] for event in json.loads(trace.read_text())} >= {"step", "build", "run", "decode"}


def test_a_bench_with_failures_ends_with_1() -> None:
    result = run("bench", "--requests", "1", "--prompt-tokens", "300", "--max-model-len", "128")
    assert result.exit_code == 1
    assert "0 of 1" in result.stdout
    assert "max_model_len=128" in result.stderr


def test_generate_writes_a_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert run("generate", "x", "--max-tokens", "3", "--max-model-len", "128", "--trace", str(trace)).exit_code == 0
    assert sum(event["name"] == "step" for event in json.loads(trace.read_text())) >= 3


@pytest.mark.parametrize("arguments", [("--draft=on",), ("--draft=on", "--draft-rule", "chain"), ("--draft",)])
def test_drafts_are_shown_and_change_no_greedy_text(arguments: tuple[str, ...], greedy: str) -> None:
    result = run("generate", PROMPT, *GREEDY, *arguments)
    assert result.exit_code == 0
    assert result.stdout == greedy + "\n"
    lengths = next(line for line in result.stderr.splitlines() if line.isdigit())
    assert sum(int(digit) for digit in lengths) == 12
    assert f"tokens a step over {len(lengths)} steps" in result.stderr or "drafts: none" in result.stderr


def test_draft_takes_no_prompt_for_its_word(greedy: str) -> None:
    """Alone before the prompt, before another option, at the end, and with a word that is its own."""
    for arguments in (
        ("--draft", PROMPT),
        ("--draft", *GREEDY[:2], PROMPT),
        (PROMPT, "--draft"),
        ("--draft", "on", PROMPT),
    ):
        result = run("generate", *arguments, *GREEDY)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == greedy + "\n"
        assert "tokens a step over" in result.stderr or "drafts: none" in result.stderr
    assert "accepted" not in run("generate", *GREEDY, "--draft", "off", PROMPT).stderr
    refused = run("generate", PROMPT, "--draft=fast")
    assert refused.exit_code == 2
    assert "'fast' is not one of 'off', 'auto', 'on'" in refused.stderr


def test_options_of_the_engine_reach_it(tmp_path: Path, greedy: str) -> None:
    small = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-prefill-tokens-per-step", "32")
    kept = ("--prefix-cache-host-bytes", "1MB", "--prefix-cache-dir", str(tmp_path), "--prefix-cache-disk-bytes", "8MB")
    for arguments in (
        small,
        kept,
        ("--deterministic", "--no-overlap", "--prefix-cache", "off", "--memory-fraction", "0.5"),
    ):
        result = run("generate", PROMPT, *GREEDY, *arguments)
        assert result.exit_code == 0, result.stderr
        assert "--deterministic" in arguments or result.stdout == greedy + "\n"
    assert (tmp_path / "owner").exists()
    bench = run(
        "bench", "--requests", "2", "--output-tokens", "3", "--max-model-len", "256", "--prefix-cache", "off", "--json"
    )
    assert bench.exit_code == 0, bench.stderr


def test_every_choice_of_an_engine_is_an_option() -> None:
    given = {*ENGINE_OPTIONS, "seed"}
    assert given == {field.name for field in fields(EngineOptions)} | {"dtype", "kv_cache_dtype"}


def test_a_line_says_how_it_uses_the_prefix_cache() -> None:
    prompt = [20 + place % 70 for place in range(150)]
    lines = [{"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {"prefix_cache": "off"}]
    text = "\n".join(json.dumps({"prompt_token_ids": prompt, **one}) for one in lines)
    result = run("generate", "--prompts", "-", "--json", "--max-tokens", "2", "--max-num-seqs", "1", text=text)
    assert result.exit_code == 0, result.stderr
    told = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda one: one["index"])
    assert [(one["cache"]["mode"], one["cache"]["hit"]) for one in told] == [
        ("exact", 0),
        ("exact", 0),
        ("exact", 128),
        ("off", 0),
    ]


def test_a_summary_says_what_drafts_brought() -> None:
    steps = [None, DraftStep(5, 3, 2, 1.5), DraftStep(5, 1, 0, 0.5), DraftStep(5, 0, 0, 0.0)]
    assert summary(DraftReport.of(steps)) == (
        "drafts: 1.50 tokens a step over 4 steps; 15 drawn, 4 verified, 2 accepted; accepted up to place 50%, 100%, "
        "0%; 0.50 a step expected, 0.50 came"
    )
    assert summary(DraftReport.of([None])) == "drafts: none in 1 steps"
    none = summary(DraftReport.of([None, RESTED]))
    assert none == "drafts: none in 2 steps: they would have cost more than they bring"
