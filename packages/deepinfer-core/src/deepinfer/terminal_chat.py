"""`deepinfer chat`: a conversation in a terminal, with what a model thinks, says and calls shown as it comes.

Prompts, answers and calls are `LLM.chat`'s; how drafts are told in a line is `draft_output.py`'s.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, override

from rich.console import Console
from rich.markup import escape

from deepinfer.draft_output import summary
from deepinfer.engine.config import DraftChoice
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import ConfigError, DeepInferError, RequestError
from deepinfer.llm import LLM
from deepinfer.loading_bar import LoadingBar

COMMANDS = {
    "/help": "show this",
    "/draft [off|auto|on]": "let the model's draft stages guess tokens ahead; shows how many were accepted",
    "/think [on|off]": "let the model think before it answers",
    "/stats": "what this session took so far",
    "/reset": "forget the conversation",
    "/quit": "end; so does Ctrl-D",
}

STYLES = {"reasoning": "dim italic", "content": "", "call": "bold cyan", "arguments": "cyan"}
"""How each kind of increment looks."""


@dataclass
class ChatOptions:
    """What a session begins with; `draft` and `thinking` may change on the way."""

    model: str
    accelerator: str
    max_tokens: int | None
    temperature: float
    system: str | None = None
    tools: Sequence[dict[str, Any]] = ()
    thinking: bool = False
    draft: DraftChoice = "off"


@dataclass
class Totals:
    """What the answers of a session took."""

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    found: int = 0

    def add(self, completion: Completion, seconds: float) -> None:
        """Count an answer."""
        made = len(completion.token_ids)
        self.answers += 1
        self.tokens += made
        self.steps += made if completion.drafts is None else completion.drafts.steps
        self.seconds += seconds
        self.prompt_tokens += len(completion.prompt_token_ids)
        self.found += completion.num_cached_tokens

    @override
    def __str__(self) -> str:
        """The whole in two lines."""
        if not self.answers:
            return "no answers yet"
        return (
            f"{self.answers} answers, {self.tokens} tokens in {self.seconds:.2f} s, "
            f"{self.tokens / self.seconds:.1f} a second, {self.tokens / max(self.steps, 1):.2f} a step\n"
            f"{self.prompt_tokens} prompt tokens, {self.found} of them found in the prefix cache"
        )


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read tools in the form of Chat Completions from a JSON file; raises ConfigError."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as tools ({error}): expected a file with a JSON list") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise ConfigError(f'{path}: expected a JSON list of {{"type": "function", "function": {{...}}}}')
    return tools


@dataclass
class Session:
    """One conversation: reads lines until there are no more."""

    options: ChatOptions
    console: Console = field(default_factory=lambda: Console(highlight=False))
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self._llm = self._open()
        self._messages = self._first_messages()

    def run(self) -> None:
        """Talk until the end of input or /quit."""
        self.console.print(f"[dim]{escape(self.options.model)}; /help says what else can be typed[/dim]")
        while (line := self._read("you> ")) is not None:
            line = line.strip()
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(*line.split())
            elif line:
                self._talk({"role": "user", "content": line})

    def _open(self) -> LLM:
        options = self.options
        return LLM(
            options.model,
            accelerator=options.accelerator,
            draft=options.draft,
            draft_rule="block" if options.temperature > 0 else "greedy",
            max_num_seqs=1,
            progress=LoadingBar(),
        )

    def _first_messages(self) -> list[Any]:
        return [] if self.options.system is None else [{"role": "system", "content": self.options.system}]

    def _read(self, prompt: str) -> str | None:
        """A line of input; None when there is no more."""
        try:
            return self.console.input(f"[bold green]{prompt}[/bold green]")
        except EOFError:
            self.console.print()
            return None

    def _command(self, name: str, *words: str) -> None:
        match name, words:
            case "/help", ():
                for command, text in COMMANDS.items():
                    self.console.print(f"  [bold]{escape(command):<22}[/bold]{text}")
            case "/stats", ():
                self.console.print(str(self.totals), style="dim", soft_wrap=True)
            case "/reset", ():
                self._messages = self._first_messages()
                self.console.print("the conversation is forgotten", style="dim")
            case "/think", () | ("on" | "off",):
                if words:
                    self.options.thinking = words[0] == "on"
                self.console.print(f"thinking is {'on' if self.options.thinking else 'off'}", style="dim")
            case "/draft", () | (_,):
                self._draft(*words)
            case _:
                self._complain(f"{' '.join((name, *words))} is no command; /help shows them")

    def _draft(self, choice: str | None = None) -> None:
        """Say or change how drafts are made; a change opens the model anew and keeps the conversation."""
        for known in get_args(DraftChoice):
            if choice == known != self.options.draft:
                before, self.options.draft = self.options.draft, known
                try:
                    self._llm = self._open()
                except DeepInferError as error:
                    self.options.draft = before
                    self._complain(str(error))
        if choice is not None and choice not in get_args(DraftChoice):
            self._complain(f"/draft takes {', '.join(get_args(DraftChoice))}, got {choice}")
        self.console.print(f"drafts are {self.options.draft}", style="dim")

    def _talk(self, message: dict[str, Any]) -> None:
        """Send a message and show the answer; then the results of the tools that it calls, as long as it calls any."""
        kept = len(self._messages)
        self._messages.append(message)
        try:
            while calls := self._answer():
                for call in calls:
                    result = self._read(f"result of {call.name}> ")
                    if result is None:
                        raise RequestError(f"{call.name} got no result, so its call is taken back")
                    self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        except DeepInferError as error:
            del self._messages[kept:]
            self._complain(str(error))
        except KeyboardInterrupt:
            del self._messages[kept:]
            self.console.print("\nstopped: this turn is forgotten", style="dim")

    def _answer(self) -> Sequence[Any]:
        """Stream one answer; return the calls in it."""
        options = self.options
        params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
        began = time.perf_counter()
        stream = self._llm.chat(
            self._messages, options.tools or None, params, stream=True, thinking=options.thinking, constrain=False
        )
        try:
            shown = ""
            for step in stream:
                kind = step.kind.value
                text = f"{step.text} " if kind == "call" else step.text
                if kind != shown and (shown or kind == "call"):
                    self.console.print()
                shown = kind
                self.console.print(text, end="", style=STYLES[kind], markup=False, soft_wrap=True)
        finally:
            stream.close()
        self.console.print()
        completion, answer = stream.completion, stream.message
        self.totals.add(completion, time.perf_counter() - began)
        if completion.finish_reason == "length":
            self._complain(f"cut after {len(completion.token_ids)} tokens: --max-tokens")
        if completion.drafts is not None:
            self.console.print(summary(completion.drafts), style="dim", soft_wrap=True)
        self._messages.append(answer)
        return answer.tool_calls or ()

    def _complain(self, text: str) -> None:
        self.console.print(text, style="red", markup=False)
