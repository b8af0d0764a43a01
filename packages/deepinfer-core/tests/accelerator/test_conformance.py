"""The conformance suite: the CPU's ops pass it, other orders of sums do too, a small mistake in any op does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.batch import Groups
from deepinfer.accelerator.conformance import TINY, Case, ConformanceError, cases
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.report import OPS

SMALL = cases([TINY])


class Device(CpuAccelerator):
    """A device whose ops are the reference with one method exchanged."""

    name = "exchanged"

    def __init__(self, method: str, body: Callable[..., Any]) -> None:
        super().__init__()
        self._class = type("ExchangedOps", (Ops,), {method: body})

    def ops(self, precision: Precision) -> Ops:
        return self._class(self.device, precision)


def findings(device: CpuAccelerator, op: str) -> list[str]:
    judged = [case.judge(device) for case in SMALL if case.op.__name__ == op]
    assert judged
    return [finding.fault for finding in judged if finding.fault is not None]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_cpu_conforms(case: Case) -> None:
    case.check(CpuAccelerator())


def test_every_op_has_cases_in_both_precisions() -> None:
    assert MISTAKES.keys() >= {op.__name__ for op in OPS}
    covered = {(case.op.__name__, case.precision.dtype) for case in SMALL}
    assert covered >= {(op.__name__, dtype) for op in OPS for dtype in (torch.bfloat16, torch.float32)}
    assert len({str(case) for case in cases()}) == len(cases())


def reversed_linear(ops: Any, x: Tensor, weight: Any, *, wide: bool = False) -> Tensor:
    """The same sum from back to front, in two halves."""
    given, dense = ops._rounded(x, weight).to(ops.precision.wide).flip(-1), ops._dense(weight).flip(-1)
    half = given.shape[-1] // 2
    y = given[..., half:] @ dense[:, half:].T + given[..., :half] @ dense[:, :half].T
    return y if wide else y.to(ops.precision.dtype)


def narrow_attend(ops: Any, q: Tensor, keys: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    """Weights rounded to the activation dtype before they meet the values, as matrix units take them."""
    scores = q.to(ops.precision.wide) @ keys.transpose(1, 2) * q.shape[2] ** -0.5 + bias.unsqueeze(1)
    scores = torch.cat((scores, sink.view(1, -1, 1).expand(q.shape[0], -1, 1)), 2)
    weights = torch.softmax(scores, 2)[..., :-1].to(ops.precision.dtype).to(keys.dtype)
    return weights @ keys


def exact_norm(ops: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    exact = x.to(torch.float64)
    exact = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    return (exact if weight is None else exact * weight).to(ops.precision.dtype)


@pytest.mark.parametrize(
    ("method", "body", "op"),
    [
        ("linear", reversed_linear, "linear"),
        ("_attend", narrow_attend, "attention"),
        ("rms_norm", exact_norm, "rms_norm"),
        ("rms_norm", exact_norm, "write_window"),
        ("rms_norm", exact_norm, "mix_in"),
    ],
)
def test_another_order_of_roundings_is_accepted(method: str, body: Callable[..., Any], op: str) -> None:
    assert findings(Device(method, body), op) == []


def changed(op: str, change: Callable[[Any], Any]) -> Device:
    """A device on which the result of `op` is changed a little."""
    original = getattr(Ops, op)
    return Device(op, lambda self, *args, **kwargs: change(original(self, *args, **kwargs)))


def given(op: str, change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Device:
    """A device on which `op` misreads its arguments."""
    original = getattr(Ops, op)

    def misread(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, kwargs)
        return original(self, *args, **kwargs)

    return Device(op, misread)


def scale_last(factor: float) -> Callable[[Tensor], Tensor]:
    """One column of many is off."""

    def change(result: Tensor) -> Tensor:
        result = result.clone()
        result[..., -1] *= factor
        return result

    return change


def replaced(index: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda args, kwargs: ((*args[:index], change(args[index]), *args[index + 1 :]), kwargs)


def no_ties(selection: Any) -> Any:
    """As if the larger entry won a tie: the last chosen entry is one further."""
    chosen, blocks = selection
    entries = chosen.entries.clone()
    entries[:, -1] += 1
    return replace(chosen, entries=entries), blocks


MISTAKES = {
    "embed": changed("embed", lambda x: x.roll(1, 0)),
    "linear": given("linear", replaced(0, lambda x: torch.cat((x[..., :-1], x[..., -1:] * 0), -1))),
    "grouped_linear": given("grouped_linear", replaced(0, lambda x: x.flip(1))),
    "rms_norm": given("rms_norm", replaced(2, lambda eps: eps * 0 + 1e-2)),
    "write_window": given("write_window", replaced(2, lambda eps: eps + 1e-2)),
    "write_entries": given("write_entries", replaced(0, lambda latents: latents.roll(1, 0))),
    "copy_records": given("copy_records", replaced(3, lambda count: count - 1)),
    "unpack_records": changed("pack_records", lambda data: data * (torch.arange(len(data)) > 0)),
    "copy_state": given("copy_state", replaced(2, lambda target: target - 1)),
    "unpack_state": changed("pack_state", lambda data: data.roll(4)),
    "compress": given("compress", replaced(1, lambda scores: None if scores is None else scores * 0.99)),
    "rotate_queries": changed("rotate_queries", scale_last(1.02)),
    "attention": given("attention", replaced(2, lambda sink: sink + 0.3)),
    "select_entries": changed("select_entries", no_ties),
    "mix_in": given("mix_in", replaced(3, lambda settings: replace(settings, iterations=3))),
    "mix_out": given("mix_out", replaced(2, lambda mix: replace(mix, comb=mix.comb.transpose(1, 2).contiguous()))),
    "collapse": changed("collapse", scale_last(1.02)),
    "head_weights": given("head_weights", replaced(2, lambda settings: replace(settings, eps=0.01))),
    "route": given("route", replaced(4, lambda settings: replace(settings, scale=settings.scale * 1.01))),
    "experts": given("experts", replaced(1, lambda picks: picks.masked_fill(picks == 7, -1))),
    "shared_expert": given("shared_expert", replaced(2, lambda limit: limit * 0.01)),
    "combine": changed("combine", scale_last(1.02)),
    "ngram_rows": changed("ngram_rows", lambda rows: rows + (rows > 50000)),
    "engram_lookup": given("engram_lookup", replaced(0, lambda rows: rows.flip(1))),
    "engram_gate": given("engram_gate", replaced(4, lambda rows: None)),
    "adjust": given("adjust", replaced(1, lambda rules: replace(rules, repetition=1 / rules.repetition))),
    "mask_tokens": given("mask_tokens", replaced(1, lambda words: words.roll(1, 0))),
    "shape_logits": given("shape_logits", replaced(1, lambda rows: replace(rows, top_k=rows.top_k + 1))),
    "greedy": changed("greedy", lambda tokens: tokens + 1),
    "sample": given("sample", replaced(1, lambda rows: replace(rows, positions=rows.positions + 1))),
    "log_probs": changed("log_probs", scale_last(1.001)),
    "best": changed("best", lambda found: (found[0], found[1].flip(1))),
}


@pytest.mark.parametrize("op", list(MISTAKES))
def test_a_mistake_in_any_op_is_found(op: str) -> None:
    assert findings(MISTAKES[op], op)


def test_a_dropped_window_key_is_found() -> None:
    """The decoder half must not see keys before its start."""
    assert findings(given("attention", replaced(1, lambda keys: replace(keys, decoder=False))), "attention")


def test_a_window_before_the_place_of_resumption_is_found() -> None:
    assert findings(given("prepare", replaced(0, lambda batch: replace(batch, window_starts=None))), "attention")


@pytest.mark.parametrize("op", ["compress", "write_entries"])
def test_an_entry_that_is_written_again_is_found(op: str) -> None:
    """As if every row that ends a group formed an entry, whatever the batch says."""

    def all_groups(batch: Any) -> Any:
        def every(ratio: int, groups: Groups) -> Groups:
            rows = torch.nonzero((batch.positions + 1) % ratio == 0).flatten()
            entries, each = batch.positions[rows] // ratio, 128 // ratio
            slots = batch.block_tables[batch.sequences[rows], entries // each] * each + entries % each
            return Groups(torch.cat((rows, groups.rows[-1:])), torch.cat((slots, groups.slots[-1:])))

        return replace(batch, groups={ratio: every(ratio, groups) for ratio, groups in batch.groups.items()})

    assert findings(given("prepare", replaced(0, all_groups)), op)


def test_a_causal_draft_block_is_found() -> None:
    assert findings(given("prepare", lambda args, kwargs: (args, kwargs | {"block": 0})), "attention")


def test_a_failure_names_accelerator_op_and_case() -> None:
    case = next(case for case in SMALL if case.op is Ops.greedy)
    with pytest.raises(
        ConformanceError, match=r"accelerator 'exchanged', op greedy, case greedy-.*differs in 24 of 24"
    ):
        case.check(MISTAKES["greedy"])
    shorter = changed("greedy", lambda tokens: tokens[1:])
    with pytest.raises(ConformanceError, match=r"is expected to be torch.int64 \[24\], is torch.int64 \[23\]"):
        case.check(shorter)
    nan = changed("log_probs", lambda values: values * torch.nan)
    assert findings(nan, "log_probs")
