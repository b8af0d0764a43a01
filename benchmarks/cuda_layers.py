"""The ops of one layer on an NVIDIA device: checked against the reference, then timed beside their floors and peers.

    python benchmarks/cuda_layers.py [--only experts,linear,mixing,attention,index,cache] [--json rows.json]

Shapes are those of V4.1-Flash.  Weights are random bytes in the checkpoint's formats.  Each row replays a CUDA graph of
several calls whose weights or inputs rotate past the L2 cache, and gives the median of nine replays.  The floor is the
larger of bytes at 4.3 TB/s and multiplications at 1,297 TFLOP/s (FP8), both measured on an H200; peers were measured on
the same kind of card, each the best library for its row.  Nothing is timed before every check has passed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from deepinfer.accelerator.batch import Batch, RecordView, TailView, tail_ring
from deepinfer.accelerator.conformance.inputs import Span, batch_of, records, ropes
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sparse_attention import IndexRequest, KeySources
from deepinfer.accelerator.ops.stream_mixing import MixSettings
from deepinfer.accelerator.parameters import MixParameters, Precision, StoredExpert, StoredWeight
from deepinfer_kernels_cuda.kernels.index import Scored, index_scores
from deepinfer_kernels_cuda.kernels.selection import Rows, select
from deepinfer_kernels_cuda.ops import NvidiaOps

BANDWIDTH, FP8_RATE = 4.3e12, 1.297e15
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, HEADS, HEAD_DIM = 5120, 2304, 384, 6, 64, 512
INDEX_HEADS, INDEX_DIM, PROMPT = 32, 128, 8192
L2_BYTES = 256 << 20
"""More than twice the cache: what rotates is at least so large."""
DEVICE = torch.device("cuda")
PRECISION = Precision(torch.bfloat16, round_inputs=True, cache="records")
LINEAR = {
    "wq_a + wkv": (1792, 5120, 1, {1: 6.9, 32: 7.0, 256: 8.0, 8192: 103.0}),
    "wq_b": (32768, 1280, 1, {1: 13.2, 32: 13.5, 256: 21.3, 8192: 513.0}),
    "wo_a": (8192, 4096, 8, {1: 19.0, 32: 20.0, 256: 27.0, 8192: 766.0}),
    "wo_b": (5120, 8192, 1, {1: 13.5, 32: 13.8, 256: 21.6, 8192: 465.0}),
}
EXPERT_PEERS = {1: 58.0, 32: 1106.0, 128: 2309.0, 256: 2686.0, 8192: 5571.0}
SHARED_PEERS = {1: 14.9, 32: 15.1, 256: 20.0, 8192: 419.0}
MIXING_PEERS = {1: 80.5, 32: 123.0, 256: 268.0, 8192: 4906.0}
ATTENTION_PEERS = {
    512: {1: 12.0, 32: 22.0, 128: 45.0, 256: 87.0},
    0: {1: 10.0, 32: 11.0, 128: 12.5, 256: 25.0},
}
SCORE_PEERS = {
    (1, 8192): 8.9,
    (1, 131072): 76.0,
    (1, 1048576): 532.0,
    (32, 8192): 153.0,
    (32, 65536): 1208.0,
    (128, 16384): 1033.0,
}
"""By rows and entries of each."""
CHOICE_PEERS = {
    (1, 131072, 512): 6.4,
    (1, 1048576, 512): 14.0,
    (32, 65536, 512): 12.0,
    (128, 16384, 512): 6.1,
    (4096, 8192, 512): 74.0,
    (1, 1048576, 2048): 14.0,
    (32, 131072, 2048): 19.0,
}
"""By rows, scores of each and how many are chosen."""


@dataclass(frozen=True)
class Row:
    """One timed op; microseconds."""

    op: str
    tokens: int
    us: float
    floor_us: float
    peer: str
    peer_us: float | None

    def line(self) -> str:
        """One line of the table."""
        peer = "" if self.peer_us is None else f"{self.peer_us:9.1f} {self.us / self.peer_us:6.2f}x  {self.peer}"
        return f"{self.op:32} {self.tokens:6} {self.us:9.1f} {self.floor_us:9.1f} {self.floor_us / self.us:6.2f} {peer}"


def main() -> None:
    """Check, then time, the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sections = [SECTIONS[name] for name in options.only.split(",")]
    ours, reference = NvidiaOps(DEVICE, PRECISION), Ops(DEVICE, PRECISION)
    for section in sections:
        for name, error, bound in section.check(ours, reference):
            print(f"check {name:44} error {error:.2e} of at most {bound:.0e}")
            if not error <= bound:
                sys.exit("a check failed: nothing is timed")
    facts = torch.cuda.get_device_properties(DEVICE)
    print(f"\n{facts.name}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'op':32} {'tokens':>6} {'us':>9} {'floor us':>9} {'share':>6} {'peer us':>9} {'ours':>7}")
    rows = []
    for section in sections:
        for row in section.time(ours):
            rows.append(row)
            print(row.line(), flush=True)
    if options.json:
        said = {"device": facts.name, "torch": torch.__version__, "triton": triton.__version__}
        options.json.write_text(json.dumps(said | {"rows": [asdict(row) for row in rows]}, indent=1))


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, from replays of a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def floor_us(size: float, flops: float = 0.0) -> float:
    """Least time to move `size` bytes and do `flops` operations."""
    return max(size / BANDWIDTH, flops / FP8_RATE) * 1e6


def copies(size: float) -> int:
    """How many sets of `size` bytes rotate."""
    return max(1, min(16, int(L2_BYTES // size) + 1))


def apart(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN does not pass."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def normal(*shape: int) -> Tensor:
    """Random activations."""
    return torch.randn(shape, device=DEVICE).to(torch.bfloat16)


def scales(*shape: int) -> Tensor:
    """Random UE8M0 scales."""
    return torch.randint(117, 121, shape, device=DEVICE, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def fp8(out: int, width: int) -> StoredWeight:
    """A random FP8 weight in blocks of 32."""
    data = (torch.randn(out, width, device=DEVICE) * 4).to(torch.float8_e4m3fn)
    return StoredWeight(data, scales(out // 32, width // 32), 32)


def fp4(out: int, width: int) -> StoredWeight:
    """A random FP4 weight."""
    data = torch.randint(0, 256, (out, width // 2), device=DEVICE, dtype=torch.uint8).view(torch.int8)
    return StoredWeight(data, scales(out, width // 32), 32)


def expert(make: Callable[[int, int], StoredWeight]) -> StoredExpert:
    """One expert whose weights `make` draws."""
    up = (INTERMEDIATE, HIDDEN)
    return StoredExpert(make(*up), make(HIDDEN, INTERMEDIATE), make(*up))


def routing(tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    """Uniform picks and random shares."""
    picks = torch.rand(tokens, experts, device=DEVICE).topk(TOP_K, 1).indices
    return picks, torch.rand(tokens, TOP_K, device=DEVICE)


class Experts:
    """Routed experts with FP4 weights, uniform routing, and the shared expert; the inputs' rounding is included."""

    @staticmethod
    def check(ours: NvidiaOps, reference: Ops) -> Iterator[tuple[str, float, float]]:
        """Errors against the reference."""
        stored = [expert(fp4) for _ in range(16)]
        packed, plain = ours.pack_experts(stored), reference.pack_experts(stored)
        for tokens in (1, 32, 300, 2000):
            x, (picks, shares) = normal(tokens, HIDDEN), routing(tokens, 16)
            got = ours.experts(x, picks, shares, packed, 10.0)
            yield f"experts {tokens}", apart(got, reference.experts(x, picks, shares, plain, 10.0)), 1e-3
        shared = [expert(fp8)]
        packed, plain = ours.pack_experts(shared), reference.pack_experts(shared)
        for tokens in (1, 40, 300, 2000):
            x = normal(tokens, HIDDEN)
            got = ours.shared_expert(x, packed, 10.0)
            yield f"shared_expert {tokens}", apart(got, reference.shared_expert(x, plain, 10.0)), 1e-3

    @staticmethod
    def time(ours: NvidiaOps) -> Iterator[Row]:
        """The rows of the table."""
        packed = ours.pack_experts([expert(fp4) for _ in range(EXPERTS)])
        size = 3 * HIDDEN * INTERMEDIATE * (0.5 + 1 / 32)
        for tokens, peer_us in EXPERT_PEERS.items():
            sets = [(normal(tokens, HIDDEN), *routing(tokens, EXPERTS)) for _ in range(16 if tokens == 1 else 4)]
            distinct = statistics.mean(picks.unique().numel() for _, picks, _ in sets)
            us = graph_us([lambda s=s: ours.experts(*s, packed, 10.0) for s in sets])
            floor = floor_us(distinct * size, 6.0 * tokens * TOP_K * HIDDEN * INTERMEDIATE)
            peer = "Marlin" if tokens < 8192 else "torch grouped fp8"
            yield Row("experts (w13 + w2)", tokens, us, floor, peer, peer_us)
        size = 3 * HIDDEN * INTERMEDIATE
        shared = [ours.pack_experts([expert(fp8)]) for _ in range(copies(size))]
        for tokens, peer_us in SHARED_PEERS.items():
            x = normal(tokens, HIDDEN)
            us = graph_us([lambda p=p, x=x: ours.shared_expert(x, p, 10.0) for p in shared])
            yield Row("shared_expert", tokens, us, floor_us(size, 2.0 * tokens * size), "cuBLAS fp8", peer_us)


class Linear:
    """FP8 linear layers in blocks of 32; rounding of the inputs is included, for peers it is not."""

    @staticmethod
    def check(ours: NvidiaOps, reference: Ops) -> Iterator[tuple[str, float, float]]:
        """Errors against the reference."""
        for name, (out, width, groups, _) in LINEAR.items():
            weight = fp8(out, width)
            for tokens in (1, 40, 300, 1500):
                x = normal(tokens, groups * width)
                got, want = (Linear.run(ops, Linear.pack(ops, weight, groups), x, groups) for ops in (ours, reference))
                yield f"{name} {tokens}", apart(got, want), 2e-3

    @staticmethod
    def pack(ops: Ops, weight: StoredWeight, groups: int) -> object:
        """Make the weight ready for `run`."""
        return ops.pack_linear(weight) if groups == 1 else ops.pack_grouped(weight, groups)

    @staticmethod
    def run(ops: Ops, packed: object, x: Tensor, groups: int) -> Tensor:
        """Run the op once."""
        return ops.linear(x, packed) if groups == 1 else ops.grouped_linear(x.unflatten(1, (groups, -1)), packed)

    @staticmethod
    def time(ours: NvidiaOps) -> Iterator[Row]:
        """The rows of the table."""
        for name, (out, width, groups, peers) in LINEAR.items():
            packed = [Linear.pack(ours, fp8(out, width), groups) for _ in range(copies(out * width))]
            for tokens, peer_us in peers.items():
                x = normal(tokens, groups * width)
                us = graph_us([lambda p=p, x=x, g=groups: Linear.run(ours, p, x, g) for p in packed])
                moved = out * width + 2 * tokens * (groups * width + out)
                peer = "cuBLAS bf16" if groups > 1 else "cuBLAS fp8"
                yield Row(name, tokens, us, floor_us(moved, 2.0 * tokens * out * width), peer, peer_us)


class Mixing:
    """One sub-layer's hyper-connection: `mix_in` and `mix_out`."""

    settings = MixSettings(20, 1e-6, 1e-20)

    @staticmethod
    def inputs(tokens: int) -> tuple[Tensor, Tensor, MixParameters, Tensor, Tensor]:
        """Random inputs of one sub-layer."""
        fn, base, scale = torch.randn(24, 4 * HIDDEN, device=DEVICE) / 143, torch.randn(24), torch.rand(3)
        parameters = MixParameters(fn, base.to(DEVICE), scale.to(DEVICE))
        norm, incoming = torch.rand(HIDDEN, device=DEVICE), torch.rand(tokens, 4, device=DEVICE)
        return normal(tokens, 4, HIDDEN), incoming, parameters, norm, normal(tokens, HIDDEN)

    @staticmethod
    def run(ops: Ops, given: tuple[Tensor, Tensor, MixParameters, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Run the op once."""
        streams, incoming, parameters, norm, y = given
        x, mix = ops.mix_in(streams, incoming, parameters, Mixing.settings, norm)
        return x, mix.comb, ops.mix_out(streams, y, mix)

    @staticmethod
    def check(ours: NvidiaOps, reference: Ops) -> Iterator[tuple[str, float, float]]:
        """Errors against the reference."""
        for tokens in (1, 40, 700):
            given = Mixing.inputs(tokens)
            results = zip(("x", "comb", "streams"), Mixing.run(ours, given), Mixing.run(reference, given), strict=True)
            for name, got, want in results:
                yield f"mixing {tokens} {name}", apart(got, want), 1e-5 if name == "comb" else 2e-3

    @staticmethod
    def time(ours: NvidiaOps) -> Iterator[Row]:
        """The rows of the table."""
        for tokens, peer_us in MIXING_PEERS.items():
            moved = tokens * HIDDEN * 2 * 14 + 24 * 4 * HIDDEN * 4
            sets = [Mixing.inputs(tokens) for _ in range(copies(moved))]
            us = graph_us([lambda s=s: Mixing.run(ours, s) for s in sets])
            yield Row("mix_in + mix_out", tokens, us, floor_us(moved), "torch.compile", peer_us)


class Attention:
    """Decode steps at 1,024 tokens of context: the window of 128 and, for rows with entries, 512 selected ones."""

    @staticmethod
    def step(ops: Ops, rows: int, entries: int, seed: int) -> Callable[[], Tensor]:
        """One decode step, ready to run."""
        torch.manual_seed(seed)
        batch = batch_of(ops, [Span(300, 301)] * rows)
        rope = ropes(ops, 64)[1]
        batch = ops.prepare(batch, 128, ropes(ops, 64), ())
        window, pool = (ops.new_records(kind, 384 * rows, HEAD_DIM, 64) for kind in ("fp8_group32", "fp4_group16"))
        for memory, codes in ((window, HEAD_DIM), (pool, HEAD_DIM // 2)):
            memory[:, :codes] = torch.randint(0, 120, (memory.shape[0], codes), device=DEVICE, dtype=torch.uint8)
            memory[:, codes:] = 118 if memory is window else 40
        views = [records(ops, kind, HEAD_DIM, 64) for kind in ("fp8_group32", "fp4_group16")]
        window_view, pool_view = (
            type(v)(m, v.format, v.width, v.rope) for v, m in zip(views, (window, pool), strict=True)
        )
        chosen = torch.rand(rows, 301, device=DEVICE).argsort(1).repeat(1, 2)[:, :entries]
        selection = ops.selection(batch, chosen, 1) if entries else None
        keys = KeySources(window_view, pool_view if entries else None, selection, False)
        q, sink = normal(rows, HEADS, HEAD_DIM), torch.randn(HEADS, device=DEVICE)
        return lambda: ops.attention(q, keys, sink, batch, rope)

    @staticmethod
    def check(ours: NvidiaOps, reference: Ops) -> Iterator[tuple[str, float, float]]:
        """Errors against the reference."""
        for entries in (0, 512):
            for rows in (1, 30, 60, 200):
                got, want = (Attention.step(ops, rows, entries, 7)() for ops in (ours, reference))
                yield f"attention {rows} rows, {entries} entries", apart(got, want), 5e-3

    @staticmethod
    def time(ours: NvidiaOps) -> Iterator[Row]:
        """The rows of the table."""
        for entries, peers in ATTENTION_PEERS.items():
            for rows, peer_us in peers.items():
                moved = rows * (128 * 528 + entries * 288 + 4 * HEADS * HEAD_DIM)
                steps = [Attention.step(ours, rows, entries, seed) for seed in range(min(8, copies(moved)))]
                yield Row(
                    f"attention, 128 + {entries} keys", rows, graph_us(steps), floor_us(moved), "FlashMLA", peer_us
                )


class Index:
    """Decode rows that see `entries` entries of 68 bytes: scores alone, the choice alone, and the whole op."""

    @staticmethod
    def step(ops: Ops, rows: int, entries: int, seed: int) -> tuple[Batch, IndexRequest]:
        """One decode step at ratio 1 with random keys, and what an index source asks."""
        torch.manual_seed(seed)
        blocks = entries // 128
        memory = ops.new_records("fp4_group32", rows * entries, INDEX_DIM, 64)
        memory[:, :64] = torch.randint(0, 256, (memory.shape[0], 64), device=DEVICE, dtype=torch.uint8)
        memory[:, 64:] = torch.randint(120, 124, (memory.shape[0], 4), device=DEVICE, dtype=torch.uint8)
        batch = replace(
            batch_of(ops, [Span(300, 301)] * rows),
            positions=torch.full((rows,), entries - 1, device=DEVICE),
            block_tables=torch.randperm(rows * blocks, device=DEVICE).view(rows, blocks),
            max_context=entries,
        )
        view = RecordView(memory, "fp4_group32", INDEX_DIM, 64)
        weights = torch.randn(rows, INDEX_HEADS, device=DEVICE)
        query = normal(rows, INDEX_HEADS, INDEX_DIM)
        request = IndexRequest(query, weights, view, ropes(ops, 64)[1], 1, 512, 8)
        return ops.prepare(batch, 128, ropes(ops, 64), ()), request

    @staticmethod
    def check(ours: NvidiaOps, reference: Ops) -> Iterator[tuple[str, float, float]]:
        """Share of chosen entries that the reference does not choose: sums in another order may swap neighbours."""
        for rows, entries in ((1, 1024), (30, 4096), (3, 65536)):
            chosen = []
            for ops in (ours, reference):
                batch, request = Index.step(ops, rows, entries, 7)
                marks = torch.zeros(rows, entries, dtype=torch.bool, device=DEVICE)
                chosen.append(marks.scatter_(1, ops.select_entries(request, batch)[0].entries, True))
            yield f"index {rows} rows, {entries} entries", float((chosen[0] != chosen[1]).sum()) / (rows * 512), 1e-2

    @staticmethod
    def time(ours: NvidiaOps) -> Iterator[Row]:
        """The rows of the table."""
        for (rows, entries), peer_us in SCORE_PEERS.items():
            moved = rows * entries * (68 + 4)
            steps = [Index.step(ours, rows, entries, seed) for seed in range(copies(moved))]
            given = [(request.query, Index.scored(request, batch)) for batch, request in steps]
            us = graph_us([lambda g=g: index_scores(*g) for g in given])
            yield Row(
                f"index scores of {entries}", rows, us, floor_us(moved, 2.0 * rows * entries * 4096), "SGLang", peer_us
            )
            us = graph_us([lambda s=s: ours.select_entries(s[1], s[0]) for s in steps])
            yield Row(f"select_entries of {entries}", rows, us, floor_us(moved), "", None)
        batch, request = Index.step(ours, 1, PROMPT, 0)
        request = replace(request, query=normal(PROMPT, INDEX_HEADS, INDEX_DIM))
        request = replace(request, weights=torch.randn(PROMPT, INDEX_HEADS, device=DEVICE))
        numbers = torch.arange(PROMPT, device=DEVICE)
        bare = replace(batch, positions=numbers, sequences=torch.zeros_like(numbers))
        batch = ours.prepare(bare, 128, ropes(ours, 64), ())
        us = graph_us([lambda: index_scores(request.query, Index.scored(request, batch))])
        yield Row("index scores of a prompt", PROMPT, us, floor_us(4 * PROMPT**2 / 2, PROMPT**2 * 4096), "", None)
        us = graph_us([lambda: ours.select_entries(request, batch)])
        yield Row("select_entries of a prompt", PROMPT, us, floor_us(4 * PROMPT**2 / 2, PROMPT**2 * 4096), "", None)
        for (rows, entries, most), peer_us in CHOICE_PEERS.items():
            sets = [torch.randn(rows, entries, device=DEVICE) for _ in range(min(4, copies(4 * rows * entries)))]
            numbers = torch.arange(rows, device=DEVICE)
            tables = torch.zeros(rows, entries // 128, dtype=torch.int64, device=DEVICE)
            where = Rows(torch.full_like(numbers, entries - 1), numbers, tables, 1)
            us = graph_us([lambda s=s, w=where, e=entries, m=most: select(s, None, w, e, m) for s in sets])
            yield Row(
                f"best {most} of {entries}", rows, us, floor_us(4 * rows * entries), "DeepSelect, SGLang", peer_us
            )

    @staticmethod
    def scored(request: IndexRequest, batch: Batch) -> Scored:
        """What `index_scores` takes."""
        memory = (request.keys.data, batch.block_tables, batch.sequences, batch.positions)
        return Scored(request.weights, *memory, 1, batch.max_context, None, 8)


class Cache:
    """What a step writes: prepared tables, window KV, and entries with their index keys of a compressor of ratio 2."""

    @staticmethod
    def step(ops: Ops, rows: int, seed: int) -> dict[str, Callable[[], object]]:
        """One decode step whose rows each end a group, by op."""
        torch.manual_seed(seed)
        bare, turning = batch_of(ops, [Span(301, 302)] * rows, (2,)), ropes(ops, 64)
        batch = ops.prepare(bare, 128, turning, ())
        rope, norm = turning[1], torch.rand(HEAD_DIM, device=DEVICE)
        kinds = (("fp8_group32", HEAD_DIM), ("fp4_group16", HEAD_DIM), ("fp4_group32", INDEX_DIM))
        window, entries, keys = (
            RecordView(ops.new_records(kind, 384 * rows, width, 64), kind, width, 64) for kind, width in kinds
        )
        tail = TailView(*(torch.zeros(rows + 1, tail_ring(2), HEAD_DIM, device=DEVICE) for _ in range(2)))
        projected, kv = torch.randn(rows, 2 * HEAD_DIM, device=DEVICE), normal(rows, HEAD_DIM)
        latents, thin = normal(rows + 1, HEAD_DIM), normal(rows + 1, INDEX_DIM)
        return {
            "prepare": lambda: ops.prepare(bare, 128, turning, ()),
            "write_window": lambda: ops.write_window(kv, norm, 1e-20, batch, rope, window),
            "compress": lambda: ops.compress(projected, None, batch, 2, tail),
            "write_entries, 288 bytes": lambda: ops.write_entries(latents, batch, 2, rope, entries),
            "write_entries, 68 bytes": lambda: ops.write_entries(thin, batch, 2, rope, keys),
        }

    @staticmethod
    def check(ours: NvidiaOps, reference: Ops) -> Iterator[tuple[str, float, float]]:
        """The conformance suite holds every byte; here nothing is left to check."""
        yield from ()

    @staticmethod
    def time(ours: NvidiaOps) -> Iterator[Row]:
        """The rows of the table."""
        per_row = {
            "prepare": 3 * 128 * 8,
            "write_window": HEAD_DIM * 2 + 528,
            "compress": 4 * HEAD_DIM * 4,
            "write_entries, 288 bytes": HEAD_DIM * 2 + 288,
            "write_entries, 68 bytes": INDEX_DIM * 2 + 68,
        }
        for rows in (1, 32, 256):
            for name, call in Cache.step(ours, rows, 0).items():
                yield Row(name, rows, graph_us([call] * 8), floor_us(rows * per_row[name]), "", None)


SECTIONS = {
    "experts": Experts,
    "linear": Linear,
    "mixing": Mixing,
    "attention": Attention,
    "index": Index,
    "cache": Cache,
}

if __name__ == "__main__":
    main()
