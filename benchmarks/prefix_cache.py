"""What the prefix cache saves: rows that run, the time to find a prefix, and what the bounded decoder leaves out.

Run as `uv run python benchmarks/prefix_cache.py`; `--wall` also runs the embedded tiny model on the same prompts,
`--decoder` on one cold prompt with the bounded and the full decoder half.  Rows are those that the real scheduler
plans: no model runs for them, because their number does not depend on one.  FLOPs are counted from shapes, at the sizes
of the released V4.1 model.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.plan import Sampled
from deepinfer.engine.prefix_cache import PrefixCache
from deepinfer.engine.request import CacheUse, Request
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Integers, Sequence, SequenceTable, blocks_for
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.read_config import parse_config
from deepinfer.model.tiny import tiny_config

WINDOW, KEPT, STEP_ROWS = 128, 140, 2048
LETTERS = 30, 250
"""Token ids that are letters in the tiny model's vocabulary."""
PRECISION = Precision(torch.float32, round_inputs=False, cache="model")


class Loop:
    """Scheduler and prefix cache of an engine whose model takes no time."""

    def __init__(self, longest: int) -> None:
        model = replace(parse_config(tiny_config("deepseek_v41")), window=WINDOW)
        blocks = 4 * blocks_for(longest)
        self.config = EngineConfig(
            precision=PRECISION,
            decoder_replay=KEPT,
            max_model_len=longest,
            max_num_seqs=2,
            max_num_batched_tokens=STEP_ROWS,
            max_prefill_tokens_per_step=STEP_ROWS,
            overlap=False,
            blocks=blocks,
            window_blocks=blocks_for(STEP_ROWS) + 68,
            seed=0,
            prefix_cache="exact",
            snapshots=64,
        )
        width = self.config.window_width(WINDOW)
        table = SequenceTable(2, history=3, blocks=blocks_for(longest), windows=width)
        ops = CpuAccelerator().ops(PRECISION)
        sizes = {"blocks": blocks, "window_blocks": self.config.window_blocks, "states": 2}
        self.prefixes = PrefixCache(self.config, model, KVCache(model, ops, PRECISION, **sizes), b"benchmark")
        self.scheduler = Scheduler(self.config, WINDOW, table, self.prefixes)
        self._count = 0

    def sequence(self, tokens: Integers) -> Sequence:
        """Return a request that generates one token."""
        self._count += 1
        request = Request(tokens.tolist(), SamplingParams(temperature=0, max_tokens=1))
        start = max(0, len(tokens) - KEPT)
        return Sequence(self._count, request, 0, tokens, start, 1, frozenset({1}), None, None)

    def run(self, tokens: Integers) -> tuple[int, int, CacheUse]:
        """Return rows of the encoder half, rows of the decoder half, and what the cache did."""
        sequence = self.sequence(tokens)
        self.scheduler.submit(sequence)
        encoder = decoder = 0
        while self.scheduler.has_work:
            plan = self.scheduler.schedule(0.0)
            ends = plan.starts + plan.counts
            encoder += int(plan.counts.sum())
            decoder += int(np.maximum(ends - np.maximum(plan.starts, sequence.decoder_start), 0).sum())
            self.scheduler.advance(plan)
            drawn = int(plan.samples.sum())
            self.scheduler.commit(plan, Sampled(np.full(drawn, 7), np.ones(drawn, dtype=np.int64)))
        assert sequence.trail is not None
        assert sequence.trail.use is not None
        return encoder, decoder, sequence.trail.use


def prompts(length: int, shared: float) -> list[tuple[str, Integers]]:
    """Prompts of `length` tokens of which a share has been read before, as a first turn or inside of another prompt."""
    generator = np.random.default_rng(0)
    known = int(length * shared)
    base, ends = generator.integers(*LETTERS, length), generator.integers(*LETTERS, (3, length - known))
    border = known // WINDOW * WINDOW
    turn = np.concatenate([base[:border], generator.integers(*LETTERS, length - border)])
    return [
        ("cold", base[: border + 1]),
        ("next turn, the hit ends on a border", turn),
        ("leaves a known prompt elsewhere", np.concatenate([turn[: known - 4500], ends[0], ends[0], ends[1]])),
        ("the same place again", np.concatenate([turn[: known - 4500], ends[2], ends[2], ends[1]])),
    ]


def rows(length: int, shared: float) -> None:
    """Print how many rows run beside how many must."""
    loop = Loop(length + 256)
    print(f"rows of prompts of about {length} tokens, decoder replay {KEPT}, steps of {STEP_ROWS} rows")
    print(f"{'':<38}{'tokens':>7}{'hit':>7}{'again':>7}{'encoder':>9}{'decoder':>9}{'of needed':>11}{'fewer':>8}")
    for name, tokens in prompts(length, shared):
        encoder, decoder, use = loop.run(tokens)
        needed = len(tokens) - use.hit + use.replayed + KEPT
        counts = f"{len(tokens):>7}{use.hit:>7}{use.replayed:>7}{encoder:>9}{decoder:>9}"
        print(f"{name:<38}{counts}{(encoder + decoder) / needed:>10.3f}x{len(tokens) / encoder:>7.1f}x")


def match(length: int, rounds: int) -> None:
    """Print how long it takes to find a prompt that was read before."""
    loop = Loop(length + 256)
    generator = np.random.default_rng(1)
    base = generator.integers(*LETTERS, length)
    loop.run(base)
    wall, own = [], []
    for _ in range(rounds):
        sequence = loop.sequence(np.concatenate([base[:-1], generator.integers(*LETTERS, 2)]))
        began, used = time.perf_counter_ns(), time.thread_time_ns()
        hit = loop.prefixes.find(sequence)
        own.append((time.thread_time_ns() - used) / 1000)
        wall.append((time.perf_counter_ns() - began) / 1000)
        loop.prefixes.give_back(hit)
    times = f"{statistics.median(wall):.0f} us wall, {statistics.median(own):.0f} own"
    print(f"finding {hit.written} of {length} tokens: {times} (medians of {rounds}; least {min(wall):.0f})")


@dataclass(frozen=True)
class Sizes:
    """What the FLOPs of a prompt follow from.

    Both halves have `layers`; of the encoder's, `sparse` attend to selected entries and `owners` form entries and index
    keys; of the decoder's, one of `indexers` chooses among all entries, the others among `candidates`.
    """

    hidden: int
    heads: int
    head: int
    q_rank: int
    o_rank: int
    groups: int
    experts: int
    picks: int
    width: int
    window: int
    index_heads: int
    index_dim: int
    top: int
    layers: int
    sparse: int
    owners: int
    engram: int
    indexers: int
    candidates: int
    streams: int = 4


RELEASED = Sizes(
    hidden=5120,
    heads=64,
    head=512,
    q_rank=1280,
    o_rank=1024,
    groups=8,
    experts=384,
    picks=6,
    width=2304,
    window=128,
    index_heads=32,
    index_dim=128,
    top=512,
    layers=20,
    sparse=18,
    owners=3,
    engram=2 * 6144 * 25600,
    indexers=5,
    candidates=16384,
)
TINY = Sizes(
    hidden=128,
    heads=4,
    head=64,
    q_rank=64,
    o_rank=32,
    groups=2,
    experts=8,
    picks=2,
    width=64,
    window=32,
    index_heads=4,
    index_dim=64,
    top=16,
    layers=4,
    sparse=2,
    owners=1,
    engram=2 * 6 * 32 * 5 * 128,
    indexers=2,
    candidates=64,
)


def decoder_flops(of: Sizes, length: int) -> tuple[float, float]:
    """Return the FLOPs of a prompt with the bounded and with the full decoder half."""
    linear = of.hidden * of.q_rank + of.q_rank * of.heads * of.head + of.hidden * of.head
    linear += of.heads * of.head * of.o_rank + of.groups * of.o_rank * of.hidden
    ffn = (of.picks + 1) * 3 * of.hidden * of.width + of.hidden * of.experts
    mixing = 2 * (of.streams * of.hidden) * 24
    window, selected = 2 * of.heads * of.head * of.window, 2 * of.heads * of.head * of.top
    visible = lambda ratio: length / ratio / 2  # noqa: E731 - mean entries before a row
    score = lambda entries: of.index_heads * of.index_dim * entries  # noqa: E731
    index = of.hidden * of.index_heads + of.q_rank * of.index_heads * of.index_dim
    base = linear + ffn + mixing + window
    publish = of.hidden * of.head + of.head * of.index_dim
    encoder = of.layers * base + of.sparse * selected + of.engram
    encoder += of.owners * (of.hidden * of.head + publish + index + score(visible(2)))
    decoder = of.layers * (base + selected) + of.indexers * index + score(visible(1))
    decoder += (of.indexers - 1) * score(min(visible(1), of.candidates))
    return 2 * (length * (encoder + publish) + KEPT * decoder), 2 * length * (encoder + publish + decoder)


def tell_decoder_flops(length: int) -> None:
    """Print them at the sizes of the released model."""
    bounded, full = decoder_flops(RELEASED, length)
    print(
        f"{length:>9} tokens: {bounded / length / 1e9:.2f} GF a token with {KEPT} decoder rows, "
        f"{full / length / 1e9:.2f} with all: {bounded / full:.3f}x"
    )


def decoder_time(length: int) -> None:
    """Print what the bounded decoder half of the tiny model saves of the time of a cold prompt, beside its FLOPs."""
    tokens = np.random.default_rng(0).integers(*LETTERS, length).tolist()
    taken: dict[bool, float] = {}
    for replay in (KEPT, "off"):
        sizes = {"max_model_len": length + 256, "max_num_seqs": 2, "max_num_batched_tokens": STEP_ROWS}
        llm = LLM("tiny", accelerator="cpu", decoder_replay=replay, prefix_cache="off", **sizes)
        llm.generate(tokens[:300], SamplingParams(temperature=0, max_tokens=1))
        began, used = time.perf_counter(), time.process_time()
        done = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=1))[0]
        assert done.error is None, done.error
        taken[replay == KEPT] = time.process_time() - used
        wall = time.perf_counter() - began
        print(f"decoder_replay={replay!s:<5}{wall:>8.2f} s wall, {taken[replay == KEPT]:.2f} s of the processor")
    bounded, full = decoder_flops(TINY, length)
    told = f"time {taken[True] / taken[False]:.3f}x, FLOPs {bounded / full:.3f}x"
    print(f"tiny model, cold prompt of {length} tokens, {KEPT} decoder rows of all: {told}")


def wall_time(length: int, shared: float) -> None:
    """Print the time of the same prompts on the tiny model, and of a full decoder half."""
    for replay in (KEPT, "off"):
        llm = LLM("tiny", accelerator="cpu", max_model_len=length + 256, max_num_seqs=2, decoder_replay=replay)
        for name, tokens in prompts(length, shared):
            began = time.perf_counter()
            done = llm.generate(tokens.tolist(), SamplingParams(temperature=0, max_tokens=1))[0]
            assert done.error is None, done.error
            told = "" if done.cache is None else f"{done.cache.computed} rows"
            print(f"decoder_replay={replay!s:<5} {name:<38}{time.perf_counter() - began:>8.2f} s  {told}")


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--shared", type=float, default=0.96)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--wall", action="store_true", help="also run the tiny model, minutes")
    parser.add_argument("--decoder", action="store_true", help="also time a cold prompt of the tiny model, a minute")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows(arguments.length, arguments.shared)
    match(8192, arguments.rounds)
    for length in (32768, 131072, 1048576):
        tell_decoder_flops(length)
    if arguments.decoder:
        decoder_time(arguments.length)
    if arguments.wall:
        wall_time(arguments.length, arguments.shared)


if __name__ == "__main__":
    main()
