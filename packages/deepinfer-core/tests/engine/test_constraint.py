"""Constrained output is valid, whatever runs beside it; what cannot be held to is refused by its name and place."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepinfer import LLM, Constraint, SamplingParams
from deepinfer.engine.constraint import Grammars
from deepinfer.engine.grammar.json_text import FORMATS
from deepinfer.engine.grammar.schema_algebra import ANNOTATIONS, ASSERTIONS, REFUSED
from deepinfer.engine.grammar.tool_calls import ToolCalls
from deepinfer.engine.request import Completion
from deepinfer.errors import RequestError
from deepinfer.model.tiny_tokenizer import make_tokenizer

from .schemas import make_schemas

PAGE = Path(__file__).parents[4] / "docs" / "structured-outputs.md"
TOKENIZER = make_tokenizer()
EOS, THINK_END, MARKUP = 1, TOKENIZER.token_to_id("</think>"), TOKENIZER.token_to_id("｜DSML｜")
SMALL = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string", "maxLength": 6},
                "n": {"type": "integer", "minimum": 1, "maximum": 5},
                "deep": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
            },
            "required": ["key"],
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", accelerator="cpu", max_num_seqs=128, max_model_len=1024)


def constrained(max_tokens: int = 400, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, structured=Constraint(**fields))


def check_valid(completion: Completion, schema: Any) -> None:
    assert completion.finish_reason in ("stop", "length"), completion.error
    if completion.finish_reason == "stop":
        jsonschema.Draft202012Validator(schema).validate(json.loads(completion.text))


def test_outputs_of_300_schemas_are_valid(llm: LLM) -> None:
    schemas = make_schemas(300)
    ended: set[int] = set()
    for attempt in range(6):
        left = [place for place in range(300) if place not in ended]
        params = [replace(constrained(150, json_schema=schemas[place]), seed=1000 * attempt + place) for place in left]
        for place, completion in zip(left, llm.generate(["x"] * len(left), params), strict=True):
            check_valid(completion, schemas[place])
            if completion.finish_reason == "stop":
                ended.add(place)
    assert len(ended) == 300


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": r"[a-c]{3}-\d+(\.5)?"}, r"[a-c]{3}-\d+(\.5)?"),
        ({"choice": ["yes", "no", 'viell"eicht']}, 'yes|no|viell"eicht'),
        ({"grammar": 'root ::= "(" [0-9]{2} sign ")"\nsign ::= "+" | "-"'}, r"\(\d\d[+-]\)"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_other_kinds(llm: LLM, fields: dict[str, Any], pattern: str) -> None:
    params = [replace(constrained(100, **fields), seed=seed) for seed in range(8)]
    ended = [one for one in llm.generate(["x"] * 8, params) if one.finish_reason == "stop"]
    assert ended
    assert all(re.fullmatch(pattern, one.text) for one in ended)
    assert all(one.token_ids[-1] == EOS for one in ended)


def test_mappings_and_texts_say_the_same(llm: LLM) -> None:
    forms: list[Any] = [Constraint(json_schema=SMALL), {"json": SMALL}, {"json_schema": SMALL}, json.dumps(SMALL)]
    texts = [
        one.text
        for one in llm.generate(["x"] * 4, [SamplingParams(structured=form, seed=3, max_tokens=99) for form in forms])
    ]
    assert len(set(texts)) == 1
    check_valid(llm.generate("x", SamplingParams(structured=forms[0], max_tokens=99))[0], SMALL)


def test_a_constrained_request_writes_the_same_beside_others_and_preempted() -> None:
    schemas = make_schemas(6, seed=5)
    params = [replace(constrained(90, json_schema=one), seed=place) for place, one in enumerate(schemas)]
    params[1] = replace(params[1], presence_penalty=1.0, logit_bias={40: 2.0}, min_tokens=4)
    params += [SamplingParams(max_tokens=90, seed=9), SamplingParams(max_tokens=90, temperature=0)]
    exact = {
        "accelerator": "cpu",
        "max_num_seqs": 8,
        "max_model_len": 256,
        "dtype": "float64",
        "kv_cache_dtype": "model",
    }
    one = LLM("tiny", **exact)  # type: ignore[arg-type]
    alone = [one.generate("x" * 40, each)[0].token_ids for each in params]
    assert [got.token_ids for got in one.generate(["x" * 40] * 8, params)] == alone
    blocks = one.engine.scheduler.blocks
    taken = blocks.take(blocks.free - 5)  # sequences that grow now take blocks from one another
    crowded = one.generate(["x" * 40] * 8, params)
    blocks.give(taken)
    assert [got.token_ids for got in crowded] == alone


def test_the_mask_begins_where_the_reasoning_ends(llm: LLM) -> None:
    params = [
        replace(constrained(200, json_schema=SMALL, thinking=True), seed=seed, logit_bias={THINK_END: 14.0})
        for seed in range(8)
    ]
    for one in llm.generate(["x"] * 8, params):
        assert THINK_END in one.token_ids
        end = one.token_ids.index(THINK_END)
        assert EOS not in one.token_ids[:end]
        check_valid(replace(one, text=TOKENIZER.decode(list(one.token_ids[end + 1 :]))), SMALL)


def test_a_finished_constraint_ends_before_min_tokens_and_bans_can_leave_nothing(llm: LLM) -> None:
    short, stuck = llm.generate(
        ["x"] * 2,
        [
            replace(constrained(choice=["yes"]), min_tokens=50),
            replace(constrained(regex="6"), bad_words_token_ids=[TOKENIZER.encode("6").ids]),
        ],
    )
    assert (short.text, short.finish_reason) == ("yes", "stop")
    assert stuck.finish_reason == "error"
    assert stuck.error is not None
    assert "no token is left" in stuck.error


def test_others_do_not_wait_for_a_grammar_and_an_abort_finds_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, work = threading.Event(), Grammars._work

    def slow(self: Grammars, source: str, compilation: Any) -> None:
        gate.wait(60)
        work(self, source, compilation)

    monkeypatch.setattr(Grammars, "_work", slow)
    stream = llm.generate(["x"] * 2, [constrained(regex="slow[a-z]"), SamplingParams(max_tokens=5)], stream=True)
    first = [next(stream) for _ in range(5)]
    assert {step.index for step in first} == {1}
    gate.set()
    assert {step.completion.text[:4] for step in stream if step.completion is not None} == {"slow"}
    gate.clear()
    dropped = llm.generate(["x"] * 2, [constrained(regex="again"), SamplingParams(max_tokens=5)], stream=True)
    next(dropped)
    dropped.close()  # type: ignore[attr-defined]
    gate.set()
    llm.generate("x", SamplingParams(max_tokens=2))
    assert not llm.engine.has_work


def test_a_grammar_that_takes_too_long_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr("deepinfer.engine.constraint.COMPILE_SECONDS", 0.2)

    def never(self: Grammars, source: str, compilation: Any) -> None:
        compilation.begin()
        gate.wait(60)

    monkeypatch.setattr(Grammars, "_work", never)
    stuck = llm.generate(["x"] * 5, [constrained(regex=f"never{n}") for n in range(5)])
    assert all(one.error is not None and "to compile" in one.error for one in stuck)
    monkeypatch.undo()
    gate.set()
    assert llm.generate("x", constrained(regex="now"))[0].text == "now"


def cases_of(count: int, groups: int) -> dict[str, Any]:
    """Objects of which every choice of one of `count` in each of `groups` is a case."""
    objects = [
        {"anyOf": [{"type": "object", "properties": {f"p{group}_{i}": True}} for i in range(count)]}
        for group in range(groups)
    ]
    return {"allOf": objects}


def doubled(depth: int) -> dict[str, Any]:
    """A schema whose every level refers to the next one twice."""
    levels = {
        f"d{level}": {"type": "object", "properties": {side: {"$ref": f"#/$defs/d{level + 1}"} for side in "ab"}}
        for level in range(depth)
    }
    return {"$defs": {**levels, f"d{depth}": {"type": "null"}}, "$ref": "#/$defs/d0"}


BOMBS: dict[str, dict[str, Any]] = {
    "cases of cases": {"json_schema": cases_of(16, 2)},
    "too many cases": {"json_schema": cases_of(4, 12)},
    "doubled references": {"json_schema": doubled(40)},
    "1,500 members": {"json_schema": {"type": "object", "properties": {f"p{i}": True for i in range(1500)}}},
    "400 members, 100 to 300 of them": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": True for i in range(400)},
            "minProperties": 100,
            "maxProperties": 300,
        }
    },
    "a million items": {"json_schema": {"type": "array", "minItems": 100_000, "maxItems": 1_000_000}},
    "counts of counts in a regex": {"regex": "(((a{1,300}b){1,300}c){1,300}d){1,300}"},
    "optional letters": {"regex": "(a?){500}a{500}"},
    "a long regex": {"regex": "|".join(f"w{i}[a-z]*" for i in range(6000))},
    "doubled rules": {
        "grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"'
    },
    "counts of counts in EBNF": {"grammar": 'root ::= ((("a"{1,500} "b"){1,500} "c"){1,500} "d"){1,500}'},
    "left recursion": {"grammar": 'root ::= root "a" | "b"'},
    "empty loops": {"grammar": 'root ::= (("a"*)*)* "b"'},
    "1,500 rules": {
        "grammar": "root ::= "
        + " | ".join(f"r{i}" for i in range(1500))
        + "".join(f'\nr{i} ::= [a-z]* "x" r{i * 7 % 1500}' for i in range(1500))
    },
}
"""What grows without bound in one way or another of reading it."""


def test_what_blows_up_ends_its_own_request_while_others_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.engine.constraint.COMPILE_SECONDS", 8.0)
    plain = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    bombs = [constrained(10, **fields) for fields in BOMBS.values()]
    other, *ended = llm.generate(["x"] * (1 + len(BOMBS)), [plain, *bombs])
    assert other.token_ids == llm.generate("x", plain)[0].token_ids
    said = ("at most", "more than", "too many", "to compile", "cannot be read", "that is not 0 to")
    for name, bomb in zip(BOMBS, ended, strict=True):
        assert bomb.finish_reason in ("stop", "length", "error"), name
        assert bomb.error is None or any(words in bomb.error for words in said), (name, bomb.error)
    errors = {name: bomb.error for name, bomb in zip(BOMBS, ended, strict=True) if bomb.error is not None}
    assert errors.keys() >= {"too many cases", "1,500 members", "400 members, 100 to 300 of them", "a long regex"}
    assert not llm.engine.has_work


def test_a_grammar_that_becomes_too_large_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.engine.constraint.LARGEST_GRAMMAR", 1000)
    (large,) = llm.generate("x", constrained(regex="[a-z]{3}-large"))
    assert large.error is not None
    assert "bytes, at most 1000 are given: simplify it" in large.error
    monkeypatch.undo()
    assert llm.generate("x", constrained(regex="[a-z]{3}-large"))[0].finish_reason == "stop"


@pytest.mark.parametrize("version", ["v4", "v4.1"])
def test_calls_obey_the_schemas_of_the_tools(llm: LLM, version: Any) -> None:
    gap = "" if version == "v4" else " "
    calls = ToolCalls(tools=[TOOL], required=True, opened=True, version=version)
    closer = f"</\0{gap}{'tool_calls' if version == 'v4' else 'calls'}>"
    params = [replace(constrained(600, tool_calls=calls), seed=seed) for seed in range(12)]
    ended = [one for one in llm.generate(["x"] * 12, params) if one.finish_reason == "stop"]
    assert ended
    for one in ended:
        text = _marked(one.token_ids)
        assert text.endswith(closer)
        found = re.findall(rf'<\0{gap}invoke name="look_up">\n(.*?)</\0{gap}invoke>\n', text, re.DOTALL)
        assert found
        for body in found:
            pairs = re.findall(
                rf'<\0{gap}parameter name="(\w+)" string="(true|false)">(.*?)</\0{gap}parameter>\n', body, re.DOTALL
            )
            values = {name: value if kind == "true" else json.loads(value) for name, kind, value in pairs}
            jsonschema.validate(values, TOOL["function"]["parameters"])  # type: ignore[index]


def _marked(tokens: tuple[int, ...]) -> str:
    """The text of an output that has ended, with NUL for the markup's token."""
    pieces: list[list[int]] = [[]]
    for token in tokens[:-1]:
        if token == MARKUP:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return "\0".join(TOKENIZER.decode(piece) for piece in pieces)


REFUSALS: list[tuple[Any, str, str]] = [
    *(({"properties": {"p": {keyword: 1}}}, keyword, "#/properties/p") for keyword in REFUSED),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "#"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "#"),
    ({"type": "number", "multipleOf": 0.01}, "multipleOf", "#"),
    ({"type": "string", "pattern": "^a", "minLength": 3}, "minLength", "#"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "pattern", "#"),
    ({"type": "string", "pattern": r"^\bb$"}, "pattern", "#"),
    ({"type": "string", "format": "regex"}, "format", "#"),
    ({"enum": ["a"], "minLength": 2}, "minLength", "#"),
    ({"$ref": "#/$defs/gone"}, "$ref", "#"),
    ({"$ref": "https://example.org/schema"}, "$ref", "#"),
    ({"properties": {"a": {}}, "additionalProperties": False, "required": ["b"]}, "required", "#"),
    ({"patternProperties": {"^a": {}, "^b": {}}}, "patternProperties", "#"),
    ({"properties": {"ab": {}}, "patternProperties": {"^a": {}}}, "patternProperties", "#"),
    ({"additionalProperties": {"type": "integer"}, "minProperties": 3}, "minProperties", "#"),
    ({"type": "strnig"}, "type", "#"),
    ({"items": {"anyOf": [{"unknownWord": 1}]}}, "unknownWord", "#/items"),
    ({"minimum": 1e-12}, "minimum", "#"),
]


@pytest.mark.parametrize(("schema", "keyword", "path"), REFUSALS)
def test_what_cannot_be_held_to_is_refused_by_name_and_place(schema: Any, keyword: str, path: str) -> None:
    grammars = Grammars(TOKENIZER, 512, [EOS], 4)
    with pytest.raises(RequestError, match=f"the keyword {keyword!r} at {path}".replace("$", r"\$")):
        grammars.begin(Constraint(json_schema=schema))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Constraint(), "exactly one of"),
        ({"json": {}, "regex": "a"}, "exactly one of"),
        ({"jsn": {}}, "'jsn', which is none of"),
        (5, "must be a Constraint"),
        ("{", "json_schema is no JSON"),
        ({"json": False}, "allows no value"),
        ({"json": {"$ref": "#"}}, "allows no value"),
        ({"regex": "a{"}, "position"),
        ({"regex": "(" * 60 + ")" * 60}, "more than 50 groups"),
        ({"regex": ""}, "regex must be a text"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": [""]}, "at least one character"),
        ({"grammar": "x" * 70_000}, "at most 65536"),
        ({"tool_calls": ToolCalls(tools=[])}, "1 to 512 tools"),
        ({"tool_calls": ToolCalls(tools=[{"name": "x"}])}, "a tool must be"),
        (
            {"tool_calls": ToolCalls(tools=[{"type": "function", "function": {"name": "a b"}}])},
            "cannot be read back",
        ),
    ],
)
def test_other_faults_are_told(given: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        Grammars(TOKENIZER, 512, [EOS], 4).begin(given)


def test_without_the_grammar_engine_the_request_ends_and_says_why(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused, plain = llm.generate(["x"] * 2, [constrained(json_object=True), SamplingParams(max_tokens=3)])
    assert refused.error is not None
    assert "install deepinfer-core[structured]" in refused.error
    assert len(plain.token_ids) == 3
    assert "ignore_eos" in (llm.generate("x", SamplingParams(structured="{}", ignore_eos=True))[0].error or "")


def test_a_matching_goes_back() -> None:
    grammars = Grammars(TOKENIZER, 512, [EOS], 4)
    matching = grammars.begin(Constraint(regex="abcd", thinking=True))
    matching.wait(120)
    assert matching.ready
    ids = [40, 41, THINK_END, *(TOKENIZER.encode(letter).ids[0] for letter in "abc")]
    words = [grammars.fill([(0, matching)], 1)[0].copy()]
    for token in ids:
        assert matching.accept(token)
        words.append(grammars.fill([(0, matching)], 1)[0].copy())
    assert not matching.accept(ids[3])
    for count in range(len(ids) + 1):
        matching.rollback(count)
        assert (grammars.fill([(0, matching)], 1)[0] == words[len(ids) - count]).all()
        for token in ids[len(ids) - count :]:
            assert matching.accept(token)


def test_the_page_names_every_keyword() -> None:
    rows = dict(
        re.findall(r"^\| `([^`]+)` \| (enforced|refused|annotation)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    expected = dict.fromkeys(ASSERTIONS, "enforced") | dict.fromkeys(REFUSED, "refused")
    assert rows == expected | dict.fromkeys(ANNOTATIONS, "annotation")
    for name in FORMATS:
        assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
