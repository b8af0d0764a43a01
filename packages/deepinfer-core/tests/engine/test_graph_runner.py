"""Graphs = no graphs: the same tokens when steps of few rows are laid into padded ones; a step asks nothing back."""

import logging
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, override

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer.accelerator.batch import Batch, Groups
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import PackedExperts
from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer.accelerator.parameters import Precision, StoredTable
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.graph_runner import GraphLimits, GraphRunner, GraphSize, _empty_batch, _step_up
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.engine.speculation import Drafting
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import DeepSeek, ModelOutput
from deepinfer.model.draft import DraftStages
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.tiny import write_tiny
from deepinfer.model.weights import Weights
from deepspark.serving import ServingDrafter

from .checker import EXAMPLES, CheckingModel, drain, engine_config, greedy, lone_run, small_config, small_ops, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLOAT64 = Precision(torch.float64, round_inputs=False, cache="model")
V41, V4 = small_config(), small_config("deepseek_v4")


class Recording(CpuAccelerator):
    """A device whose graphs are calls: what a graph would read and write is what the call does."""

    graphs = True

    def __init__(self) -> None:
        super().__init__()
        self.recorded = self.replayed = 0

    @override
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        run()

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


class Unrecordable(Recording):
    """A device that cannot record the steps of this model."""

    @override
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")


class Small(Recording):
    """A device with memory for three graphs."""

    @override
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.recorded == 3:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return super().capture(run)


class WithoutPadding:
    """Takes padding out of a step, after a look at it, and hands the rest to a model that admits none."""

    def __init__(self, model: CheckingModel) -> None:
        self._model = model

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        if batch.decoder_rows is not None:
            return self._model.forward(batch, cache)
        held = batch.states >= 0
        rows = held[batch.sequences]
        assert (batch.block_tables[~held] == -1).all()
        assert (batch.window_tables[~held] == -1).all()
        assert (batch.positions[~rows] == 0).all()
        count = int(rows.sum())
        assert rows[:count].all(), "padding comes behind the rows of the step"
        whole = held.nonzero().flatten()
        assert whole.tolist() == list(range(len(whole)))
        groups = {}
        for ratio, group in batch.groups.items():
            real = group.slots >= 0
            assert (group.rows[~real] == 0).all()
            groups[ratio] = Groups(group.rows[real], group.slots[real])
        logit_rows = batch.logit_rows[batch.logit_rows < count]
        of_rows = ("token_ids", "positions", "sequences", "history")
        of_sequences = ("query_starts", "query_lens", "context_lens", "block_tables", "window_tables", "window_bases")
        kept: dict[str, Any] = {name: getattr(batch, name)[rows] for name in of_rows}
        kept |= {name: getattr(batch, name)[held] for name in (*of_sequences, "states", "decoder_starts")}
        real_batch = replace(batch, **kept, groups=groups, logit_rows=logit_rows)
        if not count:
            return ModelOutput(torch.zeros(len(batch.logit_rows), V41.vocab_size), None)
        logits = self._model.forward(real_batch, cache).logits
        lost = len(batch.logit_rows) - len(logit_rows)
        return ModelOutput(functional.pad(logits, (0, 0, 0, lost)), None)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    seqs, blocks = draw(st.integers(1, 9)), draw(st.integers(4, 10))
    return engine_config(
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(max(seqs, 2), 200)),
        blocks=blocks,
        window_blocks=draw(st.integers(5, 20)),
        max_model_len=draw(st.integers(300, 1400)),
        overlap=draw(st.booleans()),
        graphs=True,
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    length = draw(st.one_of(st.integers(1, 9), st.integers(110, 150), st.integers(250, 270)))
    prompt = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(3, V41.vocab_size, length).tolist()
    return Request(prompt, greedy(max_tokens=draw(st.integers(1, 25)), ignore_eos=draw(st.booleans())))


@pytest.mark.parametrize("model", [V41, V4], ids=["v41", "v4"])
@settings(max_examples=EXAMPLES // 10)
@given(config=configs(), arrivals=st.lists(st.tuples(st.integers(0, 8), requests()), min_size=1, max_size=9))
def test_every_row_finds_its_own_past_in_a_padded_step(
    model: ModelConfig, config: EngineConfig, arrivals: list[tuple[int, Request]]
) -> None:
    config = replace(config, max_model_len=min(config.max_model_len, config.blocks * 128))
    device = Recording()
    engine = Engine(config, model, WithoutPadding(CheckingModel(model)), small_ops(), device, None)
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    asked: dict[int, Request] = {}
    gained: dict[int, tuple[int, ...]] = {}
    for step in range(5000):
        while left and left[0][0] <= step:
            request = left.pop(0)[1]
            asked[engine.add(request)] = request
        for progress in engine.step():
            gained[progress.request_id] = gained.get(progress.request_id, ()) + tuple(progress.token_ids)
        engine.scheduler.check()
        if not left and not engine.has_work:
            break
    assert not engine.has_work
    for number, request in asked.items():
        assert gained[number] == lone_run(model, config, request).token_ids
    decoded = max(request.params.max_tokens or 0 for request in asked.values()) > 2
    assert device.replayed or not decoded


class Tiny:
    """The tiny model of a family with its draft stages."""

    def __init__(self, folder: "Path", family: str, ops: Ops | None = None) -> None:
        write_tiny(folder, family=family)  # type: ignore[arg-type]
        checkpoint, accelerator = Checkpoint(folder), CpuAccelerator()
        self.ops = accelerator.ops(FLOAT64) if ops is None else ops
        weights = Weights(checkpoint, self.ops, accelerator)
        self.config = checkpoint.config
        self.model = DeepSeek(checkpoint.config, weights, self.ops)
        self.stages = DraftStages(self.model, weights) if checkpoint.config.draft else None

    def sizes(self, **changes: object) -> EngineConfig:
        replay = self.config.window + 12 if self.config.first_decoder_layer is not None else None
        return engine_config(precision=self.ops.precision, decoder_replay=replay, max_model_len=2000, **changes)

    def run(self, config: EngineConfig, asked: list[Request], device: CpuAccelerator, drafting: Drafting | None) -> Any:
        engine = Engine(config, self.config, self.model, self.ops, device, None, drafting=drafting)
        numbers = [engine.add(request) for request in asked]
        gained = drain(engine)
        return [tokens_of(gained[number]) for number in numbers]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def make(family: str) -> Tiny:
        if family not in made:
            made[family] = Tiny(tmp_path_factory.mktemp("tiny") / family, family)
        return made[family]

    return make


def prompts(seed: int, lengths: list[int], **params: Any) -> list[Request]:
    generator = np.random.default_rng(seed)
    chosen = SamplingParams(ignore_eos=True, **params)
    return [Request(generator.integers(30, 255, length).tolist(), chosen, index=i) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
@settings(max_examples=EXAMPLES // 33)
@given(
    lengths=st.lists(st.sampled_from([1, 30, 127, 128, 500, 510, 600]), min_size=1, max_size=6),
    temperature=st.sampled_from([0, 0.9]),
    sizes=st.tuples(st.integers(1, 6), st.sampled_from([6, 40])),
    overlap=st.booleans(),
)
def test_the_real_model_gives_the_tokens_that_it_gives_without_graphs(
    tiny: Callable[[str], Tiny],
    family: str,
    lengths: list[int],
    temperature: float,
    sizes: tuple[int, int],
    overlap: bool,
) -> None:
    """Across the border between two graphs' contexts (512), with preemption, sampled and greedy."""
    one = tiny(family)
    asked = prompts(sum(lengths), lengths, max_tokens=12, temperature=temperature)
    seats, blocks = sizes
    eager = one.sizes(max_num_seqs=seats, blocks=blocks, window_blocks=30, overlap=overlap)
    eager = replace(eager, max_model_len=blocks * 128)
    device = Recording()
    assert one.run(replace(eager, graphs=True), asked, device, None) == one.run(eager, asked, CpuAccelerator(), None)
    assert device.replayed > 5


def test_drafts_are_verified_in_graphs(tiny: Callable[[str], Tiny]) -> None:
    one = tiny("deepseek_v41")
    assert one.stages is not None
    asked = prompts(3, [5, 40, 129, 7], max_tokens=12, temperature=0.7)
    plain = one.run(one.sizes(), asked, CpuAccelerator(), None)
    device = Recording()
    drafting = Drafting(one.stages, ServingDrafter, "match", "on")
    assert one.run(one.sizes(graphs=True), asked, device, drafting) == plain
    assert device.replayed > 5


def test_what_a_device_cannot_record_it_runs(tiny: Callable[[str], Tiny], caplog: pytest.LogCaptureFixture) -> None:
    one = tiny("deepseek_v41")
    asked = prompts(1, [20, 30], max_tokens=5, temperature=0)
    with caplog.at_level(logging.WARNING):
        got = one.run(one.sizes(graphs=True), asked, Unrecordable(), None)
    assert got == one.run(one.sizes(), asked, CpuAccelerator(), None)
    told = [record.getMessage() for record in caplog.records if "graphs" in record.getMessage()]
    assert told == [
        "steps run without graphs, this one cannot be recorded: operation not permitted when stream is capturing"
    ]


def test_graphs_are_few_and_recorded_within_their_time(tiny: Callable[[str], Tiny]) -> None:
    one = tiny("deepseek_v41")
    cache = KVCache(one.config, one.ops, FLOAT64, blocks=2, window_blocks=2, states=256)
    device = Recording()
    runner = GraphRunner(one.model, one.config, cache, device, GraphLimits(256, 1, 100_000))
    assert runner.prepare(0.0) <= 1
    assert len({_step_up(count) for count in range(1, 257)}) == 14
    assert all(count <= _step_up(count) < max(9, count * 3 / 2) for count in range(1, 1025))
    sizes = list(runner._first_sizes())
    assert len(sizes) == 42
    assert sizes[0] == GraphSize(1, 1, 512)
    assert sizes[-1] == GraphSize(256, 256, 8192)


class Asking(TorchDispatchMode):
    """Raises where the host would have to wait for a number of the device; a device cannot record such a step."""

    ASKS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.allowed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in _indices(args)
        )
        if not self.allowed and (masks or name in self.ASKS):
            raise AssertionError(f"{func} asks the device for a number")
        return func(*args, **(kwargs or {}))


def _indices(args: Any) -> list[Any]:
    return list(args[1]) if len(args) > 1 and isinstance(args[1], list | tuple) else []


class DeviceOps(Ops):
    """The reference, but for the two ops that say in their docstring that they look at numbers on the host."""

    asking = Asking()

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        with self._allowed():
            return super().experts(x, picks, weights, experts, limit)

    @override
    def engram_lookup(self, rows: Tensor, table: StoredTable) -> Tensor:
        with self._allowed():
            return super().engram_lookup(rows, table)

    @contextmanager
    def _allowed(self) -> "Iterator[None]":
        self.asking.allowed = True
        try:
            yield
        finally:
            self.asking.allowed = False


RECORDS = Precision(torch.bfloat16, round_inputs=True, cache="records")


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01}],
    ids=["greedy", "sampled", "filtered"],
)
def test_a_decoding_step_asks_the_device_nothing(
    family: str, params: dict[str, Any], tmp_path: "Path", monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the batch to the tokens on their way back, short contexts and such that need the index."""
    one = Tiny(tmp_path / family, family, DeviceOps(torch.device("cpu"), RECORDS))
    engine = Engine(one.sizes(), one.config, one.model, one.ops, CpuAccelerator(), None)
    for request in prompts(2, [5, 300, 61], max_tokens=40, logprobs=2, **params):
        engine.add(request)
    for _ in range(6):
        engine.step()
    watched = 0
    launch = engine._launch

    def watch(*given: Any) -> Any:
        nonlocal watched
        watched += given[0].decoding
        with DeviceOps.asking:
            return launch(*given)

    monkeypatch.setattr(engine, "_launch", watch)
    for _ in range(4):
        engine.step()
    assert watched == 4


def test_the_watch_sees_who_asks() -> None:
    for ask in (lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool(x.all())):
        with pytest.raises(AssertionError, match="asks the device"), Asking():
            ask(torch.ones(3))


class Elsewhere(TorchDispatchMode):
    """Raises where a device would have to wait for a number of the host: a graph cannot record such a copy either."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        here = [part for part in given if part.device.type == "cpu"]
        out = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        if here and any(part.device.type == "meta" for part in (*given, *out)):
            raise AssertionError(f"{func} takes a number of the host")
        return result


class MetaOps(Ops):
    """The reference on a device without numbers, but for what looks at some."""

    @override
    def experts(self, x: Tensor, picks: Tensor, weights: Tensor, experts: PackedExperts, limit: float) -> Tensor:
        return torch.zeros(x.shape, dtype=self.wide, device=x.device)

    @override
    def engram_lookup(self, rows: Tensor, table: StoredTable) -> Tensor:
        width = rows.shape[1] * table.data.shape[1]
        return torch.zeros((rows.shape[0], width), dtype=self.dtype, device=rows.device)


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_a_step_takes_nothing_from_the_host(family: str, tmp_path: "Path") -> None:
    device = torch.device("meta")
    one = Tiny(tmp_path / family, family, MetaOps(device, RECORDS))
    cache = KVCache(one.config, one.ops, RECORDS, blocks=40, window_blocks=9, states=4)
    batch = _empty_batch(GraphSize(4, 4, 2048), one.config, 2, device)
    rows = SamplingRows(
        *(torch.zeros(4, dtype=torch.float64, device=device) for _ in range(2)),
        torch.zeros(4, dtype=torch.int64, device=device),
        torch.zeros(4, dtype=torch.float64, device=device),
        *(torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2)),
        filtered=True,
    )
    for watch in (nullcontext(), Elsewhere()):  # constants may be copied once
        with torch.inference_mode(), watch:
            logits = one.model.forward(batch, cache).logits
            bits = torch.zeros((4, -(-logits.shape[1] // 32)), dtype=torch.int32, device=device)
            masked = one.ops.mask_tokens(logits, bits)
            assert one.ops.sample(masked, rows).shape == (4,)


def test_the_watch_sees_what_comes_from_the_host() -> None:
    device = torch.device("meta")
    for take in (
        lambda: torch.ones(3).to(device),
        lambda: torch.empty(3, device=device)[torch.tensor([0, 1])],
        lambda: torch.empty(3, device=device) * torch.tensor(2.0),
    ):
        with pytest.raises(AssertionError, match="of the host"), Elsewhere():
            take()
    with Elsewhere():
        assert torch.where(torch.empty(3, device=device) > 0, 1.0, torch.zeros(3, device=device)).shape == (3,)


def test_the_same_step_twice_copies_nothing_and_gives_the_same(tiny: Callable[[str], Tiny]) -> None:
    one = tiny("deepseek_v41")
    cache = KVCache(one.config, one.ops, FLOAT64, blocks=2, window_blocks=2, states=2)
    runner = GraphRunner(one.model, one.config, cache, Recording(), GraphLimits(2, 1, 512))
    batch = _empty_batch(GraphSize(2, 2, 100), one.config, 1, torch.device("cpu"))
    first = runner.forward(batch, cache).logits.clone()
    assert torch.equal(runner.forward(batch, cache).logits, first)


def test_what_finds_no_memory_for_its_graph_runs_without(tiny: Callable[[str], Tiny]) -> None:
    one = tiny("deepseek_v41")
    asked = prompts(5, [20, 30, 500, 510], max_tokens=15, temperature=0)
    device = Small()
    assert one.run(one.sizes(graphs=True), asked, device, None) == one.run(one.sizes(), asked, CpuAccelerator(), None)
    assert device.recorded == 3
