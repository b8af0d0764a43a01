"""Owns parsing model output with repairs: text around blocks of calls, stop sequences, JSON mode.

Inside of blocks it is `repair_calls`; without repairs output is parsed by `output_parser`. The result does not depend
on how the output is cut into chunks.
"""

import re
from collections.abc import Callable
from io import StringIO
from typing import Final

from deepseek_recipe.grammar import Action
from deepseek_recipe.output_parser import Part
from deepseek_recipe.parsing_options import ParsingOptions, ThinkingInitialStage
from deepseek_recipe.pieces import Piece
from deepseek_recipe.repair_calls import CallParser
from deepseek_recipe.repair_tape import DSML, THINKING_END, Lexer, StopFilter, Tape

_OPENER: Final = re.compile(rf'<{DSML} ?(?:(?:tool_)?calls>|(?=invoke name="))')
_OPENERS: Final = tuple(
    f"<{DSML}{blank}{word}" for blank in ("", " ") for word in ("calls>", "tool_calls>", 'invoke name="')
)
_STRAY: Final = re.compile(rf"</{DSML} ?(parameter|invoke|(?:tool_)?calls)>")
_STRAYS: Final = tuple(
    f"</{DSML}{blank}{word}>" for blank in ("", " ") for word in ("parameter", "invoke", "calls", "tool_calls")
)
_PLAIN: Final = re.compile(rf"[^\n<{THINKING_END}]+")
_PLAIN_BEFORE_JSON: Final = re.compile(rf"[^\n<{THINKING_END}{{\[]+")
_JSON_MARKS: Final = re.compile(r'["{}\[\]]')
_STRING_END: Final = re.compile(r'\\.|"', re.DOTALL)


class RepairParser:
    """Parses with the repairs that the options name; what was repaired is in `warnings`."""

    def __init__(self, options: ParsingOptions) -> None:
        self._rules = options.repair
        self._tools = options.parse_tool_calls
        self._json = options.parse_json_output
        self._tape = Tape(Lexer(options.special_tokens))
        self._calls = CallParser(self._tape, self._rules)
        self._stops = StopFilter([stop for stop in options.stop_sequences if stop])
        self._newline_stops = [stop for stop in options.stop_sequences if stop and not stop.strip("\n")]
        stage = options.thinking_initial_stage
        self._reasoning = stage is not None and stage.starts_in_reasoning()
        self._lead = stage in (None, ThinkingInitialStage.ReasoningStart)
        self._newlines = 0
        self._after_bracket = False
        self._before_json = StringIO()
        self._json_found = False
        self._depth = 0
        self._in_string = False
        self._made_calls = False
        self._warned_after = False
        self._read: Callable[[], bool] = self._block if options.starts_in_tool_calls else self._text
        self.stop_sequence: str | None = None
        """The stop sequence that ended the output."""

    @property
    def warnings(self) -> list[str]:
        """What was repaired so far, as `name: detail`."""
        return list(self._tape.warnings)

    def feed(self, piece: Piece) -> None:
        """Take a piece; after a stop sequence, `stop_sequence` is set and no more may be fed."""
        if piece.logprobs:
            self._tape.logprobs += piece.logprobs
        self._tape.load(self._tape.lexer.feed(piece))
        self._run()

    def end_push(self) -> list[Part]:
        """All parts that are clear by now."""
        parts, self._tape.parts = self._tape.parts, []
        return parts

    def finish(self, cut: bool = False) -> list[Part]:
        """All that is left; what is open is closed, unless the output was cut off."""
        tape = self._tape
        if self.stop_sequence is None:
            tape.final, tape.cut = True, cut
            tape.load(tape.lexer.finish())
            self._run()
            if self._read == self._text:
                self._flush_newlines()
            self._show(self._stops.flush(), through_stops=False)
            if self.stop_sequence is None and self._json and not self._json_found:
                self._show_without_json()
        return self.end_push()

    def _run(self) -> None:
        while self.stop_sequence is None and self._read():
            pass

    def _on(self, rule: str) -> bool:
        return rule in self._rules

    def _show(self, text: str, *, through_stops: bool = True) -> None:
        """Write text of the state: reasoning, content, or in JSON mode what comes before the JSON."""
        if not text:
            return
        self._lead = False
        self._after_bracket = text.endswith("<")
        if self._reasoning:
            self._tape.show(Action.REASONING, text)
            return
        if self._json and not self._json_found:
            if self._on("R11"):
                self._before_json.write(self._tape.lexer.spell(text))
            else:
                self._tape.show(Action.SPACE, text)
            return
        if through_stops:
            text, stop = self._stops.feed(text)
            self._tape.show(Action.CONTENT, text)
            self.stop_sequence = stop
        else:
            self._tape.show(Action.CONTENT, text)

    def _text(self) -> bool:
        """Reasoning or content up to the next thing that may be markup."""
        tape = self._tape
        if not tape.rest:
            return False
        character = tape.text[tape.at]
        if character == "\n":
            tape.at += 1
            self._newline()
            return True
        if character == THINKING_END:
            tape.at += 1
            self._end_thinking()
            return True
        if character == "<":
            return self._angle()
        if self._json and not self._reasoning and character in "{[":
            self._begin_json()
            return True
        self._flush_newlines()
        plain = (_PLAIN_BEFORE_JSON if self._json and not self._reasoning else _PLAIN).match(tape.text, tape.at)
        assert plain is not None
        tape.at = plain.end()
        if self.stop_sequence is None:
            self._show(plain[0])
        return True

    def _newline(self) -> None:
        """Hold a newline until it is clear what follows it; drop it at the start of the text."""
        stoppable = not self._reasoning and not (self._json and not self._json_found)
        if self._lead and not (stoppable and "\n" in self._newline_stops):
            return
        if self._after_bracket and not self._newlines and not self._on("R14") and self._tools:
            self._show("\n")
            return
        self._newlines += 1
        if not stoppable:
            return
        waits = self._on("R10") and self._tools
        fired = not waits and any(self._newlines >= len(stop) for stop in self._newline_stops)
        if fired or self._stops.would_stop("\n" * min(self._newlines, 4096)):
            self._flush_newlines()

    def _flush_newlines(self) -> None:
        newlines, self._newlines = self._newlines, 0
        if newlines:
            self._show("\n" * newlines)

    def _end_thinking(self) -> None:
        if self._reasoning:
            self._newlines = 0
            self._reasoning = False
            self._lead = True
        else:
            self._flush_newlines()
            self._lead = False

    def _angle(self) -> bool:
        """A `<`: the opener of a block, a stray closing tag, or text."""
        tape = self._tape
        strict = self._on("R4")
        if self._tools:
            if tape.may_become(tape.at, *(_OPENERS if strict else (f"<{DSML}",))):
                return False
            opener = _OPENER.match(tape.text, tape.at)
            if opener or (not strict and tape.text.startswith(f"<{DSML}", tape.at)):
                self._open_block(opener.end() if opener else tape.at + 2)
                return True
            if self._on("R3"):
                if tape.may_become(tape.at, *_STRAYS):
                    return False
                stray = _STRAY.match(tape.text, tape.at)
                if stray:
                    self._flush_newlines()
                    tape.at = stray.end()
                    tape.warn("stray_closer", stray[1])
                    return True
        self._flush_newlines()
        if self.stop_sequence is None:
            end = tape.at + (2 if tape.text.startswith(f"<{DSML}", tape.at) else 1)
            text = tape.text[tape.at : end]
            tape.at = end
            self._show(text)
        return True

    def _open_block(self, end: int) -> None:
        tape = self._tape
        if tape.text[end - 1] != ">" and self._on("R4"):
            tape.warn("missing_block_opener", "invoke")
        tape.at = end
        self._newlines = 0
        self._show(self._stops.flush(), through_stops=False)
        tape.logprobs = []
        self._calls.enter()
        self._read = self._block

    def _block(self) -> bool:
        """Inside a block of calls."""
        calls = self._calls
        calls.run()
        self._made_calls = self._made_calls or calls.has_calls
        if not calls.done:
            return False
        calls.done = False
        if not self._on("R2"):
            self._read = self._end
        elif self._made_calls:
            self._read = self._after
        else:
            self._tape.warn("empty_block", "calls")
            self._read = self._text
        return True

    def _end(self) -> bool:
        """After all that counts."""
        self._tape.at = len(self._tape.text)
        return False

    def _after(self) -> bool:
        """After a block with calls or after the JSON: only further blocks count."""
        tape = self._tape
        found = tape.text.find("<", tape.at)
        self._note_lost(tape.text[tape.at : len(tape.text) if found < 0 else found])
        tape.at = len(tape.text) if found < 0 else found
        if found < 0:
            return False
        if self._tools:
            if tape.may_become(found, *_OPENERS):
                return False
            opener = _OPENER.match(tape.text, found)
            if opener:
                self._open_block(opener.end())
                return True
        self._note_lost("<")
        tape.at += 1
        return True

    def _note_lost(self, text: str) -> None:
        if self._made_calls and not self._warned_after and text.strip().strip(THINKING_END):
            self._warned_after = True
            self._tape.warn("text_after_calls", text.strip()[:80].replace(DSML, "").replace(THINKING_END, ""))

    def _begin_json(self) -> None:
        self._newlines = 0
        self._json_found = True
        self._read = self._json_value

    def _json_value(self) -> bool:
        """The first JSON value of JSON mode, up to its last bracket."""
        tape = self._tape
        start = tape.at
        while tape.at < len(tape.text) and (self._depth or tape.at == start):
            if not self._step_json():
                break
            if not self._depth and not self._in_string:
                break
        self._show(tape.text[start : tape.at])
        if self._depth or self._in_string or self.stop_sequence is not None:
            return False
        self._show(self._stops.flush(), through_stops=False)
        self._read = self._after if self._on("R11") else self._rest_of_json
        return True

    def _step_json(self) -> bool:
        """Read on to the next quote or bracket; say whether there was one."""
        tape = self._tape
        found = (_STRING_END if self._in_string else _JSON_MARKS).search(tape.text, tape.at)
        if found is None:
            tape.at = len(tape.text)
            if self._in_string and tape.text.endswith("\\") and not tape.final:
                tape.at -= 1
            return False
        tape.at = found.end()
        if found[0] == '"':
            self._in_string = not self._in_string
        elif found[0] in "{[":
            self._depth += 1
        elif found[0] in "}]":
            self._depth -= 1
        return True

    def _rest_of_json(self) -> bool:
        """What follows the JSON, where it is shown."""
        tape = self._tape
        text, tape.at = tape.text[tape.at :], len(tape.text)
        self._show(text)
        return False

    def _show_without_json(self) -> None:
        """JSON mode without any JSON: the text as it was."""
        text = self._before_json.getvalue()
        if text and self._on("R11"):
            self._tape.show(Action.CONTENT, text)
            if not self._made_calls:
                self._tape.warn("json_not_found", text[:80])
