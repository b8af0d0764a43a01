"""What the demo model can do, measured in the engine on a CPU: answers, calls of tools, accepted drafts, calibration.

Questions are drawn anew with a seed that training never had.  Sums and differences are of number pairs that training
left out; of all other kinds a question that training had is so rare (tables of random names and numbers) that none is
looked for.
"""

import json
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, override

import numpy as np
import torch
from tokenizers import Tokenizer

from corpus import held_out
from deepinfer import LLM, SamplingParams
from deepinfer.engine.request import Completion
from deepinfer.model.engram_hash import compress_token_ids
from deepinfer.model.read_config import parse_config
from deepseek_recipe import AssistantMessage
from deepspark.calibration import RoundLog, calibrate
from dialogues import END, TOOLS, Dialogue, Turn, draw_dialogue, make_turn
from drafting import Blocks, draft_logits, draft_rows
from export import read_checkpoint
from network import Network, document_starts
from settings import BOS, demo_config

SEED = 20_261_201
LONGEST = 120
JUDGED = ("arithmetic", "ages", "stock", "homes", "colour")
"""Kinds of dialogue that ask for sums or look something up in the question."""


@dataclass(frozen=True)
class Share:
    """How many of so many were right."""

    right: int
    asked: int

    @override
    def __str__(self) -> str:
        """As a percentage with its 95 % interval (Wilson)."""
        share, z = self.right / self.asked, 1.96
        middle = (share + z * z / (2 * self.asked)) / (1 + z * z / self.asked)
        half = z / (1 + z * z / self.asked) * math.sqrt(share * (1 - share) / self.asked + (z / (2 * self.asked)) ** 2)
        return f"{self.right} of {self.asked} ({share:.0%}; {middle - half:.0%} to {middle + half:.0%})"


def draw_questions(count: int, kinds: Sequence[str | None], seed: int = SEED) -> list[Dialogue]:
    """Draw dialogues of these kinds in turn; arithmetic only of numbers that training left out."""
    draw = random.Random(seed)
    found: list[Dialogue] = []
    while len(found) < count:
        made = draw_dialogue(draw, kinds[len(found) % len(kinds)])
        if made.kind != "arithmetic" or held_out(made.keys[-1]):
            found.append(made)
    return found


def answers(llm: LLM, questions: Sequence[Dialogue]) -> dict[str, Share]:
    """Answer at temperature 0; an answer is right when it is the expected one, letter by letter."""
    completions = llm.generate([each.prompt for each in questions], SamplingParams(max_tokens=LONGEST, temperature=0))
    counts: dict[str, list[bool]] = defaultdict(list)
    for question, completion in zip(questions, completions, strict=True):
        right = completion.text == question.answer.removesuffix(END)
        counts[_name(question)].append(right)
        counts["all"].append(right)
    return {name: Share(sum(marks), len(marks)) for name, marks in sorted(counts.items())}


def _name(question: Dialogue) -> str:
    if question.kind == "arithmetic":
        return f"arithmetic {question.answer.rsplit('=', 1)[0].split()[-2]}"
    if question.kind == "look-up":
        last = question.prompt.rsplit("<｜User｜>", 1)[1]
        return "look-up by value" if "Who " in last else "look-up by name"
    return question.kind


def calls(llm: LLM, count: int, *, constrain: bool, seed: int = SEED) -> tuple[Share, Share]:
    """Ask for calls of tools through `LLM.chat`: how many answers parse as calls, and how many are the right call.

    An answer parses when it is one call whose arguments are JSON; with `constrain` the engine holds the answer to that.
    """
    draw = random.Random(seed)
    parsed = right = 0
    for _ in range(count):
        turn = make_turn("tool", draw)
        assert turn.call is not None
        offered = [TOOLS[name] for name in sorted({turn.call[0], draw.choice(list(TOOLS))})]
        message = _ask(llm, turn, offered, thinking=draw.random() < 1 / 3, constrain=constrain)
        made = _parsed(message)
        parsed += made is not None
        right += made == turn.call
    return Share(parsed, count), Share(right, count)


def _parsed(message: AssistantMessage) -> tuple[str, dict[str, Any]] | None:
    """The one call of a message; None where there is none, or its arguments are no JSON."""
    calls = message.tool_calls or []
    if len(calls) != 1:
        return None
    try:
        return calls[0].name, json.loads(calls[0].arguments)
    except ValueError:
        return None


def _ask(llm: LLM, turn: Turn, offered: list[dict[str, Any]], *, thinking: bool, constrain: bool) -> AssistantMessage:
    messages = [{"role": "user", "content": turn.question}]
    params = SamplingParams(max_tokens=LONGEST, temperature=0)
    return cast(AssistantMessage, llm.chat(messages, offered, params, thinking=thinking, constrain=constrain))


def accepted(
    llm: LLM, prompts: Sequence[str], temperature: float, tokens: int = LONGEST
) -> tuple[float, float, list[Completion]]:
    """Tokens a step with whole blocks of drafts, bonus counted, and its standard error over requests."""
    params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=number) for number in range(len(prompts))]
    completions = llm.generate(list(prompts), params)
    reports = [each.drafts for each in completions if each.drafts is not None and each.drafts.steps > 0]
    made = np.array([report.steps + report.accepted for report in reports], dtype=float)
    steps = np.array([report.steps for report in reports], dtype=float)
    mean = float(made.sum() / steps.sum())
    error = float(np.sqrt(((made - mean * steps) ** 2).sum()) / steps.sum())
    return mean, error, completions


def calibration(folder: Path, completions: Iterable[Completion], rows: int, anchors: int) -> dict[str, list[float]]:
    """Expected calibration error of the survivals by place, as `deepspark calibrate` fits and reports it.

    The texts are what the engine sampled at temperature 1.  At `anchors` places of each row the draft stages run in the
    training network over the checkpoint's values, and each draft's acceptance is drawn with its exact chance 1 - TV.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = parse_config(demo_config(tokenizer, quantised=False))
    network = Network(config, torch.from_numpy(compress_token_ids(tokenizer, config.vocab_size)), torch.float32, 0)
    read_checkpoint(network, folder)
    network.rounded = True
    width = network.draft.block_size
    log = RoundLog(width)
    generator = torch.Generator().manual_seed(SEED)
    chosen = [each for each in completions if len(each.token_ids) > width + 1][:rows]
    for completion in chosen:
        tokens = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        first, last = len(completion.prompt_token_ids), tokens.shape[1] - width
        places = torch.arange(first, last)[torch.randperm(last - first, generator=generator)[:anchors]].unsqueeze(0)
        logits, agreement = _judge(network, tokens, places)
        drawn = (torch.rand(agreement.shape, generator=generator) < agreement).int().cumprod(1).sum(1)
        log.add(logits.double().numpy(), np.full(len(drawn), width), drawn.numpy())
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rounds.npz"
        log.save(path, model_hash="demo", temperature=1.0)
        fitted = calibrate(path)
    return {
        "rounds": [float(len(log))],
        "temperatures": list(fitted.temperatures),
        "before": list(fitted.ece_before),
        "after": list(fitted.ece_after),
        "noise floor": list(fitted.floor),
    }


@torch.no_grad()
def _judge(network: Network, tokens: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidence logits and 1 - TV [A, W] of the drafts behind `places` [1, A]."""
    starts = document_starts(tokens, BOS)
    output = network(tokens, starts)
    steps = places.unsqueeze(2) + torch.arange(network.draft.block_size)
    law = torch.softmax(network.head(output.hidden[0, steps[0]]), -1)
    hidden, normed = draft_rows(network, tokens, starts, output.taps, Blocks(places, torch.ones_like(steps)))
    logits, confidence = draft_logits(network, hidden, normed, tokens[0, steps])
    agreement = 1 - (torch.softmax(logits[0], -1) - law).abs().sum(-1) / 2
    return confidence[0], agreement.clamp(0, 1)
