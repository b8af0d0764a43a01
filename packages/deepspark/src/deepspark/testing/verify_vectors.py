"""Checks of verification, transforms and emission against rows of golden vectors; owns the translation of their
fields.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspark.emission import cut, token_logprobs
from deepspark.ragged import pack
from deepspark.transform import SamplingSettings, transform
from deepspark.verify import Kind, Noise, Rows, Rule, Verdict, verify, verify_rows

__all__ = [
    "expect",
    "expect_close",
    "floats",
    "greedy",
    "ints",
    "logprobs",
    "match",
    "ragged",
    "stops",
    "transforms",
    "verify_rules",
]

TOLERANCE = 1e-5

_KINDS = {Kind.BONUS: "bonus", Kind.RESIDUAL: "residual", Kind.COUPLED: "coupled_accept"}
_RULES: dict[str, Rule] = {"chain_fresh": "chain", "chain_coupled": "coupled", "block": "block"}


def expect(what: str, got: object, want: object) -> None:
    """Raise AssertionError unless equal."""
    if got != want:
        raise AssertionError(f"{what}: expected {want}, got {got}")


def expect_close(what: str, got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless shapes are equal and numbers within `tolerance` (infinities equal)."""
    ours, theirs = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if ours.shape != theirs.shape:
        raise AssertionError(f"{what}: expected shape {theirs.shape}, got {ours.shape}")
    if not np.allclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True):
        raise AssertionError(f"{what}: expected {theirs.tolist()}, got {ours.tolist()}")


def floats(values: Any) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def ints(values: Any) -> Tensor:
    """Return an int64 tensor."""
    return torch.tensor(values, dtype=torch.int64)


def _expect_verdict(what: str, verdict: Verdict, x: Tensor, want: dict[str, Any]) -> None:
    expect(f"{what} accepted", int(verdict.accepted[0]), want["accepted"])
    expect(f"{what} token", int(verdict.token[0]), want["token"])
    expect(f"{what} emitted", verdict.emitted(x)[0], want["emitted"])


def verify_rules(row: dict[str, Any], folder: Path) -> None:
    """verify.jsonl: one block under the chain, coupled and block rules."""
    x, ell = ints([row["x"]]), ints([row["ell"]])
    Q = None if row["Q"] is None else floats([row["Q"]])
    noise = Noise(accept=floats([row["u_accept"]]), extra=floats([row["u_extra"]]))
    for name, rule in _RULES.items():
        verdict = verify(floats([row["P"]]), Q, x, ell, noise, rule)
        _expect_verdict(name, verdict, x, row[name])
        expect(f"{name} kind", _KINDS[Kind(int(verdict.kind[0]))], row[name]["kind"])


def greedy(row: dict[str, Any], folder: Path) -> None:
    """greedy.jsonl: argmax of raw logits, ties to the lowest token."""
    x = ints([row["x"]])
    verdict = verify(floats([row["logits"]]), None, x, ints([row["ell"]]), Noise(), "greedy")
    _expect_verdict("greedy", verdict, x, row)


def match(row: dict[str, Any], folder: Path) -> None:
    """match.jsonl: plain decoding's own tokens, by Gumbel-max or inverse CDF."""
    x = ints([row["x"]])
    P, numbers = floats([row["P"]]), floats([row["gumbel"] if row["mode"] == "gumbel" else row["u"]])
    _expect_verdict("match", verify(P, None, x, ints([row["ell"]]), Noise(match=numbers), "match"), x, row)
    for i, token in enumerate(row["plain"]):
        # A row without drafts that match emits what plain decoding does at this place.
        alone = verify(
            P[:, i : i + 1].expand(1, 2, -1), None, x[:, :1], ints([0]), Noise(match=numbers[:, [i, i]]), "match"
        )
        expect(f"plain token {i}", int(alone.token[0]), token)


def ragged(row: dict[str, Any], folder: Path) -> None:
    """ragged.jsonl: flat packing of a batch, judged by the chain rule."""
    anchors, drafts, ells, positions = (
        np.asarray(row[name], np.int64) for name in ("anchors", "drafts", "ells", "positions")
    )
    batch = pack(anchors, drafts, ells, positions)
    flat = row["flat"]
    for name, want in flat.items():
        expect(f"flat {name}", getattr(batch, name).tolist(), want)
    requests = len(row["ells"])
    rows = Rows(
        P=floats(row["P_flat"]),
        start=torch.from_numpy(batch.cu[:-1]),
        ell=ints(row["ells"]),
        x=ints(row["drafts"]),
        Q=floats(row["Q"]),
        slot=torch.arange(requests),
    )
    verdict = verify_rows(rows, Noise(accept=floats(row["u_accept"]), extra=floats(row["u_extra"])))
    expect("accepted", verdict.accepted.tolist(), row["accepted"])
    expect("tokens", verdict.token.tolist(), row["tokens"])


def stops(row: dict[str, Any], folder: Path) -> None:
    """stops.jsonl: cutting at a stop token or the length limit."""
    result = cut(row["emitted"], row["stop"], row["max_new"], row["n_before"])
    expect("kept", list(result.kept), row["kept"])
    expect("finish", result.finish, row["finish"])


def logprobs(row: dict[str, Any], folder: Path) -> None:
    """logprobs.jsonl: the target's log-probabilities of emitted tokens and the best alternatives."""
    count = max((len(best) for best in row["top"]), default=0)
    result = token_logprobs(floats(row["P"]), row["emitted"], count)
    expect_close("logprobs", result.logprobs, row["logprobs"])
    for ours, theirs in zip(result.top, row["top"], strict=True):
        expect("top tokens", [token for token, _ in ours[: len(theirs)]], [token for token, _ in theirs])
        expect_close("top logprobs", [value for _, value in ours[: len(theirs)]], [value for _, value in theirs])


def transforms(row: dict[str, Any], folder: Path) -> None:
    """transforms.jsonl: logits to the law a token is drawn from."""
    settings = SamplingSettings(
        temperature=row["temperature"],
        top_k=row["top_k"],
        top_p=row["top_p"],
        min_p=row["min_p"],
        order=row["order"],
        ban=tuple(row["ban"]),
    )
    allowed = None if row["allowed"] is None else torch.tensor(row["allowed"])
    expect_close("probs", transform(floats(row["logits"]), settings, allowed), row["probs"])
