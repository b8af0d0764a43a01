"""What `h200.py` measures: the check against the reference, and the sections that are timed."""

import gc
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from h200_steps import Clock, draft_step, fill_cache, step_of
from random_model import make_config, make_model, shortened
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.registry import open_accelerator
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.graph_runner import GraphLimits, GraphRunner
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.draft import DraftStages
from deepinfer.model.kv_cache import KVCache

PRECISION = Precision(torch.bfloat16, round_inputs=True, cache="records")
DECODE_FLOOR_MS = {1: 1.10, 32: 8.86, 128: 18.7, 256: 21.7}
PREFILL_FLOOR_MS = {8192: 78.5}
READS_BYTES = 4.3e12
REPETITIONS = 9
MOST_APART = 0.1
"""Rms of log-probabilities from the reference's, in their standard deviations: random weights carry every rounding to
FP8 or FP4 that falls to the other side through to the end."""
CHECKED_TOKENS = 16
VERIFIED = 6
"""Rows of a sequence that verifies five drafts."""


@dataclass(frozen=True)
class Sizes:
    """What is measured of one configuration; `checked` is the one that the reference is run on beside."""

    name: str
    checked: str
    batches: tuple[int, ...]
    context: int
    prompts: tuple[int, ...]
    drafting: tuple[int, ...]
    short: int


@dataclass(frozen=True)
class Row:
    """One number; `bytes` are those that a floor counts, `tokens` the rows of the step."""

    section: str
    name: str
    value: float
    unit: str = "ms"
    floor: float | None = None
    tokens: int = 0
    bytes: float = 0.0

    @property
    def share(self) -> float | None:
        """Floor over measured."""
        return None if self.floor is None else self.floor / self.value

    def line(self) -> str:
        """One line of text."""
        floor = "" if self.floor is None else f"   floor {self.floor:9.3f}   share {self.floor / self.value:.2f}"
        return f"{self.section + ': ' + self.name:58} {self.value:11.3f} {self.unit}{floor}"

    def markdown(self) -> str:
        """One line of the table."""
        floor, share = ("", "") if self.floor is None else (f"{self.floor:.3f}", f"{self.floor / self.value:.2f}")
        return f"| {self.section}: {self.name} | {self.value:.3f} {self.unit} | {floor} | {share} |"


@dataclass
class Bench:
    """What sections share."""

    sizes: Sizes
    accelerator_name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accelerator: Accelerator = open_accelerator(self.accelerator_name)
        self.clock = Clock(self.accelerator.device)
        self.marks: list[tuple[object, object]] = []
        self._mark_replays()
        self.ops = self.accelerator.ops(PRECISION)
        self.config = make_config(self.sizes.name)
        self.model: DeepSeek
        self.stages: DraftStages | None = None

    def wait(self) -> None:
        """Wait for the device."""
        self.clock.wait()

    def release(self) -> None:
        """Give memory back that nobody holds; engines and models refer to one another in circles."""
        self.marks.clear()
        gc.collect()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        free, total = self.accelerator.memory()
        print(f"-- memory: {free / 1e9:.1f} of {total / 1e9:.1f} GB free", flush=True)

    def add(self, section: str, name: str, value: float, **more: object) -> None:
        """Add a row."""
        self.rows.append(Row(section, name, value, **more))  # type: ignore[arg-type]

    def engine(self, model: DeepSeek, ops: Ops, **changes: object) -> Engine:
        """An engine that runs whole models, with every row in the decoder half."""
        longest = 2 * max(self.sizes.prompts)
        config = EngineConfig(
            precision=PRECISION,
            decoder_replay=None,
            max_model_len=longest,
            max_num_seqs=32,
            max_num_batched_tokens=8192,
            max_prefill_tokens_per_step=8192,
            overlap=self.accelerator.device.type != "cpu",
            blocks=max(2 * longest // 128, 32 * 8),
            window_blocks=512,
            seed=0,
            graphs=True,
        )
        return Engine(replace(config, **changes), model.config, model, ops, self.accelerator, None)  # type: ignore[arg-type]

    def runner(self, model: DeepSeek, cache: KVCache) -> GraphRunner:
        """Graphs of a model, recorded as they are asked for."""
        limits = GraphLimits(max(self.sizes.batches), VERIFIED, 2 * self.sizes.context)
        return GraphRunner(model, model.config, cache, self.accelerator, limits)

    def median_ms(self, run: Callable[[], object]) -> float:
        """Median of the device's time for `run`, warm."""
        run()
        times = []
        for _ in range(REPETITIONS):
            begin = self.clock.mark()
            run()
            end = self.clock.mark()
            self.wait()
            times.append(self.clock.between(begin, end))
        return statistics.median(times)

    def _mark_replays(self) -> None:
        """Note when each replay begins and ends; on the host a graph is a call."""
        accelerator, record = self.accelerator, self.accelerator.capture

        def capture(run: Callable[[], None]) -> Callable[[], None]:
            try:
                replay = record(run) or run
            except Exception:
                traceback.print_exc(limit=-6)
                raise

            def marked() -> None:
                begin = self.clock.mark()
                replay()
                self.marks.append((begin, self.clock.mark()))

            return marked

        accelerator.capture = capture  # type: ignore[method-assign]
        accelerator.graphs = True


def requests(lengths: Sequence[int], vocabulary: int, seed: int = 0, **params: object) -> list[Request]:
    """Prompts of random tokens."""
    generator = np.random.default_rng(seed)
    chosen = SamplingParams(temperature=0, ignore_eos=True, **params)  # type: ignore[arg-type]
    return [Request(generator.integers(vocabulary // 8, vocabulary // 2, n).tolist(), chosen) for n in lengths]


def answers(engine: Engine, asked: Sequence[Request]) -> list[tuple[list[int], list[Tensor]]]:
    """Tokens and log-probabilities of each request."""
    numbers = [engine.add(request) for request in asked]
    gained: dict[int, tuple[list[int], list[Tensor]]] = {number: ([], []) for number in numbers}
    while engine.has_work:
        for part in engine.step():
            if part.error is not None:
                sys.exit(f"a request failed: {part.error}")
            gained[part.request_id][0].extend(part.token_ids)
            if isinstance(part.logprobs, Tensor):
                gained[part.request_id][1].append(part.logprobs)
    return [gained[number] for number in numbers]


def gate(bench: Bench) -> None:
    """Hold graphs and kernels on a few layers against the reference ops, step by step, on the same weights."""
    config = make_config(bench.sizes.checked)
    asked = requests([9, 140, 600], config.vocab_size, max_tokens=CHECKED_TOKENS, logprobs=-1)
    model, _ = make_model(config, bench.ops, bench.accelerator, drafts=False)
    ours = answers(bench.engine(model, bench.ops, max_num_seqs=4), asked)
    eager = answers(bench.engine(model, bench.ops, max_num_seqs=4, graphs=False), asked)
    del model
    bench.release()
    plain = Ops(bench.accelerator.device, PRECISION)
    model, _ = make_model(config, plain, bench.accelerator, drafts=False)
    reference = answers(bench.engine(model, plain, max_num_seqs=4, graphs=False), asked)
    for name, other in (("steps without graphs", eager), ("the reference", reference)):
        equal, rms, told = compare(ours, other)
        said = f"{bench.sizes.checked}: {equal} of {len(asked)} texts of {CHECKED_TOKENS} tokens equal {name}'s, first "
        said += f"log-probabilities {rms:.4f} of their spread apart{told}"
        print(said, flush=True)
        bench.notes.append(said)
        if not rms <= MOST_APART:
            sys.exit(f"the check failed: at most {MOST_APART} is allowed; nothing is timed")
    del model
    bench.release()


def compare(
    ours: list[tuple[list[int], list[Tensor]]], other: list[tuple[list[int], list[Tensor]]]
) -> tuple[int, float, str]:
    """Equal texts, rms of the first log-probabilities over their spread, and where texts part, by how little."""
    equal, squares, told = 0, [], []
    for text, ((tokens, rows), (wanted, wanted_rows)) in enumerate(zip(ours, other, strict=True)):
        first = wanted_rows[0].double()
        squares.append((rows[0].double() - first).square().mean() / first.var())
        parted = next((at for at, pair in enumerate(zip(tokens, wanted, strict=True)) if pair[0] != pair[1]), None)
        if parted is None:
            equal += 1
            continue
        row = torch.cat([one.reshape(-1, one.shape[-1]) for one in wanted_rows])[parted]
        gap = float(row[wanted[parted]] - row[tokens[parted]])
        told.append(f"text {text} parts at token {parted}, {gap:.4f} between the two")
    return equal, float(torch.stack(squares).mean().sqrt()), "".join(f"; {one}" for one in told)


def decode(bench: Bench) -> Iterator[None]:
    """One step of each batch from its graph, weights and cache read once; and without the layers' fixed costs."""
    most, sizes = max(bench.sizes.batches), bench.sizes
    blocks = -(-sizes.context // 128)
    cache = KVCache(
        bench.config, bench.ops, PRECISION, blocks=most * blocks, window_blocks=3 * most, states=most
    )  # fmt: skip
    fill_cache(cache)
    runner, short = bench.runner(bench.model, cache), bench.runner(shortened(bench.model, sizes.short), cache)
    layers = len(bench.config.layers)
    for count in sizes.batches:
        batch = step_of(bench.config, count, 1, sizes.context, bench.accelerator.device)
        begin = time.perf_counter()
        runner.forward(batch, cache)
        bench.wait()
        recording = time.perf_counter() - begin
        whole = bench.median_ms(lambda b=batch: runner.forward(b, cache))
        floor = DECODE_FLOOR_MS.get(count) if sizes.name == "x12" else None
        moved = (floor or 0.0) / 1e3 * READS_BYTES
        name = f"batch {count}, {sizes.context} tokens of context"
        bench.add("decode", name, whole, floor=floor, tokens=count, bytes=moved)
        yield
        part = bench.median_ms(lambda b=batch: short.forward(b, cache))
        bench.add("decode", f"batch {count}, one layer more", (whole - part) / (layers - sizes.short))
        yield
        bench.add("decode", f"batch {count}, recording its graph", recording, unit="s")
        yield
        logits = runner.forward(batch, cache).logits
        best = bench.median_ms(lambda rows=logits: bench.ops.greedy(rows))
        bench.add("decode", f"batch {count}, the best token of each row", best)
        yield


def gap(bench: Bench) -> Iterator[None]:
    """Device time between two graphs of an engine that decodes: sampling, copies, and what the host leaves idle."""
    engine = bench.engine(bench.model, bench.ops, prefix_cache="off", max_model_len=2048, graphs=True)
    for count in (1, min(32, max(bench.sizes.batches))):
        for request in requests([100] * count, bench.config.vocab_size, count, max_tokens=48):
            engine.add(request)
        bench.marks.clear()
        while engine.has_work:
            engine.step()
        bench.wait()
        last = bench.marks[-32:]
        idle = [bench.clock.between(before[1], after[0]) for before, after in itertools.pairwise(last)]
        busy = [bench.clock.between(*mark) for mark in last]
        bench.add("engine", f"between two graphs, {count} sequences", 1e3 * statistics.median(idle), unit="us")
        yield
        bench.add("engine", f"graph of {count} sequences, 100 to 148 tokens", statistics.median(busy))
        yield


def prefill(bench: Bench) -> Iterator[None]:
    """Time to the first token of one prompt, every row through the whole model."""
    engine = bench.engine(bench.model, bench.ops, prefix_cache="off", graphs=False)
    for tokens in bench.sizes.prompts:
        times = [first_token(bench, engine, requests([tokens], bench.config.vocab_size, seed)[0]) for seed in range(3)]
        floor = PREFILL_FLOOR_MS.get(tokens) if bench.sizes.name == "x12" else None
        taken = statistics.median(times[1:])
        moved = 0.0 if floor is None else 12 * 7.39e9 + 2.6e9
        bench.add("prefill", f"{tokens} tokens", taken, floor=floor, tokens=tokens, bytes=moved)
        yield
        bench.add("prefill", f"{tokens} tokens, rate", tokens / taken, unit="k tok/s")
        yield


def first_token(bench: Bench, engine: Engine, request: Request) -> float:
    """Milliseconds from a request to its first token."""
    begin = time.perf_counter()
    engine.add(replace(request, params=replace(request.params, max_tokens=1)))
    while engine.has_work:
        engine.step()
    bench.wait()
    return 1e3 * (time.perf_counter() - begin)


def prefix(bench: Bench) -> Iterator[None]:
    """A prompt whose beginning is known, beside the same prompt cold."""
    length = bench.sizes.prompts[-2]
    engine = bench.engine(bench.model, bench.ops, prefix_cache="exact", snapshots=16, graphs=False)
    warm = bench.engine(bench.model, bench.ops, prefix_cache="off", graphs=False)
    base = requests([length], bench.config.vocab_size, 9)[0]
    first_token(bench, engine, base)
    ends = requests([64] * 3, bench.config.vocab_size, 10)
    asked = [replace(base, prompt_token_ids=[*base.prompt_token_ids, *end.prompt_token_ids]) for end in ends]
    hit = statistics.median([first_token(bench, engine, request) for request in asked][1:])
    cold = statistics.median([first_token(bench, warm, request) for request in asked][1:])
    bench.add("prefix cache", f"first token, {length} known and 64 new", hit)
    yield
    bench.add("prefix cache", f"first token, {length + 64} new", cold)
    yield


def drafts(bench: Bench) -> Iterator[None]:
    """A step that verifies five drafts a sequence, one of the draft stages, and the tokens a second that they give."""
    assert bench.stages is not None
    sizes, most = bench.sizes, max(bench.sizes.drafting)
    blocks = -(-sizes.context // 128)
    cache = KVCache(
        bench.config, bench.ops, PRECISION, blocks=most * blocks, window_blocks=3 * most, states=most
    )  # fmt: skip
    fill_cache(cache)
    runner = bench.runner(bench.model, cache)
    for count in sizes.drafting:
        batch = step_of(bench.config, count, VERIFIED, sizes.context, bench.accelerator.device)
        one = step_of(bench.config, count, 1, sizes.context, bench.accelerator.device)
        verify, plain = (bench.median_ms(lambda b=b: runner.forward(b, cache)) for b in (batch, one))
        block = draft_step(bench.config, count, sizes.context, bench.accelerator.device)
        replay = bench.accelerator.capture(lambda b=block, s=bench.stages: s.forward(b, cache) and None)
        assert replay is not None
        draft = bench.median_ms(replay)
        for name, value in (("verify five drafts", verify), ("plain step", plain), ("draft a block", draft)):
            bench.add("drafts", f"{count} sequences, {name}", value)
            yield
        for accepted in (1, 3, 5):
            gain = (1 + accepted) * plain / (verify + draft)
            bench.add("drafts", f"{count} sequences, {accepted} of 5 accepted", gain, unit="x of plain")
            yield


def where(bench: Bench) -> Iterator[None]:
    """Device time by kernel of one decoding step of 32 sequences, from torch's profiler."""
    sizes, count = bench.sizes, min(32, max(bench.sizes.batches))
    blocks = -(-sizes.context // 128)
    cache = KVCache(bench.config, bench.ops, PRECISION, blocks=count * blocks, window_blocks=3 * count, states=count)
    fill_cache(cache)
    batch = step_of(bench.config, count, 1, sizes.context, bench.accelerator.device)
    runner = bench.runner(bench.model, cache)
    runner.forward(batch, cache)
    bench.wait()
    cuda = bench.accelerator.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        runner.forward(batch, cache)
        bench.wait()
    events = profile.key_averages()
    taken = [(one.self_device_time_total if cuda else one.self_cpu_time_total, one.count, one.key) for one in events]
    total = sum(time for time, _, _ in taken)
    bench.add("kernels", f"batch {count}, all of {sum(number for _, number, _ in taken)} kernels", total / 1e3)
    yield
    for time_us, number, name in sorted(taken, reverse=True)[:24]:
        bench.add("kernels", f"{name[:60]} x {number}", time_us / 1e3)
        yield


SECTIONS: dict[str, Callable[[Bench], Iterator[None]]] = {
    "decode": decode,
    "where": where,
    "gap": gap,
    "prefill": prefill,
    "prefix": prefix,
    "drafts": drafts,
}
