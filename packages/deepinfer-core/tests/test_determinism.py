"""`deterministic=True`: a request has the same bits however it is run, in checkpoint formats and in float32."""

import json
from dataclasses import replace
from pathlib import Path
from typing import override

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import LLM, AcceleratorError, ConfigError, SamplingParams
from deepinfer import determinism as proofs
from deepinfer.accelerator.conformance import Proof
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.cli import app
from deepinfer.determinism import WAYS, Way, run_way
from deepinfer.engine.options import DtypeChoice
from deepinfer.engine.scheduler import Scheduler
from deepinfer.model.tiny import Family, write_tiny

EXAMPLES = settings().max_examples
MODELS: list[tuple[Family, DtypeChoice]] = [
    ("deepseek_v41", "auto"),
    ("deepseek_v41", "float32"),
    ("deepseek_v4", "auto"),
    ("deepseek_v4", "bfloat16"),
]
SOME = [way for way in WAYS if way.name in ("batch of 64", "chunks of 7 tokens", "one step at a time", "preempted")]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    family, dtype = request.param
    folder: Path = tmp_path_factory.mktemp("tiny") / family
    write_tiny(folder, family=family)
    return LLM(folder, accelerator="cpu", dtype=dtype, max_model_len=384, max_num_seqs=64, deterministic=True)


def test_a_request_has_the_same_bits_however_it_is_run(llm: LLM) -> None:
    alone = run_way(llm, WAYS[0])
    assert len(set(alone)) == len(alone)
    for way in SOME:
        assert run_way(llm, way) == alone, way.name


@settings(max_examples=max(EXAMPLES // 50, 2))
@given(rows=st.integers(8, 300), sequences=st.integers(1, 12), seed=st.integers(0, 99), blocks=st.integers(3, 12))
def test_sizes_and_order_change_no_bit(rows: int, sequences: int, seed: int, blocks: int) -> None:
    llm = LLM("tiny", accelerator="cpu", max_model_len=384, max_num_seqs=64, deterministic=True)
    shuffled = np.random.default_rng(seed).permutation
    way = Way("drawn", max(rows, sequences), sequences, order=lambda count: shuffled(count).tolist(), blocks=blocks)
    assert run_way(llm, way) == run_way(llm, WAYS[1])


def test_the_way_that_is_to_preempt_does(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[int] = []
    original = Scheduler._release

    def release(self: Scheduler, row: int) -> None:
        if len(self._table[row].generated) < proofs.GENERATED:
            preempted.append(row)
        original(self, row)

    monkeypatch.setattr(Scheduler, "_release", release)
    llm = LLM("tiny", accelerator="cpu", max_model_len=384, max_num_seqs=64, deterministic=True)
    run_way(llm, next(way for way in WAYS if way.name == "preempted"))
    assert preempted


def test_an_accelerator_without_deterministic_ops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(CpuAccelerator):
        name = "careless"
        deterministic_ops = CpuAccelerator.__base__.deterministic_ops  # type: ignore[union-attr]

    monkeypatch.setattr("deepinfer.llm.open_accelerator", lambda name: Careless())
    with pytest.raises(
        AcceleratorError, match="accelerator 'careless' has no deterministic ops, which deterministic=T"
    ):
        LLM("tiny", deterministic=True)
    with pytest.raises(ConfigError, match="deterministic must be True or False, got 'yes'"):
        LLM("tiny", deterministic="yes")  # type: ignore[arg-type]


class FewProofs:
    """`verify` cut down to a few cases and ways."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        some = proofs.ops_cases(CpuAccelerator())[::30]
        monkeypatch.setattr(proofs, "ops_cases", lambda accelerator: some)
        monkeypatch.setattr(proofs, "WAYS", WAYS[:2])
        monkeypatch.setattr(proofs, "DTYPES", ("auto",))
        self.count = len(some) + 2


def test_the_command_prints_the_same_hashes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    few = FewProofs(monkeypatch)
    first, second = (
        CliRunner().invoke(app, ["verify-determinism", "--accelerator", "cpu", "--json"]) for _ in range(2)
    )
    assert (first.exit_code, second.exit_code) == (0, 0)
    report = json.loads(first.stdout)
    assert report == json.loads(second.stdout)
    assert report["deterministic"] is True
    assert len(report["cases"]) == few.count
    alone, batched = (case["digest"] for case in report["cases"][-2:])
    assert alone == batched


def test_the_command_fails_when_a_hash_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    FewProofs(monkeypatch)

    class Faulty(CpuAccelerator):
        """A product that depends on how many rows the step has."""

        @override
        def deterministic_ops(self, precision: object) -> object:  # type: ignore[override]
            ops = super().deterministic_ops(precision)  # type: ignore[arg-type]
            linear = ops.linear
            ops.linear = lambda x, *others, **options: linear(x * (1 + 0.5 * (len(x) > 1)), *others, **options)  # type: ignore[method-assign]
            return ops

    for place in ("deepinfer.accelerator.registry.open_accelerator", "deepinfer.llm.open_accelerator"):
        monkeypatch.setattr(place, lambda name: Faulty())
    result = CliRunner().invoke(app, ["verify-determinism"])
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    assert "requests differ from those run alone" in result.stdout
    assert "NOT deterministic on cpu" in result.stdout


def test_a_table_names_ops_and_ways() -> None:
    table = proofs.render(
        [
            Proof("linear-fp8-tiny-bfloat16", "00", None),
            Proof("linear-fp4-tiny-bfloat16", "01", "2 of 37 rows differ alone"),
            Proof("model-auto-batch of 8", "02", None),
        ]
    )
    lines = table.splitlines()
    assert lines[0].startswith("DIFFERS ")
    assert lines[0].endswith("  linear                2 cases")
    assert lines[1] == "same    02  model, dtype auto     batch of 8"
    assert lines[2] == "  linear-fp4-tiny-bfloat16: 2 of 37 rows differ alone"


def test_more_threads_change_nothing_within_a_run(llm: LLM) -> None:
    """A tile is cut among threads in the same way each time."""
    torch.set_num_threads(3)
    try:
        few = [replace(way, others=0) for way in (WAYS[1], SOME[0])]
        assert run_way(llm, few[0]) == run_way(llm, few[1])
    finally:
        torch.set_num_threads(1)


def test_a_prefix_hit_has_the_bits_of_a_cold_run(llm: LLM) -> None:
    """Tokens and whole rows of log-probabilities, of the same prompt again and of one that leaves it behind a block."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=4, ignore_eos=True, logprobs=-1)
    first = [5 + (7 * i * i + i) % 190 for i in range(300)]
    for prompt, hit in ((first, 0), (first, 256), ([*first[:140], *first[:50]], 128)):
        warm, cold = (
            llm.generate({"prompt_token_ids": prompt, "prefix_cache": mode}, params)[0] for mode in ("exact", "off")
        )
        assert warm.cache is not None
        assert warm.cache.hit == hit
        assert (warm.num_cached_tokens > 0) == (hit > 0)
        assert warm.token_ids == cold.token_ids
        assert isinstance(warm.logprobs, torch.Tensor)
        assert isinstance(cold.logprobs, torch.Tensor)
        assert torch.equal(warm.logprobs, cold.logprobs)
