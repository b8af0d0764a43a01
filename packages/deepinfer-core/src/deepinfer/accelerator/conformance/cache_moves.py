"""Cases of blocks and states of cache memory that are copied, packed into bytes and unpacked: all of them exact."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, RecordFormat, RecordView, TailView
from deepinfer.accelerator.conformance.case import PRECISIONS, Case, Outcome
from deepinfer.accelerator.conformance.inputs import (
    BLOCKS_EACH,
    SPANS,
    Draw,
    Shapes,
    batch_of,
    distinct,
    formats,
    past,
    records,
    ropes,
    tail,
)
from deepinfer.accelerator.ops import Ops

FORMATS: tuple[RecordFormat, ...] = ("fp8_group32", "fp4_group16", "fp4_group32", "fp8_rope")
BLOCKS = len(SPANS) * BLOCKS_EACH


def move_cases(sizes: Sequence[Shapes]) -> list[Case]:
    """Return the cases of this module."""
    cases = []
    for label, precision in PRECISIONS.items():
        for shapes in distinct(sizes):
            for op, run in ((Ops.copy_records, _copied), (Ops.unpack_records, _packed)):
                for ratio in (1, 4):
                    name = f"{shapes.name}-ratio{ratio}-{label}"
                    cases.append(Case(op, name, precision, functools.partial(run, shapes, ratio)))
            copied, packed = functools.partial(_copied_state, shapes), functools.partial(_packed_state, shapes)
            cases.append(Case(Ops.copy_state, f"{shapes.name}-{label}", precision, copied))
            cases.append(Case(Ops.unpack_state, f"{shapes.name}-{label}", precision, packed))
    return cases


def _filled(ops: Ops, shapes: Shapes, ratio: int, kind: RecordFormat) -> RecordView:
    """Entries of all tokens before `SPANS`, scattered over nine blocks of which some stay empty."""
    view = records(ops, kind, shapes.head_dim, shapes.rope, ratio)
    rope = ropes(ops, shapes.rope)[0]
    batch = ops.prepare(batch_of(ops, past(SPANS), (ratio,)), shapes.window, (rope,), ())
    latents = Draw(30).plain(batch.groups[ratio].rows.shape[0], shapes.head_dim, scale=3.0)
    ops.write_entries(ops.tensor(latents), batch, ratio, rope, view)
    return view


def _everything(ops: Ops, view: RecordView, ratio: int) -> Tensor:
    return ops.read_records(view, torch.arange(BLOCKS * BLOCK_TOKENS // ratio, device=ops.device))


def _copied(shapes: Shapes, ratio: int, ops: Ops) -> Sequence[Outcome]:
    """Every block takes its turn as the source, so that the ones with entries are among them."""
    each, outcomes = BLOCK_TOKENS // ratio, []
    for kind in formats(ops, *FORMATS):
        view = _filled(ops, shapes, ratio, kind)
        for block in range(0, BLOCKS - 1, 2):
            ops.copy_records(view, block * each, (block + 1) * each, each)
        outcomes.append(Outcome(f"{kind} records behind copies", _everything(ops, view, ratio)))
    return outcomes


def _packed(shapes: Shapes, ratio: int, ops: Ops) -> Sequence[Outcome]:
    each, outcomes = BLOCK_TOKENS // ratio, []
    for kind in formats(ops, *FORMATS):
        view = _filled(ops, shapes, ratio, kind)
        packed = [ops.pack_records(view, block * each, each).clone() for block in range(BLOCKS)]
        for block, data in enumerate(reversed(packed)):
            ops.unpack_records(view, block * each, each, data)
        sizes = torch.tensor([data.nbytes == view.data[:each].nbytes for data in packed])
        outcomes += [Outcome(f"{kind} records in reverse", _everything(ops, view, ratio)), Outcome("sizes", sizes)]
    return outcomes


def _remembered(ops: Ops, shapes: Shapes) -> TailView:
    view, draw = tail(ops, 4, 2 * shapes.head_dim), Draw(31)
    for memory in (view.scores, view.values):
        memory.copy_(ops.tensor(draw.wide(*memory.shape), ops.precision.wide))
    return view


def _copied_state(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    view = _remembered(ops, shapes)
    ops.copy_state(view, 0, 2)
    return [Outcome("scores", view.scores), Outcome("values", view.values)]


def _packed_state(shapes: Shapes, ops: Ops) -> Sequence[Outcome]:
    view = _remembered(ops, shapes)
    ops.unpack_state(view, 1, ops.pack_state(view, 0).clone())
    return [Outcome("scores", view.scores), Outcome("values", view.values)]
