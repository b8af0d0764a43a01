"""Checks of whole rounds against golden vectors: exact laws of one block, and traces of several with given noise."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspark.audit.cells import outcomes
from deepspark.schedule import algorithm_one, survival
from deepspark.testing.verify_vectors import expect, expect_close, floats, ints
from deepspark.verify import Noise, Rule, draw, verify

__all__ = ["round_law", "world_trace"]

Tokens = tuple[int, ...]


def round_law(row: dict[str, Any], folder: Path) -> None:
    """round_law.jsonl: the law of what one round emits, by exact enumeration of drafts and noise."""
    width, vocab_size = row["gamma"], row["V"]
    P = {_tokens(key): np.asarray(law) for key, law in row["P"].items()}
    Q = {_tokens(key): np.asarray(law) for key, law in row["Q"].items()}
    for name, want in row.items():
        parts = name.split("_")
        if parts[0] not in ("chain", "block") or len(parts) < 2:
            continue
        rule: Rule = "coupled" if parts[-1] == "coupled" else "chain" if parts[0] == "chain" else "block"
        law: dict[Tokens, float] = {}
        for x in np.ndindex(*(vocab_size,) * width):
            _add_block(law, P, Q, x, int(parts[1]), rule)
        _expect_law(name, law, want)


def _add_block(law: dict[Tokens, float], P: Any, Q: Any, x: Tokens, ell: int, rule: Rule) -> None:
    """Add the outcomes of drafts `x`, weighted by the chance of drawing them, to `law`."""
    target = np.stack([P[x[:i]] for i in range(len(x) + 1)])
    draft = np.stack([Q[x[:i]] for i in range(len(x))])
    drawn = float(np.prod([draft[i, token] for i, token in enumerate(x)]))
    if drawn == 0:
        return
    for box, results in outcomes(target, draft, x, ell, rule):
        volume = drawn * float(np.prod([high - low for low, high in box]))
        for (accepted, token), mass in results.items():
            emitted = (*x[:accepted], token)
            law[emitted] = law.get(emitted, 0.0) + volume * mass


def _tokens(key: str) -> Tokens:
    return tuple(int(part) for part in key.split(",") if part)


def _expect_law(name: str, law: dict[Tokens, float], want: dict[str, Any]) -> None:
    wanted = {_tokens(key): mass for key, mass in want["law"].items()}
    keys = sorted(law.keys() | wanted.keys())
    expect_close(f"{name} law", [law.get(key, 0.0) for key in keys], [wanted.get(key, 0.0) for key in keys])
    mean = sum(len(key) * mass for key, mass in law.items())
    expect_close(f"{name} emitted", mean, want["emitted"])


def world_trace(row: dict[str, Any], folder: Path) -> None:
    """world_trace.jsonl: rounds of drafting, Algorithm 1 and the chain rule with all noise given."""
    P, Q, C = (np.asarray(row[name]) for name in ("P", "Q", "C"))
    width, vocab_size = row["gamma"], row["V"]
    context, emitted = list(row["context"]), []
    for number, want in enumerate(row["rounds"]):

        def at(tokens: list[int]) -> int:
            return int(tokens[-2] * vocab_size + tokens[-1])

        x: list[int] = []
        conf: list[float] = []
        laws = []
        for k in range(width):
            previous = x[-1] if x else context[-1]
            laws.append(Q[k, at(context), previous])
            conf.append(float(C[k, at(context), previous]))
            x.append(int(draw(floats([laws[-1].tolist()]), floats([want["u_draft"][k]]))[0]))
        expect(f"round {number} x", x, want["x"])
        expect_close(f"round {number} conf", conf, want["conf"])
        ell = int(algorithm_one(survival(np.array([conf])), np.asarray(row["cost_ms"])).lengths[0])
        expect(f"round {number} ell", ell, want["ell"])
        target = np.stack([P[at(context + x[:i])] for i in range(width + 1)])
        noise = Noise(accept=floats([want["u_accept"]]), extra=floats([want["u_extra"]]))
        drafts = ints([x])
        verdict = verify(
            torch.from_numpy(target)[None], torch.from_numpy(np.stack(laws))[None], drafts, ints([ell]), noise, "chain"
        )
        expect(f"round {number} accepted", int(verdict.accepted[0]), want["accepted"])
        expect(f"round {number} emitted", verdict.emitted(drafts)[0], want["emitted"])
        context += want["emitted"]
        emitted += want["emitted"]
    expect("tokens", emitted, row["tokens"])
