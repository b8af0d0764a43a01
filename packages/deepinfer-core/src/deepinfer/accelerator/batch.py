"""What one step hands to the ops: the rows of a `Batch`, views of cache memory and packed weights.

Built by the engine (rows), the model (views) and `Ops` itself (packed weights); nobody changes one after it is made.
Letters: T rows (tokens) of the step, R sequences, B blocks of the longest sequence, W window blocks, C channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

BLOCK_TOKENS = 128
"""Tokens in one block of either pool: a whole number of entries at every compression ratio (1, 2, 4, 128)."""


def tail_tokens(ratio: int) -> int:
    """Tokens that a compressor remembers: its unfinished group and, where groups overlap (ratio 4), the one before."""
    return 2 * ratio if ratio == 4 else ratio


ROLLBACK_TOKENS = 8
"""How many of a step's last rows may be taken back: what they wrote is overwritten, what came before is still there."""


def tail_ring(ratio: int) -> int:
    """Tokens that a compressor's memory holds: what it must remember, and as many as may be taken back."""
    return tail_tokens(ratio) + ROLLBACK_TOKENS


RecordFormat = Literal["fp8_group32", "fp4_group16", "fp4_group32", "fp8_rope", "bfloat16", "float32", "float64"]
"""How a cached vector is stored.

In this order: V4.1 window KV, V4.1 entries, index keys of both families, V4 window KV and entries, unquantised.
"""


@dataclass(frozen=True)
class Groups:
    """The rows of a step that complete a group of `ratio` tokens, and so form one compressed entry each.

    `rows` int64 [N]: index of the group's last row in the step.  `slots` int64 [N]: where the entry goes, counted in
    entries over the whole pool (block * (BLOCK_TOKENS // ratio) + offset).  Rows of padding have slot -1.
    """

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Batch:
    """One step: T rows that belong to R sequences, in sequence order, with the tables that find their cache memory.

    Integer tensors are int64 on the device.  All lengths are tokens.

    token_ids [T]          ids of the rows
    positions [T]          absolute position of each row in its sequence
    sequences [T]          which of the R sequences a row belongs to
    history [T, n]         the ids before each row, nearest first (positions i-1 .. i-n); -1 before the start
    query_starts [R]       index of each sequence's first row
    query_lens [R]         rows of each sequence in this step
    context_lens [R]       tokens of each sequence, this step's rows included
    block_tables [R, B]    block of tokens 128 b .. 128 b + 127 in the pool of entries and index keys; -1 = none
    window_tables [R, W]   block of window KV, counted from `window_bases`; -1 = none
    window_bases [R]       number (position // 128) of the first block in `window_tables`
    states [R]             row of each sequence in per-sequence memory (compressor tails)
    decoder_starts [R]     first position that runs the decoder half; its window sees no key before it
    groups                 for each compression ratio of the model above 0, the rows that complete a group, less
                           those whose entry is there already
    logit_rows [L]         rows whose logits are wanted, counted over decoder rows (over T without decoder_rows)
    decoder_rows [Td]      rows that go on past the first decoder layer; None = all of them
    image_rows [T] bool    rows inside an image span; None = none.  They take `bias_vl`, no Engram, and cut n-grams
    image_features [T, D]  embeddings of the image rows (other rows are ignored); None = none
    history_images [T, n]  bool, which of `history` are image tokens; None = none
    max_context            at least the largest of context_lens, known to the host: a bound for static shapes
    window_starts [R]      first position whose window KV any row of the sequence sees; None = 0 everywhere
    prepared               what `Ops.prepare` made of this batch once a step; only ops read it
    """

    token_ids: Tensor
    positions: Tensor
    sequences: Tensor
    history: Tensor
    query_starts: Tensor
    query_lens: Tensor
    context_lens: Tensor
    block_tables: Tensor
    window_tables: Tensor
    window_bases: Tensor
    states: Tensor
    decoder_starts: Tensor
    groups: Mapping[int, Groups]
    logit_rows: Tensor
    max_context: int
    decoder_rows: Tensor | None = None
    image_rows: Tensor | None = None
    image_features: Tensor | None = None
    history_images: Tensor | None = None
    window_starts: Tensor | None = None
    prepared: object = None

    def narrow(self) -> "Batch":
        """Return the batch of the decoder rows alone, for the layers after the first decoder layer.

        Groups are dropped: the first decoder layer has written every entry by then.  `query_starts` and `query_lens`
        are kept as they are: they describe the step.
        """
        rows = self.decoder_rows
        if rows is None:
            return self

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.index_select(0, rows)

        return replace(
            self,
            token_ids=self.token_ids.index_select(0, rows),
            positions=self.positions.index_select(0, rows),
            sequences=self.sequences.index_select(0, rows),
            history=self.history.index_select(0, rows),
            image_rows=pick(self.image_rows),
            image_features=pick(self.image_features),
            history_images=pick(self.history_images),
            groups={},
            decoder_rows=None,
            prepared=None,
        )


@dataclass(frozen=True)
class RecordView:
    """One layer's records of one kind in cache memory; only ops read the bytes.

    data    [slots + 1, bytes] uint8 for a quantised format, [slots + 1, width] of the format's dtype otherwise;
            the last record is a spare one, which slot -1 addresses
    format  how a record is stored
    width   channels of a record (head_dim or index_head_dim)
    rope    how many of the last channels carry RoPE
    """

    data: Tensor
    format: RecordFormat
    width: int
    rope: int


@dataclass(frozen=True)
class TailView:
    """One compressor's memory of the tokens of its unfinished group (with overlap: of the last whole group too).

    scores, values  float32 (float64 in float64 mode) [states + 1, ring, C]; token i lies at ring position i % ring,
                    ring = `tail_ring(ratio)`; the last state is a spare one for what nobody keeps, and states that no
                    batch names may hold snapshots
    """

    scores: Tensor
    values: Tensor


@dataclass(frozen=True)
class Selection:
    """The compressed entries that each row attends to.

    entries int64 [T, K]: entry numbers within the row's sequence, -1 = none.  slots int64 [T, K]: the same entries
    counted over the whole pool, -1 = none.  bias wide [T, K]: the same fact as a mask, 0 or -inf.  The order along K is
    unspecified.
    """

    entries: Tensor
    slots: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Rope:
    """Rotation of the last `dim` channels, on adjacent pairs; frequencies float32 [dim / 2] in radians per position.

    `name` tells the model's tables apart ("plain": window-only layers and draft stages, "compressed": the others).
    """

    name: Literal["plain", "compressed"]
    dim: int
    frequencies: Tensor
