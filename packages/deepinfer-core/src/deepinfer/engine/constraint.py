"""What an output must match: `Constraint`, its grammar compiled off the loop, and where each request stands in it.

The only file that knows the grammar engine, xgrammar, and loads it when it is first needed. What a schema or a tool
means as a grammar is `engine/grammar/`'s; when a request gets its turn is the `Scheduler`'s.
"""

import importlib
import importlib.util
import json
import math
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer.engine.detokenizer import Detokenizer
from deepinfer.engine.grammar.ebnf import Rules, literal, one_of
from deepinfer.engine.grammar.json_schema import SchemaGrammar
from deepinfer.engine.grammar.regex import regex_to_ebnf
from deepinfer.engine.grammar.tool_calls import MARKUP_TOKEN, ToolCalls, tool_grammar
from deepinfer.errors import RequestError

THINKING_END = "</think>"
COMPILE_SECONDS = 30.0
"""How long a grammar may compile."""
COMPILERS = 2
"""Grammars that compile at the same time; one that takes too long is given up and no longer counts."""
KEPT_GRAMMARS = 256
KEPT_BYTES = 1 << 29
LONGEST_SOURCE = 1 << 16
"""Characters of a schema, an expression or a grammar."""
MOST_CHOICES = 4096
LARGEST_GRAMMAR = 1 << 28
"""Bytes of a compiled grammar."""

_NO_TEXT = b"\xff"
"""Bytes of tokens that no text holds: a grammar reaches them by their id or not at all."""

Words = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What an output must match: exactly one of the first six.

    json_schema  a JSON Schema 2020-12, as an object, true, or its text: the output is a JSON text valid against it
    json_object  the output is any JSON object
    regex        the whole output matches this regular expression
    choice       the output is one of these texts
    grammar      the output matches the rule `root` of this EBNF (the notation of llama.cpp's GBNF)
    tool_calls   the output is text and calls of tools, see `ToolCalls`
    thinking     the prompt has opened the reasoning: the output is free up to its end and constrained behind it
    """

    json_schema: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    tool_calls: ToolCalls | None = None
    thinking: bool = False


def read_constraint(given: object) -> Constraint:
    """Turn what a request may say into a Constraint: one, a mapping of its fields, or the text of a JSON schema."""
    if isinstance(given, str):
        given = Constraint(json_schema=given)
    if isinstance(given, Mapping):
        named = {"json_schema" if key == "json" else key: value for key, value in given.items()}
        known = {field.name for field in fields(Constraint)}
        if unknown := sorted(map(str, set(named) - known)):
            raise RequestError(f"structured has {unknown[0]!r}, which is none of {', '.join(sorted(known))}")
        given = Constraint(**named)
    if not isinstance(given, Constraint):
        raise RequestError(f"structured must be a Constraint, a mapping or a JSON schema's text, got {given!r}")
    kinds = (given.json_schema, given.regex, given.choice, given.grammar, given.tool_calls, given.json_object or None)
    if sum(kind is not None for kind in kinds) != 1:
        raise RequestError(
            "structured must have exactly one of json_schema, json_object, regex, choice, grammar and tool_calls"
        )
    return given


class Grammars:
    """The grammars of one tokenizer: compiled ones by their text, the last used kept, and the masks they make.

    Made without the grammar engine; a thread loads that with the first grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], rows: int) -> None:
        """`rows` are the most sequences of a step."""
        self._tokenizer = tokenizer
        self._eos = list(eos_token_ids)
        self._vocab_size = vocab_size
        self._padded = -(-vocab_size // 64) * 64  # rows of whole 64-bit words, which copies to the device are made of
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._queue: deque[tuple[str, _Compilation]] = deque()
        self._busy: list[_Compilation] = []
        self._compiler: Any = None
        self._engine: Any = None
        self._filler: Any = None
        self._kept: OrderedDict[str, _Compilation] = OrderedDict()
        self._words: Words = np.full((rows, self._padded // 32), -1, dtype=np.int32)
        self._end_words = self._only(self._eos)
        self._text_words = self._only([])

    def begin(self, given: object) -> "Matching":
        """Start the grammar of a request and return where the request stands; raises RequestError at once.

        Compiling goes on in another thread.
        """
        constraint = read_constraint(given)
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError("structured output needs xgrammar: install deepinfer-core[structured]")
        if not self._eos:
            raise RequestError("structured output needs an end-of-sequence token, config.json names none")
        thinking_end = self._token(THINKING_END) if constraint.thinking else None
        try:
            source = self._source(constraint)
        except RecursionError:
            raise RequestError(
                "the constraint has too many parts inside one another, or members of an object"
            ) from None
        if thinking_end is None:
            return Matching(self, self._compile(source), None, None)
        # Only the end of the reasoning leads to the output; a call that opens inside it would not be checked.
        markup = [self._token(MARKUP_TOKEN)] if constraint.tool_calls is not None else []
        return Matching(self, self._compile(source), thinking_end, ~self._only([*self._eos, *markup]))

    def fill(self, matchings: Sequence[tuple[int, "Matching"]], rows: int) -> Words:
        """Masks int32 [rows, W] of the next token: -1 for a row that nobody names. Valid until the next call."""
        words = self._words[:rows]
        words[:] = -1
        self._write(self._words, matchings)
        return words

    def fill_along(self, matchings: Sequence[tuple[int, "Matching", Sequence[int]]], rows: int) -> Words:
        """Masks int32 [rows, W] behind each output, and behind each draft after it, from the row that is named on.

        Rows behind a draft that is not allowed keep -1, as those that nobody names: no text gets there.
        """
        words: Words = np.full((rows, self._words.shape[1]), -1, dtype=np.int32)
        taken = [0] * len(matchings)
        going = list(range(len(matchings)))
        while going:
            self._write(words, [(matchings[i][0] + taken[i], matchings[i][1]) for i in going])
            going = [i for i in going if _goes_on(words, matchings[i], taken[i])]
            for i in going:
                taken[i] += 1
        for (_, matching, _), count in zip(matchings, taken, strict=True):
            matching.rollback(count)
        return words

    def _write(self, words: Words, matchings: Sequence[tuple[int, "Matching"]]) -> None:
        """Write the masks of the next token into the rows that are named."""
        inside: list[Any] = []
        places: list[int] = []
        for place, matching in matchings:
            if matching.free is not None:
                words[place] = matching.free
            else:
                inside.append(matching.matcher)
                places.append(place)
        if inside:
            self._filler.batch_fill_next_token_bitmask(inside, torch.from_numpy(words), places)
            for place, matching in matchings:
                if not matching.forbade and matching.free is None:
                    matching.masks += 1
                    matching.forbade = self._forbids(words[place])

    def _forbids(self, words: Words) -> bool:
        """Whether a mask forbids a token that is a text by itself, as it does inside a character too: not counted."""
        inside_character = not (words & (self._text_words | self._end_words)).any()
        return not inside_character and bool((~words & self._text_words).any())

    def is_end(self, words: Words) -> bool:
        """Whether a mask allows nothing but the end of the output."""
        return bool(np.array_equal(words, self._end_words))

    def matcher(self, grammar: Any) -> Any:
        """A new matcher at the beginning of a compiled grammar."""
        return self._engine.GrammarMatcher(grammar)

    def _token(self, spelling: str) -> int:
        token: int | None = self._tokenizer.token_to_id(spelling)
        if token is None:
            raise RequestError(f"the tokenizer has no {spelling}: thinking and tool_calls are not for this model")
        return token

    def _only(self, tokens: Sequence[int]) -> Words:
        bits = np.zeros(self._padded, dtype=np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _source(self, constraint: Constraint) -> str:
        """The grammar as EBNF; raises RequestError for what cannot be enforced."""
        rules = Rules()
        if constraint.grammar is not None:
            return _text("grammar", constraint.grammar)
        if constraint.json_schema is not None:
            return rules.text(SchemaGrammar(_schema(constraint.json_schema), rules).whole())
        if constraint.json_object:
            return rules.text(SchemaGrammar({"type": "object"}, rules).whole())
        if constraint.regex is not None:
            return rules.text(regex_to_ebnf(_text("regex", constraint.regex)))
        if constraint.choice is not None:
            return rules.text(one_of(map(literal, _choices(constraint.choice))))
        assert constraint.tool_calls is not None
        return rules.text(tool_grammar(constraint.tool_calls, rules, self._token(MARKUP_TOKEN)))

    def _compile(self, source: str) -> "_Compilation":
        with self._lock:
            found = self._kept.pop(source, None)
            if found is None or found.error is not None:
                found = _Compilation()
                self._queue.append((source, found))
            self._kept[source] = found
            self._forget()
        self.tend()
        return found

    def tend(self) -> None:
        """Let compilers begin while fewer than allowed are at work and grammars wait for them."""
        with self._lock:
            self._busy = [one for one in self._busy if not one.ready]
            while self._queue and len(self._busy) < COMPILERS:
                source, compilation = self._queue.popleft()
                self._busy.append(compilation)
                threading.Thread(target=self._work, args=(source, compilation), daemon=True, name="grammar").start()

    def _forget(self) -> None:
        """Drop those that were not used for longest, while there are too many or they are too large."""
        size = sum(kept.size for kept in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > KEPT_GRAMMARS or size > KEPT_BYTES):
            _, oldest = self._kept.popitem(last=False)
            size -= oldest.size

    def _work(self, source: str, compilation: "_Compilation") -> None:
        """Compile one grammar; runs in its own thread."""
        try:
            compiler = self._loaded()
            compilation.begin()
            grammar = compiler.compile_grammar(source)
        except Exception as error:  # noqa: BLE001 - the grammar engine's errors end the request, never the engine
            first = str(error).strip().partition("\n")[0]
            told = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", first)  # when, and where in the source of the grammar engine
            compilation.fail(f"the grammar cannot be read: {told[:300]}")
        else:
            compilation.finish(grammar)
        self.tend()

    def _loaded(self) -> Any:
        """The compiler, made with the first grammar: the grammar engine takes seconds to load."""
        with self._loading:
            if self._compiler is None:
                engine = importlib.import_module("xgrammar")
                texts = self._vocabulary()
                self._text_words = self._only([token for token, text in enumerate(texts) if _is_text(text)])
                known = engine.TokenizerInfo(texts, vocab_size=self._padded, stop_token_ids=self._eos)
                self._compiler = engine.GrammarCompiler(known, max_threads=1, cache_enabled=False)
                self._filler = engine.BatchGrammarMatcher()
                self._engine = engine
            return self._compiler

    def _vocabulary(self) -> list[bytes]:
        """What each token adds to the text; nothing that a grammar could read for markup and unused ids."""
        detokenizer, added = Detokenizer(self._tokenizer), self._tokenizer.get_added_tokens_decoder()
        texts = [b"" if token in added else detokenizer.bytes_of(token) for token in range(self._vocab_size)]
        return [text or _NO_TEXT for text in texts] + [_NO_TEXT] * (self._padded - self._vocab_size)


class _Compilation:
    """A grammar on its way; `ready` once it is compiled, failed, or out of time."""

    def __init__(self) -> None:
        self._deadline = math.inf
        self._done = threading.Event()
        self.grammar: Any = None
        self.error: str | None = None
        self.size = 0

    @property
    def ready(self) -> bool:
        if not self._done.is_set() and time.monotonic() > self._deadline:
            self.fail(f"the grammar took more than {COMPILE_SECONDS:g} s to compile: simplify it")
        return self._done.is_set()

    def wait(self, timeout_s: float) -> None:
        self._done.wait(timeout_s)

    def begin(self) -> None:
        self._deadline = time.monotonic() + COMPILE_SECONDS

    def finish(self, grammar: Any) -> None:
        size = grammar.memory_size_bytes
        if size > LARGEST_GRAMMAR:
            self.fail(f"the grammar takes {size} bytes, at most {LARGEST_GRAMMAR} are given: simplify it")
        elif self.error is None:
            self.grammar, self.size = grammar, size
            self._done.set()

    def fail(self, error: str) -> None:
        if not self._done.is_set():
            self.error = error
            self._done.set()


class Matching:
    """Where one output stands in its grammar; follows from its tokens, and goes back with them.

    masks, forbade  how many masks were made before the first that forbade a text, and whether there was one
    """

    def __init__(
        self, grammars: Grammars, compilation: _Compilation, thinking_end: int | None, free_words: Words | None
    ) -> None:
        self.grammars = grammars
        self._compilation = compilation
        self._thinking_end = thinking_end
        self._free_words = free_words
        self._open = thinking_end is not None
        self._before = self._inside = 0
        self.masks, self.forbade = 0, False
        self._matcher: Any = None

    @property
    def ready(self) -> bool:
        """Whether there is no more to wait for; then `error` says what went wrong, if anything did."""
        ready = self._compilation.ready
        if not ready:
            self.grammars.tend()
        return ready

    @property
    def error(self) -> str | None:
        """Why there is no grammar."""
        return self._compilation.error

    def wait(self, timeout_s: float) -> None:
        """Wait until it is ready, but no longer than this."""
        self._compilation.wait(timeout_s)

    @property
    def free(self) -> Words | None:
        """The mask of every token of the reasoning; None behind its end."""
        return self._free_words if self._open else None

    @property
    def matcher(self) -> Any:
        """The grammar engine's matcher."""
        if self._matcher is None:
            self._matcher = self.grammars.matcher(self._compilation.grammar)
        return self._matcher

    def accept(self, token: int) -> bool:
        """Take the next token of the output; False, and no change, when the grammar does not allow it."""
        if self._open:
            self._before += 1
            self._open = token != self._thinking_end
            return True
        if not self.matcher.accept_token(token):
            return False
        self._inside += 1
        return True

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted."""
        inside = min(count, self._inside)
        if inside:
            self.matcher.rollback(inside)
            self._inside -= inside
        if count > inside:
            self._before -= count - inside
            self._open = True

    def count_allowed(self, tokens: Iterable[int]) -> int:
        """How many of `tokens` could come one behind the other from here; nothing changes."""
        count = 0
        for token in tokens:
            if self.free is not None and not allows(self.free, token):
                break
            if not self.accept(token):
                break
            count += 1
        self.rollback(count)
        return count


def _is_text(data: bytes) -> bool:
    """Whether the bytes of a token are characters that may be read."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and (text.isprintable() or text.isspace())


def allows(words: Words, token: int) -> bool:
    """Whether a row of masks [W] allows `token`."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def _goes_on(words: Words, along: tuple[int, Matching, Sequence[int]], taken: int) -> bool:
    """Whether an output goes on behind `taken` of its drafts with the next one, which it then has taken."""
    place, matching, drafts = along
    return taken < len(drafts) and allows(words[place + taken], drafts[taken]) and matching.accept(drafts[taken])


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{name} must be a text, got {value!r}")
    if len(value) > LONGEST_SOURCE:
        raise RequestError(f"{name} has {len(value)} characters, at most {LONGEST_SOURCE} are taken")
    return value


def _schema(given: object) -> object:
    """A JSON schema that may be given as text."""
    if isinstance(given, str):
        try:
            return json.loads(_text("json_schema", given))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is no JSON: {error}") from None
    try:
        _text("json_schema", json.dumps(given))
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"json_schema is no JSON: {error}") from None
    return given


def _choices(given: object) -> Sequence[str]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not 1 <= len(given) <= MOST_CHOICES:
        raise RequestError(f"choice must be a list of 1 to {MOST_CHOICES} texts")
    if not all(isinstance(text, str) and text for text in given):
        raise RequestError("each choice must be a text of at least one character")
    return given
