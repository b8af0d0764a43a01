"""What a user may ask that cannot be done: the command's message for each, and `docs/errors.md` shows it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepinfer.cli import app
from deepinfer.model.tiny import write_tiny
from deepinfer.model.tiny_tokenizer import IMAGE_TOKEN

SETTINGS, REQUESTS, COMMANDS = "Settings", "Requests", "Command line"
FAILED = {SETTINGS: 2, REQUESTS: 1, COMMANDS: 2}
SHORT = ("--max-model-len", "128")


@dataclass(frozen=True)
class Fault:
    """A command that cannot be done, its stdin and environment, and words that its message must have."""

    section: str
    what: str
    command: tuple[str, ...]
    words: tuple[str, ...]
    stdin: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    early: bool = False


def settings(what: str, *options: str, words: str, **environment: str) -> Fault:
    return Fault(SETTINGS, what, ("generate", "x", *options), (words,), environment=tuple(environment.items()))


def request(what: str, *options: str, words: str) -> Fault:
    return Fault(REQUESTS, what, ("generate", "x", *options), (words,))


def early(what: str, *options: str, words: str) -> Fault:
    """What no model could do is refused before one is looked for."""
    return Fault(REQUESTS, what, ("generate", "x", "--model", "no/such", *options), (words,), early=True)


def line(what: str, text: str, words: str, section: str = COMMANDS) -> Fault:
    return Fault(section, what, ("generate", "--prompts", "-", *SHORT), (words,), stdin=text + "\n")


def benched(what: str, *options: str, words: str) -> Fault:
    return Fault(COMMANDS, what, ("bench", "--model", "no/such", *options), (words,))


FAULTS = [
    settings(
        "a dtype that does not exist",
        "--dtype",
        "int8",
        "--model",
        "no/such",
        words="dtype must be one of auto, bfloat16",
    ),
    settings("a cache dtype that does not exist", "--kv-cache-dtype", "int8", words="kv_cache_dtype must be"),
    settings("a decoder replay in words", "--decoder-replay", "some", words='"auto", "off" or a number'),
    settings("a decoder replay below the window", "--decoder-replay", "3", words="at least the window of 32"),
    settings("a sequence length of one", "--max-model-len", "1", words="max_model_len must be an integer, at least 2"),
    settings("a sequence length beyond the model", "--max-model-len", "99999999", words="2 to 65536"),
    settings("a negative seed", "--seed", "-1", "--model", "no/such", words="seed must be an integer, 0 to"),
    settings("a draft rule that does not exist", "--draft-rule", "best", words="draft_rule must be one of match"),
    settings("drafts of a model without draft stages", "--draft=on", "--model", "V4", words="has no draft stages"),
    settings("a prefix cache of another kind", "--prefix-cache", "on", words='prefix_cache must be "exact"'),
    settings(
        "a size that is none", "--prefix-cache-host-bytes", "much", words="--prefix-cache-host-bytes is expected as"
    ),
    settings("a folder for a cache that is off", "--prefix-cache=off", "--prefix-cache-dir=x", words="keeps nothing"),
    settings("a log level that does not exist", words="debug, info, warning, error", DEEPINFER_LOG_LEVEL="loud"),
    early("max_tokens 0", "--max-tokens", "0", words="max_tokens must be an integer, at least 1"),
    early("temperature -1", "--temperature", "-1", words="temperature must be a number, at least 0"),
    early("temperature that is no number", "--temperature", "nan", words="temperature must be a number"),
    early("top_p 0", "--top-p", "0", words="top_p must be above 0"),
    early("top_p above 1", "--top-p", "1.5", words="top_p must be a number, 0 to 1"),
    early("top_k -2", "--top-k", "-2", words="top_k must be an integer, -1 to 9223372036854775807"),
    early("min_p above 1", "--min-p", "2", words="min_p must be a number, 0 to 1"),
    request("a repetition penalty of 0", "--repetition-penalty", "0", words="repetition_penalty must be above 0"),
    request("a presence penalty of 3", "--presence-penalty", "3", words="presence_penalty must be a number, -2 to 2"),
    request("a frequency penalty of -3", "--frequency-penalty", "-3", words="frequency_penalty must be a number"),
    request("an empty bad word", "--bad-word", "", words="each of bad_words must be a text"),
    request("more min_tokens than max_tokens", "--min-tokens", "200", words="must be at most max_tokens=128"),
    request("a schema keyword that cannot be held to", "--json-schema", '{"not": {}}', words="the keyword 'not' at #"),
    request("a regular expression beyond grammars", "--regex", "(?=a)b", words="look-around, flags or another"),
    request("a grammar that is none", "--grammar", "root ::= (", words="the grammar cannot be read"),
    request("two constraints", "--regex", "a", "--json-schema", "{}", words="exactly one of json_schema"),
    request("more logprobs than tokens", "--logprobs", "9999", words="logprobs must be an integer, -1 to 512"),
    early("an empty stop string", "--stop", "", words="each stop string must be a text of at least one character"),
    line("an empty prompt", '""', "the prompt is empty", REQUESTS),
    line("a prompt without tokens", "[]", "at least one", REQUESTS),
    line("a token id out of range", "[5, 512]", "512", REQUESTS),
    line("a prompt longer than a sequence may be", str([5] * 200), "128", REQUESTS),
    line("an image token", f'"a {IMAGE_TOKEN} b"', "image", REQUESTS),
    line("a line that is no JSON", '"a"\n"b', "stdin, line 2: expected a JSON string"),
    line("a line that is no prompt", '{"text": "a"}', "stdin, line 1: expected a JSON string"),
    line(
        "a line with a parameter that does not exist", '{"prompt": "a", "max_token": 1}', "did you mean 'max_tokens'?"
    ),
    line("a line with a salt that is no text", '{"prompt": "a", "cache_salt": 7}', "line 1: cache_salt must be a text"),
    line("a line with another prefix cache", '{"prompt": "a", "prefix_cache": "on"}', "line 1: prefix_cache must be"),
    line("a line with a parameter without sense", '{"prompt": "a", "top_p": 2}', "stdin, line 1: top_p must be"),
    line("a file without prompts", "", "expected one prompt a line, found none"),
    Fault(
        COMMANDS,
        "a file of prompts that is not there",
        ("generate", "--prompts", "gone.jsonl"),
        ("gone.jsonl: No such",),
    ),
    Fault(
        COMMANDS,
        "a file of a schema that is not there",
        ("generate", "x", "--json-schema", "gone.json"),
        ("gone.json: No",),
    ),
    Fault(
        COMMANDS, "a file that is not UTF-8", ("generate", "--prompts", "LATIN"), ("expected UTF-8, byte 1 is 0xe9",)
    ),
    Fault(COMMANDS, "a prompt and a file of prompts", ("generate", "x", "--prompts", "y.jsonl"), ("got both",)),
    Fault(
        COMMANDS, "a memory size without sense", ("plan", "tiny", "--memory", "much"), ("memory is expected as 141GB",)
    ),
    Fault(COMMANDS, "a plan for no sequence", ("plan", "tiny", "--sequences", "0"), ("sequences is expected",)),
    benched("a benchmark at no rate", "--rate", "0", words="above 0, or inf for all at once"),
    benched("a benchmark with rates and a file", "--rate", "1", "--arrivals", "day.jsonl", words="got both"),
    benched("a benchmark of prompts without length", "--prompt-tokens", "none", words="a range such as 64:256"),
    benched("a share above 1", "--shared-prefix", "1.5", words="a share from 0 to 1"),
    benched("a file of arrivals that is not there", "--arrivals", "gone.jsonl", words="expected a file of JSON lines"),
    Fault(COMMANDS, "a folder that is in use", ("tiny", "FULL"), ("exists already and is not empty",)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_fault_has_its_message(fault: Fault, tmp_path: Path, errors_page: Any) -> None:
    (tmp_path / "latin.jsonl").write_bytes('"é"'.encode("latin-1"))
    places = {"FULL": str(tmp_path), "LATIN": str(tmp_path / "latin.jsonl"), "V4": str(tmp_path / "v4")}
    if "V4" in fault.command:
        write_tiny(tmp_path / "v4", family="deepseek_v4")
    environment = {"DEEPINFER_ACCELERATOR": "cpu", "DEEPINFER_HF_MODEL_DIR": "tiny", **dict(fault.environment)}
    command = [places.get(word, word) for word in fault.command]
    result = CliRunner(env=environment).invoke(app, command, input=fault.stdin)
    assert result.exit_code == (2 if fault.early else FAILED[fault.section])
    (message,) = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    for words in fault.words:
        assert words in message
    errors_page.check(fault.section, fault.what, message.removeprefix("error: ").replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("section", FAILED)
def test_page_has_all_faults(section: str, errors_page: Any) -> None:
    errors_page.check_complete(section, [fault.what for fault in FAULTS if fault.section == section])
