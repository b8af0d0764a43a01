"""Owns parsing blocks of tool calls with repairs: missing closers, odd attributes, values that are not JSON.

Text outside of blocks is in `repair_parser`.
"""

import re
from collections.abc import Callable
from io import StringIO
from typing import Final

from deepseek_recipe.grammar import Action
from deepseek_recipe.json_reader import JsonSyntaxError, parse_json, parse_object
from deepseek_recipe.json_writer import quote, spaced_json
from deepseek_recipe.repair_tape import DSML, Tape

_LOOK_AHEAD: Final = 48
_CLOSER: Final = re.compile(rf"</{DSML} ?([A-Za-z_]*)>")
_CLOSER_BEGINNING: Final = re.compile(rf"</{DSML} ?[A-Za-z_]*\Z")
_INVOKE: Final = re.compile(r'invoke name="')
_LOOSE_INVOKE: Final = re.compile(r"invoke\s{1,4}name\s{0,4}=\s{0,4}([\"'])")
_NEXT_INVOKE: Final = re.compile(rf"<{DSML} ?(?=invoke\s)")
_NEXT_PARAMETER: Final = re.compile(rf"<{DSML} ?(?=parameter\s)")
_NEXT_WORDS: Final = tuple(f"<{DSML}{blank}{word} " for blank in ("", " ") for word in ("invoke", "parameter"))
_PARAMETER: Final = re.compile(r"parameter name=")
_LOOSE_PARAMETER: Final = re.compile(rf"(?:(?<=<{DSML})|(?<=<{DSML} ))parameter(?=\s)|parameter(?= name=)")
_CANONICAL: Final = re.compile(r' name="([^"]*)" string="(true|false)"')
_ATTRIBUTE: Final = re.compile(r"([^\s=\"'>]+)\s*=\s*(?:\"([^\"]*)\"?|'([^']*)'?|([^\s\"'>]+))")
_TAG_MARK: Final = re.compile(rf"[>\"']|</?{DSML}")
_MARK_BEGINNING: Final = re.compile(r"</?\Z")
_VALUE_MARK: Final = re.compile(r"\n?<")
_HEAD: Final = re.compile(r"[^>\udc00<]*>\s*")
_HEAD_BEGINNING: Final = re.compile(r"[^>\udc00<]*\Z")
_TYPE: Final = re.compile(r'(true|false)">')
_BLOCK_WORDS: Final = ("calls", "tool_calls")


class CallParser:
    """Reads from inside a block to its end; `done` is then set."""

    def __init__(self, tape: Tape, rules: frozenset[str]) -> None:
        self._tape = tape
        self._rules = rules
        self._read: Callable[[], bool] = self._between
        self._buffer = StringIO()
        self._quote = '"'
        self._keys: set[str] = set()
        self._first = True
        self._value_kind = ""
        self._tag_quote = ""
        self._name = ""
        self._key_of_value = ""
        self.has_calls = False
        """Whether the block has had a call."""
        self.done = False
        """Whether the block has ended."""

    def run(self) -> None:
        """Read as far as possible."""
        while not self.done and self._read():
            pass

    def enter(self) -> None:
        """Begin with a new block."""
        self.done = False
        self.has_calls = False
        self._read = self._between

    def _on(self, rule: str) -> bool:
        return rule in self._rules

    def _skip(self) -> bool:
        """Drop all but what may be the beginning of something."""
        tape = self._tape
        tape.at = len(tape.text) if tape.final else max(tape.at, len(tape.text) - _LOOK_AHEAD)
        return False

    def _between(self) -> bool:
        """Between the calls of a block."""
        tape = self._tape
        invoke = (_LOOSE_INVOKE if self._on("R7") else _INVOKE).search(tape.text, tape.at)
        closer = _CLOSER.search(tape.text, tape.at)
        while closer and closer[1] not in _BLOCK_WORDS:
            closer = _CLOSER.search(tape.text, closer.end())
        if closer and (invoke is None or closer.start() < invoke.start()):
            tape.at = closer.end()
            self.done = True
            return True
        if invoke is None:
            return self._skip()
        tape.at = invoke.end()
        self._quote = invoke[0][-1]
        self._buffer = StringIO()
        self._read = self._call_name
        return True

    def _until(self, stop: str) -> str | None:
        """Read into the buffer up to a character; the whole when it is there."""
        tape = self._tape
        found = tape.text.find(stop, tape.at)
        self._buffer.write(tape.text[tape.at : len(tape.text) if found < 0 else found])
        if found < 0:
            tape.at = len(tape.text)
            return None
        tape.at = found + 1
        whole, self._buffer = self._buffer.getvalue(), StringIO()
        return whole

    def _call_name(self) -> bool:
        name = self._until(self._quote)
        if name is None:
            return False
        self._name = name
        self.has_calls = True
        self._keys = set()
        self._first = True
        self._tape.write(Action.NAME, name)
        self._tape.write(Action.START_CALL, "")
        self._read = self._head if self._on("R6") else self._arguments
        return True

    def _head(self) -> bool:
        """After the name: a body that is JSON, or parameters."""
        tape = self._tape
        head = _HEAD.match(tape.text, tape.at)
        if head is None:
            if tape.final or _HEAD_BEGINNING.match(tape.text, tape.at) is None:
                self._read = self._arguments
                return True
            return False
        if head.end() == len(tape.text) and not tape.final:
            return False
        ahead = tape.text[head.end() : head.end() + 3]
        if ahead in ("`", "``") and tape.may_become(head.end(), "```"):
            return False
        tape.at = head.end()
        self._read = self._json_body if ahead[:1] == "{" or ahead == "```" else self._arguments
        return True

    def _json_body(self) -> bool:
        tape = self._tape
        ends = [m.start() for p in (_NEXT_INVOKE, _CLOSER) if (m := p.search(tape.text, tape.at))]
        end = min(ends, default=len(tape.text))
        if not ends and not tape.final:
            end = max(tape.at, end - _LOOK_AHEAD)
        self._buffer.write(tape.text[tape.at : end])
        tape.at = end
        if not ends and not tape.final:
            return False
        body, self._buffer = self._buffer.getvalue(), StringIO()
        if tape.cut and not ends:
            tape.write(Action.RAW, body)
            self.done = True
            return False
        self._finish_body(body.strip())
        return True

    def _finish_body(self, body: str) -> None:
        if body.startswith("```"):
            body = body.partition("\n")[2].removesuffix("```").strip()
        members = parse_object(body) if "\udc00" not in body else None
        if members is None:
            self._tape.warn("unreadable_body", self._name)
            self._tape.write(Action.FIXED, "{}")
        else:
            self._tape.warn("json_body", self._name)
            self._tape.write(Action.FIXED, spaced_json(members, python_floats=False))
        self._after_call()

    def _after_call(self) -> None:
        """Leave a call whose arguments are complete: read its closer, if that is what comes."""
        tape = self._tape
        closer = _CLOSER.match(tape.text, tape.at)
        if closer and closer[1] not in _BLOCK_WORDS:
            tape.at = closer.end()
        elif not closer:
            tape.warn("missing_invoke_closer", self._name)
        self._read = self._between

    def _end_call(self) -> None:
        self._tape.write(Action.FIXED, "{}" if self._first else "}")
        self._read = self._between

    def _arguments(self) -> bool:
        """Between the parameters of a call."""
        tape = self._tape
        parameter = (_LOOSE_PARAMETER if self._on("R7") else _PARAMETER).search(tape.text, tape.at)
        closer = tape.text.find(f"</{DSML}", tape.at)
        invoke = _NEXT_INVOKE.search(tape.text, tape.at) if self._on("R1") else None
        starts = [m.start() for m in (parameter, invoke) if m] + ([closer] if closer >= 0 else [])
        if not starts:
            self._skip()
            return self._end_of_output()
        first = min(starts)
        if parameter and first == parameter.start():
            tape.at = parameter.end()
            self._begin_parameter()
            return True
        if first == closer:
            tape.at = first
            return self._close_call()
        tape.at = first
        tape.warn("missing_invoke_closer", self._name)
        self._end_call()
        return True

    def _end_of_output(self) -> bool:
        """At the end, a call that was not cut is closed."""
        tape = self._tape
        if tape.final and not tape.cut and self._on("R1"):
            tape.warn("missing_invoke_closer", self._name)
            self._end_call()
            return True
        return False

    def _close_call(self) -> bool:
        """A closing tag stands here."""
        tape = self._tape
        if not self._on("R1"):
            tape.at += 3
            self._end_call()
            return True
        closer = _CLOSER.match(tape.text, tape.at)
        if closer is None:
            if not tape.final and _CLOSER_BEGINNING.match(tape.text, tape.at):
                return False
            tape.at += 3
            self._end_call()
        elif closer[1] == "parameter" and self._on("R3"):
            tape.at = closer.end()
            tape.warn("stray_closer", closer[1])
        else:
            if closer[1] in _BLOCK_WORDS:
                tape.warn("missing_invoke_closer", self._name)
            else:
                tape.at = closer.end()
            self._end_call()
        return True

    def _begin_parameter(self) -> None:
        self._buffer = StringIO()
        self._tag_quote = ""
        if self._on("R7"):
            self._read = self._tag
        else:
            self._read = self._key

    def _tag(self) -> bool:
        """The attributes of a parameter, up to the end of its tag."""
        tape = self._tape
        index = tape.at
        while True:
            found = _TAG_MARK.search(tape.text, index)
            if found is None:
                held = None if tape.final else _MARK_BEGINNING.search(tape.text, tape.at)
                end = held.start() if held else len(tape.text)
                self._buffer.write(tape.text[tape.at : end])
                tape.at = end
                return self._broken_tag() if tape.final and not tape.cut else False
            index = found.end()
            mark = found[0]
            if mark[0] == "<" or (mark == ">" and not self._tag_quote):
                self._buffer.write(tape.text[tape.at : found.start()])
                tape.at = found.start() if mark[0] == "<" else index
                if mark[0] == "<":
                    return self._broken_tag()
                self._use_tag(self._buffer.getvalue())
                return True
            if mark == self._tag_quote:
                self._tag_quote = ""
            elif not self._tag_quote and mark != ">":
                self._tag_quote = mark

    def _broken_tag(self) -> bool:
        """A tag that never ends properly ends at its first `>`; what follows is the value."""
        tag, _, value = self._buffer.getvalue().partition(">")
        tape = self._tape
        tape.text = value + tape.text[tape.at :]
        tape.at = 0
        self._use_tag(tag)
        return True

    def _use_tag(self, tag: str) -> None:
        self._buffer = StringIO()
        canonical = _CANONICAL.fullmatch(tag)
        if canonical:
            self._start_value(canonical[1], canonical[2])
            return
        found = {m[1].lower(): m[2] or m[3] or m[4] or "" for m in _ATTRIBUTE.finditer(tag)}
        name = found.get("name")
        self._tape.warn("attribute", tag.strip())
        kind = found.get("string", "").lower()
        if name is None:
            self._value_kind = "skip"
            self._read = self._value
        else:
            self._start_value(name, kind if kind in ("true", "false") else "auto")

    def _start_value(self, key: str, kind: str) -> None:
        self._value_kind = kind
        self._read = self._value
        if self._on("R8") and key in self._keys:
            self._tape.warn("duplicate_parameter", key)
            self._value_kind = "skip"
            return
        self._keys.add(key)
        self._open_member(quote(self._tape.lexer.spell(key)) + ": ")
        if kind == "true":
            self._tape.write(Action.FIXED, '"')

    def _open_member(self, key: str) -> None:
        self._tape.write(Action.FIXED, ("{" if self._first else ", ") + key)
        self._first = False

    def _key(self) -> bool:
        """The key of a parameter where attributes are read as the API reads them."""
        tape = self._tape
        if not self._on("R9"):
            key = self._until(" ")
            if key is None:
                return False
            self._open_member(f"{key}: ")
            self._read = self._type
            return True
        if not self._tag_quote:
            if not tape.rest:
                return False
            self._tag_quote = tape.text[tape.at]
            tape.at += 1
        key = self._until(self._tag_quote)
        if key is None:
            return False
        self._key_of_value = key
        self._read = self._type
        return True

    def _type(self) -> bool:
        """The value of the `string` attribute, wherever it stands."""
        tape = self._tape
        found = _TYPE.search(tape.text, tape.at)
        if found is None:
            return self._skip()
        tape.at = found.end()
        if self._on("R9"):
            self._start_value(self._key_of_value, found[1])
            return True
        self._value_kind = found[1]
        self._read = self._value
        if found[1] == "true":
            tape.write(Action.FIXED, '"')
        return True

    def _value(self) -> bool:
        """The value of a parameter."""
        tape = self._tape
        while True:
            found = _VALUE_MARK.search(tape.text, tape.at)
            if found is None:
                end = len(tape.text) - (not tape.final and tape.text.endswith("\n", tape.at))
                self._take(tape.text[tape.at : end])
                tape.at = end
                return self._end_of_value() if tape.final else False
            self._take(tape.text[tape.at : found.start()])
            tape.at = found.start()
            if not self._decided(found.end() - 1):
                return False
            if self._ends_value(found.end() - 1):
                return True
            self._take(found[0])
            tape.at = found.end()

    def _decided(self, at: int) -> bool:
        """Whether it is clear if the value ends with the `<` at a place."""
        tape = self._tape
        if tape.final:
            return True
        if not self._on("R1"):
            return not tape.may_become(at, f"</{DSML}")
        return not (tape.may_become(at, *_NEXT_WORDS, f"</{DSML}") or _CLOSER_BEGINNING.match(tape.text, at))

    def _ends_value(self, at: int) -> bool:
        """End the value if a closing tag, or what may stand after one, is at a place; say whether it did."""
        tape = self._tape
        text = tape.text
        explicit = text.startswith(f"</{DSML}", at)
        closer = _CLOSER.match(text, at)
        word = closer[1] if closer else ""
        if not self._on("R1"):
            if explicit:
                self._take(text[tape.at : at])
                tape.at = at + 3
                self._close_value()
                self._read = self._arguments
            return explicit
        follows = bool(_NEXT_PARAMETER.match(text, at)) or bool(_NEXT_INVOKE.match(text, at))
        if explicit and word != "invoke" and word not in _BLOCK_WORDS:
            self._take(text[tape.at : at])
            tape.at = closer.end() if closer else at + 3
            self._close_value()
            self._read = self._arguments
            return True
        if not (explicit or follows):
            return False
        tape.at = at
        tape.warn("missing_parameter_closer", self._name)
        self._close_value()
        self._read = self._arguments
        return True

    def _take(self, text: str) -> None:
        if self._value_kind == "true":
            if text:
                self._tape.write(Action.ESCAPED, text)
        elif self._value_kind == "false" and not self._on("R5"):
            self._tape.write(Action.RAW, text)
        elif self._value_kind != "skip":
            self._buffer.write(text)

    def _close_value(self) -> None:
        kind, text = self._value_kind, self._tape.lexer.spell(self._buffer.getvalue())
        self._buffer = StringIO()
        if kind == "true":
            self._tape.write(Action.FIXED, '"')
        elif kind == "auto":
            self._tape.write(Action.RAW, text if _is_json(text) and text.strip()[:1] != '"' else quote(text))
        elif kind == "false" and self._on("R5"):
            if not _is_json(text):
                self._tape.warn("value_not_json", text[:80])
                text = quote(text)
            self._tape.write(Action.RAW, text)

    def _end_of_value(self) -> bool:
        """At the end of output: close the value, or leave it as it is if it was cut."""
        tape = self._tape
        if not tape.cut and self._on("R1"):
            tape.warn("missing_parameter_closer", self._name)
            self._close_value()
            self._read = self._arguments
            return True
        if self._buffer.tell():
            tape.write(Action.RAW, self._buffer.getvalue())
            self._buffer = StringIO()
        return False


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except (JsonSyntaxError, UnicodeEncodeError):
        return False
    return True
