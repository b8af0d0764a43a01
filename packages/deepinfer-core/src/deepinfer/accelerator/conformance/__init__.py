"""What every accelerator must pass: its ops against the reference on the CPU, on random inputs that a seed fixes.

A kernel wheel's test is three lines:

    @pytest.mark.parametrize("case", cases(), ids=str)
    def test_conformance(case: Case) -> None:
        case.check(accelerator)

A device with deterministic ops runs `invariance_cases()` in the same way: each row alone as among others, bit for bit.
How far a result may be off is derived from the number formats (`case.py`), or not at all where an op is exact.
"""

from collections.abc import Sequence

from deepinfer.accelerator.conformance.attention import attention_cases
from deepinfer.accelerator.conformance.cache_moves import move_cases
from deepinfer.accelerator.conformance.case import Case, ConformanceError, Finding
from deepinfer.accelerator.conformance.experts import expert_cases
from deepinfer.accelerator.conformance.inputs import ALL_SHAPES, TINY, Shapes
from deepinfer.accelerator.conformance.invariance import InvarianceCase, Proof, digest_of, invariance_cases
from deepinfer.accelerator.conformance.memory import memory_cases
from deepinfer.accelerator.conformance.mixing import mixing_cases
from deepinfer.accelerator.conformance.paged_cache import cache_cases
from deepinfer.accelerator.conformance.projection import projection_cases
from deepinfer.accelerator.conformance.sampling import sampling_cases

__all__ = [
    "ALL_SHAPES",
    "TINY",
    "Case",
    "ConformanceError",
    "Finding",
    "InvarianceCase",
    "Proof",
    "cases",
    "digest_of",
    "invariance_cases",
]


def cases(shapes: Sequence[Shapes] = ALL_SHAPES) -> list[Case]:
    """Return the cases of every op in both precisions, at `shapes`: by default small ones and those of released models.

    `TINY` alone takes seconds on a CPU, the others minutes.
    """
    return [
        *projection_cases(shapes),
        *cache_cases(shapes),
        *move_cases(shapes),
        *attention_cases(shapes),
        *mixing_cases(shapes),
        *expert_cases(shapes),
        *memory_cases(shapes),
        *sampling_cases(),
    ]
