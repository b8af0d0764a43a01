"""Cached records: how vectors become bytes in paged memory and come back, and how compressors pool tokens into entries.

Owns record formats and per-step row tables; which rows attend to which entries is `sparse_attention`'s.
A slot of -1 addresses the spare record at the end of each tensor: written by padding, never attended to.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.accelerator.batch import (
    BLOCK_TOKENS,
    Batch,
    RecordFormat,
    RecordView,
    Rope,
    Selection,
    TailView,
    tail_ring,
    tail_tokens,
)
from deepinfer.accelerator.ops.number_formats import (
    fp4_dequantise,
    fp4_quantise,
    fp8_dequantise,
    fp8_quantise,
    hadamard,
    pack_nibbles,
    unpack_nibbles,
)
from deepinfer.accelerator.ops.projection import ProjectionOps

PLAIN_FORMATS: dict[RecordFormat, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
ROPE_GROUP = 64
"""V4's records keep the rotary channels in bfloat16 and the others as FP8 in groups of (at most) 64."""


def record_bytes(format: RecordFormat, width: int, rope: int) -> int:
    """Bytes of one cached vector of `width` channels (the released models: 528, 288, 68 and 584)."""
    if format in PLAIN_FORMATS:
        return width * PLAIN_FORMATS[format].itemsize
    if format == "fp8_group32":
        return width + -(-width // 32)
    if format == "fp4_group16":
        return width // 2 + width // 16
    if format == "fp4_group32":
        return width // 2 + -(-width // 32)
    scales = -(-(width - rope) // ROPE_GROUP)
    return (width - rope) + 2 * rope + -(-scales // 8) * 8


@dataclass(frozen=True)
class TailTable:
    """Where one ratio's compressors find the tokens of the groups that end in a step, and keep its last ones.

    source [N, span]  the group's tokens, oldest first: a row of the step, or T + a place in the flattened tail
    absent [N, span]  tokens before the start of the sequence (only with overlap)
    states, places [T]  where each row's token goes in the tail; rows that are not kept go to the spare state
    """

    source: Tensor
    absent: Tensor
    states: Tensor
    places: Tensor


@dataclass(frozen=True)
class PreparedBatch:
    """What the reference derives from a batch once a step, for all layers.

    window_slots [T]        where each row's own window KV goes
    window_reads [T, Wn]    window slots each row may attend to, oldest first; -1 = none
    encoder_bias, decoder_bias [T, Wn]  0 where visible, -inf elsewhere (the decoder half sees no key before its start)
    rotations               for each rope table, complex [T, dim / 2]
    everything              for ratios at which nothing is left out, the selection of all visible entries
    tails                   for each ratio above 1 that has groups in this batch
    """

    window_slots: Tensor
    window_reads: Tensor
    encoder_bias: Tensor
    decoder_bias: Tensor
    rotations: dict[str, Tensor]
    everything: dict[int, Selection]
    tails: dict[int, TailTable]


def rotations(rope: Rope, positions: Tensor, wide: torch.dtype) -> Tensor:
    """Complex unit numbers exp(i * position * frequency) [..., dim / 2]; angles are products in the wide dtype."""
    angles = positions.to(wide).unsqueeze(-1) * rope.frequencies.to(wide)
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last 2 * turns.shape[-1] channels of x [..., C] (wide dtype) in place; returns x.

    (a, b) -> (a cos - b sin, a sin + b cos); `turns` broadcasts against x's leading dimensions.
    """
    dim = 2 * turns.shape[-1]
    tail = x[..., -dim:]
    torch.view_as_complex(tail.view(*tail.shape[:-1], -1, 2)).mul_(turns)
    return x


def encode_records(x: Tensor, view: RecordView) -> Tensor:
    """Turn vectors [N, width] into rows of `view.data` (bytes of the view's format, or its plain dtype)."""
    if view.format in PLAIN_FORMATS:
        return x.to(PLAIN_FORMATS[view.format])
    x = x.to(torch.float32)
    if view.format == "fp8_group32":
        codes, byte = fp8_quantise(x, 32)
        return torch.cat((codes[..., : view.width].view(torch.uint8), byte.to(torch.uint8)), -1)
    if view.format == "fp8_rope":
        plain = view.width - view.rope
        codes, byte = fp8_quantise(x[..., :plain], min(ROPE_GROUP, plain))
        tail = x[..., plain:].to(torch.bfloat16).view(torch.uint8)
        record = torch.cat((codes[..., :plain].view(torch.uint8), tail, byte.to(torch.uint8)), -1)
        return torch.nn.functional.pad(record, (0, view.data.shape[-1] - record.shape[-1]))
    codes4, byte4 = fp4_quantise(x, 16 if view.format == "fp4_group16" else 32)
    return torch.cat((pack_nibbles(codes4[..., : view.width]), byte4), -1)


def decode_records(data: Tensor, view: RecordView, wide: torch.dtype) -> Tensor:
    """Vectors [..., width] in the wide dtype from rows of `view.data`."""
    if view.format in PLAIN_FORMATS:
        return data.to(wide)
    width = view.width
    if view.format == "fp8_group32":
        codes, byte = data[..., :width], data[..., width:]
        return _from_fp8(codes, byte, 32).to(wide)
    if view.format == "fp8_rope":
        plain = width - view.rope
        group = min(ROPE_GROUP, plain)
        scales = data[..., plain + 2 * view.rope :][..., : -(-plain // group)]
        head = _from_fp8(data[..., :plain], scales, group)
        tail = data[..., plain : plain + 2 * view.rope].contiguous().view(torch.bfloat16)
        return torch.cat((head.to(wide), tail.to(wide)), -1)
    codes, byte = data[..., : width // 2], data[..., width // 2 :]
    group = 16 if view.format == "fp4_group16" else 32
    return fp4_dequantise(unpack_nibbles(codes.contiguous()), byte.contiguous(), group)[..., :width].to(wide)


def _from_fp8(codes: Tensor, byte: Tensor, group: int) -> Tensor:
    """Float32 values of FP8 bytes whose last group may be short."""
    width = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -width % group)).contiguous().view(torch.float8_e4m3fn)
    # A spare record that was never written has scale byte 0: 2^-127 is not a normal float32, so it is clamped.
    return fp8_dequantise(codes, byte.to(torch.int32).clamp_min(1), group)[..., :width]


class PagedCacheOps(ProjectionOps):
    """Reference reads and writes of paged memory."""

    def new_records(self, format: RecordFormat, slots: int, width: int, rope: int) -> Tensor:
        """Zeroed memory for `slots` records and the spare one."""
        if format in PLAIN_FORMATS:
            return torch.zeros((slots + 1, width), dtype=PLAIN_FORMATS[format], device=self.device)
        return torch.zeros((slots + 1, record_bytes(format, width, rope)), dtype=torch.uint8, device=self.device)

    def read_records(self, view: RecordView, slots: Tensor) -> Tensor:
        """Vectors [*slots.shape, width] in the wide dtype; slot -1 reads the spare record (finite, meaningless)."""
        return decode_records(view.data[slots], view, self.wide)

    def prepare(
        self, batch: Batch, window: int, ropes: tuple[Rope, ...], dense: tuple[int, ...], *, block: int = 0
    ) -> Batch:
        """Return the batch with everything that its layers share derived once.

        window: the model's window size.  dense: the ratios at which every visible entry is attended to in this step.
        block: 0, or the number of rows that each sequence of a draft step has; these see one another, and the window
        that ends before the first of them.
        """
        reads = batch.positions.unsqueeze(1) + torch.arange(1 - window, 1, device=batch.positions.device)
        if block:
            first = batch.positions.index_select(0, batch.query_starts.index_select(0, batch.sequences))
            reads = first.unsqueeze(1) + torch.arange(-window, block, device=batch.positions.device)
        starts = batch.decoder_starts.index_select(0, batch.sequences).unsqueeze(1)
        slots = self._window_slots(batch, reads)
        nothing = torch.zeros(slots.shape, dtype=self.wide, device=slots.device)
        prepared = PreparedBatch(
            window_slots=self._window_slots(batch, batch.positions.unsqueeze(1)).squeeze(1) if block else slots[:, -1],
            window_reads=slots,
            encoder_bias=nothing.masked_fill(slots < 0, -torch.inf),
            decoder_bias=nothing.masked_fill((slots < 0) | (reads < starts), -torch.inf),
            rotations={rope.name: rotations(rope, batch.positions, self.wide) for rope in ropes},
            everything={ratio: self._everything(batch, ratio) for ratio in dense},
            tails={ratio: self._tail_table(batch, ratio) for ratio in batch.groups if ratio > 1},
        )
        return replace(batch, prepared=prepared)

    def _window_slots(self, batch: Batch, positions: Tensor) -> Tensor:
        """Window slots of absolute positions [T, N] of each row's sequence; -1 where there is nothing to see."""
        known = positions.clamp_min(0)
        tables = batch.window_tables.index_select(0, batch.sequences)
        local = known // BLOCK_TOKENS - batch.window_bases.index_select(0, batch.sequences).unsqueeze(1)
        inside = (positions >= 0) & (local >= 0) & (local < tables.shape[1])
        if batch.window_starts is not None:
            inside &= positions >= batch.window_starts.index_select(0, batch.sequences).unsqueeze(1)
        blocks = tables.gather(1, local.clamp(0, tables.shape[1] - 1))
        return (blocks * BLOCK_TOKENS + known % BLOCK_TOKENS).masked_fill_(~inside | (blocks < 0), -1)

    def _everything(self, batch: Batch, ratio: int) -> Selection:
        """Select all visible entries of each row; entry e is visible to row i iff e < (i + 1) // ratio."""
        entries = torch.arange(batch.max_context // ratio, device=batch.positions.device)
        hidden = entries >= ((batch.positions + 1) // ratio).unsqueeze(1)
        return self.selection(batch, entries.masked_fill(hidden, -1), ratio)

    def selection(self, batch: Batch, entries: Tensor, ratio: int) -> Selection:
        """Find the slots of entry numbers [T, K] (-1 = none) through the block tables."""
        per_block = BLOCK_TOKENS // ratio
        known = entries.clamp_min(0)
        table = batch.block_tables.index_select(0, batch.sequences)
        blocks = table.gather(1, (known // per_block).clamp_max(table.shape[1] - 1))
        absent = entries < 0
        slots = (blocks * per_block + known % per_block).masked_fill_(absent, -1)
        bias = torch.zeros(entries.shape, dtype=self.wide, device=entries.device)
        return Selection(entries, slots, bias.masked_fill_(absent, -torch.inf))

    def write_window(self, kv: Tensor, norm: Tensor, eps: float, batch: Batch, rope: Rope, view: RecordView) -> None:
        """Normalise, rotate, quantise and store each row's window KV: kv [T, D] is the bare projection."""
        prepared = prepared_of(batch)
        wide = self.widen(self.rms_norm(kv, norm, eps))
        view.data[prepared.window_slots] = encode_records(rotate_(wide, prepared.rotations[rope.name]), view)

    def write_entries(
        self, latents: Tensor, batch: Batch, ratio: int, rope: Rope, view: RecordView, *, transform: bool = False
    ) -> None:
        """Rotate, quantise and store new entries (or index keys): latents [N, C] belong to `batch.groups[ratio]`.

        An entry's RoPE position is that of its first token.  `transform` applies V4's Hadamard before quantising
        (an orthonormal map of both sides of the index product, so it is left out where nothing is quantised).
        """
        groups = batch.groups[ratio]
        if groups.rows.shape[0] == 0:
            return
        first = batch.positions.index_select(0, groups.rows) - (ratio - 1)
        rotated = rotate_(latents.to(self.wide, copy=True), rotations(rope, first, self.wide))
        if transform and view.format not in PLAIN_FORMATS:
            rotated = hadamard(rotated)
        view.data[groups.slots] = encode_records(rotated, view)

    def compress(
        self, projected: Tensor, bias: Tensor | None, batch: Batch, ratio: int, tail: TailView | None
    ) -> Tensor:
        """Pool each completed group of tokens into one latent [N, C], rounded once to the activation dtype.

        projected [T, 2 C] wide: values, then scores, to which bias [ratio, C] wide of the token's place in its group is
        added (V4).  (Ratio 4: [T, 4 C], halves for the previous and the current group; then an entry pools 2 * ratio
        tokens, and the group before the first has weight 0.)  Per channel: softmax of the scores over the tokens of the
        group, times the values.  Ratio 1 has neither scores nor tail: projected [T, C], every row is its own group.
        Tokens of earlier steps come from `tail`, which then takes in this step's last tokens.
        """
        if ratio == 1:
            return self.narrow(projected.index_select(0, batch.groups[ratio].rows))
        assert tail is not None
        values, scores = projected.chunk(2, 1)
        if bias is not None:
            scores = scores + bias.index_select(0, batch.positions % ratio)
        table = prepared_of(batch).tails[ratio]
        if table.source.shape[0]:
            value = torch.cat((values, tail.values.flatten(0, 1)))[table.source]
            score = torch.cat((scores, tail.scores.flatten(0, 1)))[table.source]
            if table.source.shape[1] == 2 * ratio:
                half = value.shape[2] // 2
                value = torch.cat((value[:, :ratio, :half], value[:, ratio:, half:]), 1)
                score = torch.cat((score[:, :ratio, :half], score[:, ratio:, half:]), 1)
                score.masked_fill_(table.absent.unsqueeze(2), -torch.inf)
            pooled = (torch.softmax(score, 1) * value).sum(1)
        else:
            pooled = values[:0, : values.shape[1] // (tail_tokens(ratio) // ratio)]
        tail.values[table.states, table.places] = values
        tail.scores[table.states, table.places] = scores
        return self.narrow(pooled)

    def copy_records(self, view: RecordView, source: int, target: int, count: int) -> None:
        """Copy `count` records, whole blocks, from slot `source` on to slot `target` on; the two do not overlap."""
        view.data[target : target + count] = view.data[source : source + count]

    def pack_records(self, view: RecordView, first: int, count: int) -> Tensor:
        """Return `count` records, whole blocks, from slot `first` on as bytes: uint8, on the device.

        `unpack_records` takes them back, in any engine whose `CacheLayout.fingerprint` and device are the same.
        """
        return view.data[first : first + count].reshape(-1).view(torch.uint8)

    def unpack_records(self, view: RecordView, first: int, count: int, data: Tensor) -> None:
        """Write what `pack_records` returned for as many records, from slot `first` on."""
        place = view.data[first : first + count]
        place.copy_(data.view(place.dtype).view(place.shape))

    def copy_state(self, tail: TailView, source: int, target: int) -> None:
        """Copy what a compressor remembers of one sequence (or a snapshot) to another state."""
        for memory in (tail.scores, tail.values):
            memory[target] = memory[source]

    def pack_state(self, tail: TailView, state: int) -> Tensor:
        """Return what a compressor remembers in one state as bytes: uint8, on the device."""
        return torch.cat([memory[state].reshape(-1).view(torch.uint8) for memory in (tail.scores, tail.values)])

    def unpack_state(self, tail: TailView, state: int, data: Tensor) -> None:
        """Write what `pack_state` returned."""
        for memory, piece in zip((tail.scores, tail.values), data.chunk(2), strict=True):
            memory[state] = piece.view(memory.dtype).view(memory[state].shape)

    def _tail_table(self, batch: Batch, ratio: int) -> TailTable:
        groups = batch.groups[ratio]
        span, ring = tail_tokens(ratio), tail_ring(ratio)
        back = torch.arange(span - 1, -1, -1, device=groups.rows.device)
        sequences = batch.sequences.index_select(0, groups.rows)
        positions = batch.positions.index_select(0, groups.rows).unsqueeze(1) - back
        rows = groups.rows.unsqueeze(1) - back
        stored = batch.states.index_select(0, sequences).unsqueeze(1) * ring + positions % ring
        in_step = rows >= batch.query_starts.index_select(0, sequences).unsqueeze(1)
        lasts = batch.context_lens.index_select(0, batch.sequences) - ring
        states = batch.states.index_select(0, batch.sequences)
        return TailTable(
            source=torch.where(in_step, rows, batch.positions.shape[0] + stored),
            absent=positions < 0,
            states=states.masked_fill_(batch.positions < lasts, -1),
            places=batch.positions % ring,
        )


def prepared_of(batch: Batch) -> PreparedBatch:
    """The reference's tables of a prepared batch."""
    assert isinstance(batch.prepared, PreparedBatch), "Ops.prepare has not run on this batch"
    return batch.prepared
