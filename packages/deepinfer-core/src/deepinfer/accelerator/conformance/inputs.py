"""Random inputs of the conformance cases: tensors, stored weights and batches, fixed by a seed and made on the CPU.

What ops take in the activation dtype is exact in bfloat16, so that every precision starts from the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import BLOCK_TOKENS, Batch, Groups, RecordFormat, RecordView, Rope, TailView, tail_ring
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.parameters import StoredWeight


@dataclass(frozen=True)
class Shapes:
    """Sizes of one model; hidden size, heads and experts are cut down, only the time of a test depends on them."""

    name: str
    hidden: int
    heads: int
    head_dim: int
    rope: int
    window: int
    index_heads: int
    index_dim: int
    intermediate: int
    experts: int
    top_k: int
    q_rank: int
    fp8_block: int


TINY = Shapes("tiny", 64, 4, 32, 8, 16, 2, 32, 64, 8, 2, 32, 32)
RELEASED = Shapes("released", 1024, 8, 512, 64, 128, 8, 128, 512, 8, 6, 256, 32)
V4 = Shapes("v4", 1024, 8, 512, 64, 128, 8, 128, 512, 8, 6, 256, 128)
ALL_SHAPES = (TINY, RELEASED, V4)


def distinct(sizes: Sequence[Shapes]) -> list[Shapes]:
    """Return the shapes without those that differ from an earlier one only in how weights are stored."""
    kept: list[Shapes] = []
    for shapes in sizes:
        if not any(replace(shapes, name=other.name, fp8_block=other.fp8_block) == other for other in kept):
            kept.append(shapes)
    return kept


class Draw:
    """A seeded source of tensors on the CPU."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def wide(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal float32 numbers."""
        return torch.randn(shape, generator=self._generator) * scale

    def plain(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal float32 numbers that are exact in bfloat16."""
        return self.wide(*shape, scale=scale).to(torch.bfloat16).to(torch.float32)

    def signs(self, *shape: int) -> Tensor:
        """Draw 1 and -1, float32: their mean square is exactly 1."""
        return self.integers(2, *shape).to(torch.float32) * 2 - 1

    def integers(self, bound: int, *shape: int) -> Tensor:
        """Draw int64 numbers 0 .. bound - 1."""
        return torch.randint(bound, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        """Draw an order of 0 .. count - 1."""
        return torch.randperm(count, generator=self._generator)

    def scales(self, *shape: int) -> Tensor:
        """Draw float8_e8m0fnu scales 2^-8 .. 2^-5."""
        return (self.integers(4, *shape) + 119).to(torch.uint8).view(torch.float8_e8m0fnu)

    def weight(self, kind: str, out: int, width: int, block: int) -> StoredWeight:
        """Draw a weight [out, width] stored as "plain", "fp8" (scale per block x block) or "fp4" (scale per 32)."""
        if kind == "plain":
            return StoredWeight(self.plain(out, width, scale=width**-0.5).to(torch.bfloat16))
        if kind == "fp8":
            data = self.wide(out, width, scale=4.0).to(torch.float8_e4m3fn)
            return StoredWeight(data, self.scales(-(-out // block), -(-width // block)), block)
        data = self.integers(256, out, width // 2).to(torch.uint8).view(torch.int8)
        return StoredWeight(data, self.scales(out, width // 32), 32)


@dataclass(frozen=True)
class Span:
    """Rows start .. end - 1 of a sequence in one step; its decoder half begins at `decoder_start`.

    Its rows see no window before `window_start`, and entries of tokens before `written` are there already.
    """

    start: int
    end: int
    decoder_start: int = 0
    window_start: int = 0
    written: int = 0


SPANS = (Span(0, 9), Span(300, 301), Span(120, 141, 130))
"""One step: a short prompt, a decoding sequence, a chunk across a block border whose last rows run the decoder half."""

NEXT_SPANS = tuple(Span(span.end, span.end + 1, span.decoder_start) for span in SPANS)
"""The step after `SPANS`: one row of each sequence, as in decoding."""

VERIFY_SPANS = tuple(Span(span.end + 1, span.end + 7, span.decoder_start) for span in SPANS)
RETAKEN_SPANS = tuple(Span(span.end + 3, span.end + 9, span.decoder_start) for span in SPANS)
"""The steps after `NEXT_SPANS`: six rows verify drafts, only two are kept, and the next step takes the rest again."""

RESUMED_SPANS = (Span(0, 9), Span(300, 301, 0, 290), Span(120, 141, 130, 122, 136))
"""Sequences that go on from found text: no window before the place where they resumed, the first groups left out."""

DRAFT_BLOCK = 5
DRAFT_SPANS = (Span(9, 14), Span(300, 305), Span(126, 131))
"""A draft step: the rows of each sequence see one another, and the window before the first of them."""


@dataclass(frozen=True)
class Step:
    """A kind of step: its sequences, and the rows of a draft block in each (0 = an ordinary step)."""

    name: str
    spans: tuple[Span, ...]
    block: int = 0


MIXED, DECODE, DRAFT = Step("mixed", SPANS), Step("decode", NEXT_SPANS), Step("draft", DRAFT_SPANS, DRAFT_BLOCK)
RESUMED = Step("resumed", RESUMED_SPANS)


def past(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the step that wrote everything that `spans` find, of sequences in the same order."""
    return tuple(Span(0, max(span.start, span.written), span.decoder_start) for span in spans)


def ropes(ops: Ops, dim: int) -> tuple[Rope, Rope]:
    """Return a rotation by zero ("plain", exact on every device) and a real one ("compressed")."""
    still = torch.zeros(dim // 2, dtype=torch.float64)
    turning = 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return Rope("plain", dim, still.to(ops.device)), Rope("compressed", dim, turning.to(ops.device))


def batch_of(ops: Ops, spans: Sequence[Span], ratios: Sequence[int] = ()) -> Batch:
    """Lay out one step on the device of `ops`; spans without rows are left out, the others keep their blocks."""
    kept = torch.tensor([i for i, span in enumerate(spans) if span.end > span.start])
    present = [span for span in spans if span.end > span.start]
    positions = torch.cat([torch.arange(span.start, span.end) for span in present])
    lengths = torch.tensor([span.end - span.start for span in present])
    sequences = torch.repeat_interleave(torch.arange(len(present)), lengths)
    tables = block_tables(len(spans))[kept]
    draw = Draw(1)
    history = torch.where(torch.arange(3) < positions.unsqueeze(1), draw.integers(100, len(positions), 3), -1)
    written = torch.tensor([span.written for span in present])
    window_starts = torch.tensor([span.window_start for span in present])
    device = ops.device

    def groups(ratio: int) -> Groups:
        ends = ((positions + 1) % ratio == 0) & (positions >= written[sequences])
        rows, slots = _groups(torch.nonzero(ends).flatten(), positions, sequences, tables, ratio)
        return Groups(rows.to(device), slots.to(device))

    return Batch(
        token_ids=draw.integers(100, len(positions)).to(device),
        positions=positions.to(device),
        sequences=sequences.to(device),
        history=history.to(device),
        query_starts=(lengths.cumsum(0) - lengths).to(device),
        query_lens=lengths.to(device),
        context_lens=torch.tensor([span.end for span in present], device=device),
        block_tables=tables.to(device),
        window_tables=(len(spans) * BLOCKS_EACH - 1 - tables).to(device),
        window_bases=torch.zeros(len(present), dtype=torch.int64, device=device),
        states=(len(spans) - 1 - kept).to(device),
        decoder_starts=torch.tensor([span.decoder_start for span in present], device=device),
        groups={ratio: groups(ratio) for ratio in ratios},
        logit_rows=torch.arange(len(positions), device=device),
        max_context=max(span.end for span in present) + 5,
        window_starts=window_starts.to(device) if window_starts.any() else None,
    )


BLOCKS_EACH = 3
"""Blocks of every sequence in each pool: room for 384 tokens."""


def block_tables(sequences: int) -> Tensor:
    """Blocks [sequences, 3] in an order that a seed scatters."""
    return Draw(0).permutation(sequences * BLOCKS_EACH).view(sequences, BLOCKS_EACH)


def _groups(rows: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Rows that end a group and their slots, and one row of padding."""
    entries = positions[rows] // ratio
    each = BLOCK_TOKENS // ratio
    slots = tables[sequences[rows], entries // each] * each + entries % each
    return torch.cat((rows, torch.zeros(1, dtype=torch.int64))), torch.cat((slots, torch.tensor([-1])))


def records(ops: Ops, kind: RecordFormat, width: int, rope: int, ratio: int = 1) -> RecordView:
    """Empty memory for the sequences of `SPANS`."""
    slots = len(SPANS) * BLOCKS_EACH * (BLOCK_TOKENS // ratio)
    return RecordView(ops.new_records(kind, slots, width, rope), kind, width, rope)


def tail(ops: Ops, ratio: int, channels: int) -> TailView:
    """An empty compressor tail for the sequences of `SPANS` and a spare one."""
    shape = (len(SPANS) + 1, tail_ring(ratio), channels)
    return TailView(*(torch.zeros(shape, dtype=ops.precision.wide, device=ops.device) for _ in range(2)))


def formats(ops: Ops, *quantised: RecordFormat) -> tuple[RecordFormat, ...]:
    """The quantised formats where the cache is kept in records, or the activation dtype's own."""
    if ops.precision.cache == "records":
        return quantised
    return ("float32",) if ops.precision.dtype == torch.float32 else ("bfloat16",)
