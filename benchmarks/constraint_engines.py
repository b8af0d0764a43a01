# /// script
# requires-python = ">=3.12"
# dependencies = ["deepinfer-core[structured]", "jsonschema", "llguidance==1.9.1"]
# ///
"""Two grammar engines on the 300 schemas of the tests: ours (own converter, xgrammar) against llguidance.

    uv run --with llguidance==1.9.1 python benchmarks/constraint_engines.py --tokenizer TOKENIZER.json

Both walk at random through what their own masks allow, to the end of a text or 150 tokens; a text that ended is held
against its schema with jsonschema.  Times are of one thread: to compile (for ours, from the schema on), and for a mask
and the token behind it.  Below: keywords that no grammar of this kind enforces exactly, and what each engine does with
them.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, override

import jsonschema
import llguidance
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer.engine.constraint import Constraint, Grammars, Matching
from deepinfer.errors import RequestError

SCHEMAS = Path(__file__).parents[1] / "packages/deepinfer-core/tests/engine"
LONGEST = 150
TEXT, NUMBER, SEVERAL = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}
KEYWORDS: dict[str, Any] = {
    "contains": {**SEVERAL, "contains": {"const": 7}},
    "uniqueItems": {**SEVERAL, "uniqueItems": True, "minItems": 2},
    "not": {**NUMBER, "not": {"const": 7}},
    "if, then": {"type": "object", "properties": {"a": NUMBER}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "properties": {"a": NUMBER, "b": TEXT}, "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "properties": {"a": NUMBER}, "unevaluatedProperties": False},
    "oneOf that overlaps": {"oneOf": [NUMBER, {"type": "number", "minimum": 3}]},
    "format hostname": {**TEXT, "format": "hostname"},
    "contentEncoding": {**TEXT, "contentEncoding": "base64"},
    "nullable": {**TEXT, "nullable": True},
    "pattern and maxLength": {**TEXT, "pattern": "^(ab)+$", "maxLength": 5},
}


class Walk(Protocol):
    """A place in a grammar."""

    def mask(self) -> NDArray[np.uint8]:
        """Bits of the tokens that may come, the first in the lowest bit."""
        ...

    def accept(self, token: int) -> None:
        """Go on with a token."""
        ...


@dataclass
class OurWalk(Walk):
    """In xgrammar, by the engine's own way to it."""

    grammars: Grammars
    matching: Matching

    @override
    def mask(self) -> NDArray[np.uint8]:
        return self.grammars.fill([(0, self.matching)], 1)[0].view(np.uint8)

    @override
    def accept(self, token: int) -> None:
        assert self.matching.accept(token)


@dataclass
class TheirWalk(Walk):
    """In llguidance."""

    matcher: Any

    @override
    def mask(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)

    @override
    def accept(self, token: int) -> None:
        assert self.matcher.consume_token(token)


@dataclass
class Tally:
    """What was seen of one engine; times in microseconds."""

    compiled: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    refused: int = 0
    ended: int = 0
    wrong: int = 0

    def line(self, name: str) -> str:
        """A row of the table."""

        def told(times: list[float]) -> str:
            return f"{statistics.median(times):9.0f} {np.quantile(times, 0.9):9.0f} {max(times):10.0f}"

        counts = f"{self.refused:8d} {self.ended:6d} {self.wrong:6d}"
        return f"{name:<11}{told(self.compiled)} |{told(self.masks)} |{counts}"


def walk(place: Walk, tally: Tally, tokens: Sequence[bytes], ends: Sequence[int], seed: int) -> str | None:
    """Choose at random among short tokens and the end; return the text, None when it has none after all tokens."""
    random = np.random.default_rng(seed)
    text = b""
    for _ in range(LONGEST):
        begin = time.perf_counter()
        bits = place.mask()
        made = time.perf_counter() - begin
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(tokens)])
        if np.isin(allowed, ends).any() and (len(allowed) == 1 or random.random() < 0.5):
            return text.decode("utf-8", "replace")
        allowed = allowed[~np.isin(allowed, ends)]
        few = random.choice(allowed, min(len(allowed), 8))
        token = int(min(few, key=lambda one: len(tokens[one])))
        begin = time.perf_counter()
        place.accept(token)
        tally.masks.append((made + time.perf_counter() - begin) * 1e6)
        text += tokens[token]
    return None


def run(
    begin: Callable[[Any], Walk | None], schemas: Sequence[Any], tokens: Sequence[bytes], ends: Sequence[int]
) -> Tally:
    """Compile every schema and walk through it once."""
    tally = Tally()
    for seed, schema in enumerate(schemas):
        start = time.perf_counter()
        place = begin(schema)
        tally.compiled.append((time.perf_counter() - start) * 1e6)
        if place is None:
            tally.refused += 1
            continue
        text = walk(place, tally, tokens, ends, seed)
        if text is not None:
            tally.ended += 1
            tally.wrong += not _valid(text, schema)
    return tally


def _valid(text: str, schema: Any) -> bool:
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    """Print a line for each engine, then a line for each keyword."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--eos", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(SCHEMAS))
    schemas: list[Any] = importlib.import_module("schemas").make_schemas(options.schemas)

    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    size = tokenizer.get_vocab_size()
    grammars = Grammars(tokenizer, size, [options.eos], rows=1)
    theirs = llguidance.LLTokenizer(str(options.tokenizer), n_vocab=size, eos_token=options.eos)
    told: dict[str, str] = {}

    def begin_ours(schema: Any) -> Walk | None:
        try:
            matching = grammars.begin(Constraint(json_schema=schema))
            while not matching.ready:
                matching.wait(1)
        except RequestError as error:
            told["ours"] = f"refused: {error}"
            return None
        told["ours"] = "taken" if matching.error is None else f"refused: {matching.error}"
        return OurWalk(grammars, matching) if matching.error is None else None

    def begin_theirs(schema: Any) -> Walk | None:
        matcher = llguidance.LLMatcher(theirs, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        if matcher.is_error():
            told["llguidance"] = f"refused: {matcher.get_error().splitlines()[0]}"
            return None
        told["llguidance"] = "taken, with a warning" if matcher.get_grammar_warnings() else "taken"
        return TheirWalk(matcher)

    begin_ours(True)  # loads the grammar engine
    tokens = grammars._vocabulary()
    print(f"{len(schemas)} schemas, {size} tokens; microseconds: median, 90 %, most")
    print(f"{'':<11}{'compile':>30} |{'mask and token':>30} |{'refused':>8} {'ended':>6} {'wrong':>6}")
    for name, begin in (("ours", begin_ours), ("llguidance", begin_theirs)):
        print(run(begin, schemas, tokens, [options.eos]).line(name), flush=True)
    print()
    for keyword, schema in KEYWORDS.items():
        for name, begin in (("ours", begin_ours), ("llguidance", begin_theirs)):
            tally = run(begin, [schema] * 40, tokens, [options.eos])
            print(f"{keyword:<24}{name:<11}{told[name][:70]:<72}{tally.wrong:3d} of {tally.ended} wrong")


if __name__ == "__main__":
    main()
