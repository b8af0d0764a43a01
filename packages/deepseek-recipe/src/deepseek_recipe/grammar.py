"""Owns the states of the output parser: which patterns each watches for, what a match does, what other text is.

The walk through the states is in `output_parser`.
"""

from enum import IntEnum
from typing import NamedTuple

from deepseek_recipe.matcher import Pattern, PatternSet, ordinary, special
from deepseek_recipe.parsing_options import ParsingOptions, ThinkingInitialStage
from deepseek_recipe.special_tokens import SpecialToken


class Action(IntEnum):
    """What is done with text. Up to ESCAPED the actions are running ones, which empty pieces repeat."""

    CONTENT = 0
    REASONING = 1
    SPACE = 2
    DROP = 3
    NAME = 4
    RAW = 5
    ESCAPED = 6
    FIXED = 7
    START_CALL = 8
    JSON_OPEN = 9
    STOP = 10


class Rule(NamedTuple):
    """What a match does: an action, its text if it is FIXED, and the next state."""

    pattern: Pattern
    action: Action
    target: str
    text: str = ""


class State(NamedTuple):
    """A state: its rules in order, the action for other text, and its compiled patterns."""

    name: str
    default: Action
    rules: tuple[Rule, ...]
    patterns: PatternSet


_BODY_TEXT, _BODY = "body_lead", "body"


class Grammar:
    """The states for some parsing options."""

    def __init__(self, options: ParsingOptions) -> None:
        tokens = options.special_tokens
        self._dsml = tokens.token(SpecialToken.Dsml)
        self._thinking_end = tokens.token(SpecialToken.ThinkingEnd)
        self._stops = [stop for stop in options.stop_sequences if stop]
        self._tools = options.parse_tool_calls
        self._states: dict[str, State] = {}
        self._add_body(options.parse_json_output)
        self._add_reasoning()
        self._add_calls()
        self.start = self._states[_start(options)]

    def state(self, name: str) -> State:
        """The state of this name."""
        return self._states[name]

    def _add(self, name: str, default: Action, *rules: Rule) -> None:
        patterns = PatternSet(tuple(rule.pattern for rule in rules))
        self._states[name] = State(name, default, rules, patterns)

    def _stop_rules(self) -> list[Rule]:
        return [Rule(Pattern(ordinary(stop)), Action.STOP, "end") for stop in self._stops]

    def _block(self) -> list[Rule]:
        """The opener of a block of calls, with the newlines in front of it."""
        opener = Pattern(ordinary("<") + special(self._dsml), eats_newlines=True)
        return [Rule(opener, Action.DROP, "calls")] if self._tools else []

    def _add_body(self, json_output: bool) -> None:
        newline = Pattern(ordinary("\n"), only_first=True)
        end = Rule(Pattern(special(self._thinking_end)), Action.DROP, _BODY)
        first: list[Rule] = []
        if json_output:
            fences = ("```json\n", "```\n")
            first = [Rule(Pattern(ordinary(fence)), Action.DROP, "json") for fence in fences]
            first += [Rule(Pattern(ordinary(bracket)), Action.JSON_OPEN, "json", bracket) for bracket in "{["]
        else:
            first = self._stop_rules()
        default = Action.SPACE if json_output else Action.CONTENT
        lead = Rule(newline, Action.DROP, _BODY_TEXT)
        self._add(_BODY_TEXT, default, *first, *self._block(), lead, end)
        self._add(_BODY, default, *first, *self._block(), end)
        closing_fence = Rule(Pattern(ordinary("\n```")), Action.DROP, "after")
        self._add("json", Action.CONTENT, *self._stop_rules(), closing_fence)
        self._add("after", Action.SPACE, *self._block())
        self._add("end", Action.DROP)

    def _add_reasoning(self) -> None:
        lead = Rule(Pattern(ordinary("\n"), only_first=True), Action.DROP, "reason_lead")
        end = Rule(Pattern(special(self._thinking_end), eats_newlines=True), Action.DROP, _BODY_TEXT)
        self._add("reason_lead", Action.REASONING, *self._block(), lead, end)
        self._add("reason", Action.REASONING, *self._block(), end)

    def _add_calls(self) -> None:
        def tag(before: str, after: str) -> Pattern:
            return Pattern(ordinary(before) + special(self._dsml) + ordinary(after))

        closer = tag("</", "")
        parameter = Pattern(ordinary("parameter name="))
        self._add(
            "calls",
            Action.DROP,
            Rule(Pattern(ordinary('invoke name="')), Action.DROP, "name"),
            Rule(tag("</", "tool_calls>"), Action.DROP, "end"),
            Rule(tag("</", " calls>"), Action.DROP, "end"),
        )
        self._add("name", Action.NAME, Rule(Pattern(ordinary('"')), Action.START_CALL, "args_first"))
        for name, opening, closing in (("args_first", "{", "{}"), ("args", ", ", "}")):
            self._add(
                name,
                Action.DROP,
                Rule(parameter, Action.FIXED, "key", opening),
                Rule(closer, Action.FIXED, "calls", closing),
            )
        self._add("key", Action.RAW, Rule(Pattern(ordinary(" ")), Action.FIXED, "type", ": "))
        self._add(
            "type",
            Action.DROP,
            Rule(Pattern(ordinary('true">')), Action.FIXED, "string", '"'),
            Rule(Pattern(ordinary('false">')), Action.FIXED, "raw"),
        )
        self._add("string", Action.ESCAPED, Rule(closer, Action.FIXED, "args", '"'))
        self._add("raw", Action.RAW, Rule(closer, Action.FIXED, "args"))


def _start(options: ParsingOptions) -> str:
    """The name of the first state."""
    if options.starts_in_tool_calls:
        return "calls"
    match options.thinking_initial_stage:
        case ThinkingInitialStage.ReasoningStart:
            return "reason_lead"
        case ThinkingInitialStage.ReasoningContinuation:
            return "reason"
        case ThinkingInitialStage.ContentContinuation:
            return _BODY
    return _BODY_TEXT
