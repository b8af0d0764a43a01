"""Which of a device's ops are its own and which are the reference, and why: the start line and doctor's table.

Checking that an op is right is the conformance suite's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.ops import Ops

OPS: tuple[Callable[..., object], ...] = (
    Ops.embed,
    Ops.linear,
    Ops.grouped_linear,
    Ops.rms_norm,
    Ops.write_window,
    Ops.write_entries,
    Ops.compress,
    Ops.rotate_queries,
    Ops.attention,
    Ops.select_entries,
    Ops.mix_in,
    Ops.mix_out,
    Ops.collapse,
    Ops.head_weights,
    Ops.route,
    Ops.experts,
    Ops.shared_expert,
    Ops.combine,
    Ops.ngram_rows,
    Ops.engram_lookup,
    Ops.engram_gate,
    Ops.adjust,
    Ops.mask_tokens,
    Ops.greedy,
    Ops.sample,
    Ops.shape_logits,
    Ops.log_probs,
    Ops.best,
)
"""What a step spends its time in; other public methods of `Ops` prepare weights, move memory, or are parts of these."""


@dataclass(frozen=True)
class OpReport:
    """Who computes an op: `implementation` is "module.Class"; `reason` says why it is the reference (or None)."""

    op: str
    implementation: str
    reason: str | None


def shapes_of(config: object) -> dict[str, int]:
    """Return the whole numbers of a model's configuration, a dataclass, under their names: what `Ops.limits` takes."""
    return {name: value for name, value in vars(config).items() if type(value) is int}


def report_ops(accelerator: Accelerator, ops: Ops, shapes: Mapping[str, int] | None = None) -> list[OpReport]:
    """Judge every op of `ops`, for a model of `shapes` where they are given (see `Ops.limits`).

    Looks at the class of each method and asks the device which of its own ops hand such shapes to the reference.
    """
    limits = ops.limits(shapes or {})
    return [_judge(accelerator, ops, op, limits) for op in OPS]


def _judge(accelerator: Accelerator, ops: Ops, op: Callable[..., object], limits: Mapping[str, str]) -> OpReport:
    name = op.__name__
    owner = next(cls for cls in type(ops).__mro__ if name in vars(cls))
    if vars(owner)[name] is op:
        cause = f"accelerator {accelerator.name!r} has none of its own"
        if accelerator.is_reference:
            cause = "the definition, made for this device"
        return OpReport(name, "reference", cause)
    if name in limits:
        return OpReport(name, "reference", limits[name])
    return OpReport(name, f"{owner.__module__}.{owner.__qualname__}", None)


def start_line(accelerator: Accelerator, ops: Ops, shapes: Mapping[str, int] | None = None) -> str:
    """Say in one line how many ops are the device's own: `nvidia: 17 of 19 ops, reference for: engram_gate, sample`."""
    reports = report_ops(accelerator, ops, shapes)
    own = [report.op for report in reports if report.reason is None]
    missing = [report.op for report in reports if report.reason is not None]
    if accelerator.is_reference:
        steps = "; steps are not overlapped, an op has finished when it returns" if accelerator.synchronous else ""
        return f"{accelerator.name}: all {len(reports)} ops{steps}"
    line = f"{accelerator.name}: {len(own)} of {len(reports)} ops"
    if not own:
        return f"{line}, reference for all"
    if len(own) < len(missing):
        return f"{line} ({', '.join(own)}), reference for the others"
    return f"{line}, reference for: {', '.join(missing)}" if missing else line
