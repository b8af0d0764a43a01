"""The report on ops: complete, and true about which body runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import override

import torch
from torch import Tensor

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.report import OPS, report_ops, shapes_of, start_line

FLOAT32 = Precision(torch.float32, round_inputs=False, cache="model")
CPU = torch.device("cpu")

NOT_REPORTED = {
    "copy_records": "moves cache memory",
    "copy_state": "moves cache memory",
    "everything": "reads what prepare made",
    "limits": "says which ops are limited",
    "mix_logits": "part of mix_in and head_weights",
    "mixing": "part of mix_in",
    "narrow": "rounds to the activation dtype",
    "new_records": "makes memory",
    "prepare": "derives the tables of a step",
    "read_records": "part of attention and select_entries",
    "selection": "finds slots",
    "stored": "moves a weight",
    "tensor": "moves a tensor",
    "unpack_records": "moves cache memory",
    "unpack_state": "moves cache memory",
    "widen": "converts to the wide dtype",
}


class HalfOps(Ops):
    """A device with two ops of its own, one of which cannot take every model."""

    @override
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids].to(self.precision.dtype)

    @override
    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps)

    @override
    def limits(self, shapes: Mapping[str, int]) -> dict[str, str]:
        return {"rms_norm": "hidden is no multiple of 128"} if shapes.get("hidden", 128) % 128 else {}


class Half(CpuAccelerator):
    name = "half"
    is_reference = False

    @override
    def ops(self, precision: Precision) -> Ops:
        return HalfOps(self.device, precision)


def test_every_public_method_is_reported_or_accounted_for() -> None:
    public = {name for name in dir(Ops) if not name.startswith(("_", "pack_")) and callable(getattr(Ops, name))}
    reported = [op.__name__ for op in OPS]
    assert len(reported) == len(set(reported))
    assert set(reported) | set(NOT_REPORTED) == public
    assert not set(reported) & set(NOT_REPORTED)


def test_the_report_follows_the_class_that_runs() -> None:
    device = Half()
    reports = {report.op: report for report in report_ops(device, device.ops(FLOAT32))}
    assert reports["embed"].implementation.endswith("HalfOps")
    assert reports["embed"].reason is None
    assert reports["attention"].implementation == "reference"
    assert reports["attention"].reason == "accelerator 'half' has none of its own"
    assert reports["rms_norm"].reason is None


def test_a_limit_is_judged_by_the_shapes_of_the_model() -> None:
    device = Half()
    for hidden, reason in ((256, None), (200, "hidden is no multiple of 128")):
        reports = {report.op: report for report in report_ops(device, device.ops(FLOAT32), {"hidden": hidden})}
        assert reports["rms_norm"].reason == reason


def test_shapes_are_the_whole_numbers_of_a_configuration() -> None:
    @dataclass(frozen=True)
    class Config:
        heads: int = 4
        eps: float = 1e-6
        shifted: bool = True
        layers: tuple[int, ...] = (1, 2)

    assert shapes_of(Config()) == {"heads": 4}


def test_nothing_falls_back_where_the_definition_was_made_for() -> None:
    cpu = CpuAccelerator()
    line = start_line(cpu, cpu.ops(FLOAT32))
    assert line == f"cpu: all {len(OPS)} ops; steps are not overlapped, an op has finished when it returns"


def test_the_start_line_counts_and_names() -> None:
    device = Half()
    line = start_line(device, device.ops(FLOAT32), {"hidden": 200})
    assert line == f"half: 1 of {len(OPS)} ops (embed), reference for the others"
    most = type("MostOps", (Ops,), {op.__name__: lambda self: None for op in OPS[2:]})
    line = start_line(device, most(CPU, FLOAT32))
    assert line == f"half: {len(OPS) - 2} of {len(OPS)} ops, reference for: embed, linear"
    assert start_line(device, Ops(CPU, FLOAT32)) == f"half: 0 of {len(OPS)} ops, reference for all"
