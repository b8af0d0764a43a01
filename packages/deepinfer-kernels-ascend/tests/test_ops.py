"""What the wheel says about its ops: for now each is the reference, and the report does not claim more."""

import torch

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.report import report_ops
from deepinfer_kernels_ascend.ops import AscendOps


def test_every_op_is_reported_as_the_reference() -> None:
    ops = AscendOps(torch.device("cpu"), Precision(torch.bfloat16, round_inputs=True, cache="records"))
    reports = report_ops(CpuAccelerator(), ops)
    assert {report.implementation for report in reports} == {"reference"}
    assert all(report.reason for report in reports)
