"""Engram: from the last token ids to table rows, from rows to vectors, and into the residual streams.

Tables may stay in host memory; only the rows that are looked up are read. Source: model card, Engram.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops.number_formats import dequantise_rows, has_nan_scale
from deepinfer.accelerator.ops.projection import ProjectionOps
from deepinfer.accelerator.parameters import StoredTable
from deepinfer.errors import CheckpointError


@dataclass(frozen=True)
class EngramHash:
    """How one Engram layer turns compressed ids into rows.

    ids [V] int64          compressed id of every token id
    pad                    compressed id that stands for what lies before the start or behind an image
    multipliers [n] int64  one per position of the n-gram, nearest first
    primes, offsets        int64 [orders * heads]: modulus and first table row of each (order, head) range
    """

    ids: Tensor
    pad: int
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


class NgramMemoryOps(ProjectionOps):
    """Reference Engram, on the host where the table lies there."""

    def ngram_rows(self, batch: Batch, hashing: EngramHash) -> Tensor:
        """Table rows int64 [T, orders * heads] of each token and its n - 1 predecessors.

        g_s = compressed id of position i - s; from the first s that lies before the start or on an image token, the
        pad.  h_s = xor of g_0 m_0 .. g_s m_s; row = h mod prime + offset for every order s >= 1 and head.
        """
        known = torch.cat((batch.token_ids.unsqueeze(1), batch.history), 1)[:, : hashing.multipliers.shape[0]]
        cut = known < 0
        if batch.image_rows is not None:
            cut[:, 0] |= batch.image_rows
        if batch.history_images is not None:
            cut[:, 1:] |= batch.history_images[:, : cut.shape[1] - 1]
        cut = torch.cummax(cut.to(torch.int8), 1).values.bool()
        grams = hashing.ids[known.clamp_min(0)].masked_fill_(cut, hashing.pad)
        products = grams * hashing.multipliers
        hashes = [products[:, 0]]
        for place in range(1, products.shape[1]):
            hashes.append(hashes[-1] ^ products[:, place])
        heads = hashing.primes.shape[0] // (len(hashes) - 1)
        columns = torch.stack(hashes[1:], 1).repeat_interleave(heads, 1)
        return columns % hashing.primes + hashing.offsets

    def engram_lookup(self, rows: Tensor, table: StoredTable) -> Tensor:
        """Vectors [T, columns * C] in the activation dtype for rows [T, columns].

        The table is read where it lies.  Raises CheckpointError for a NaN scale among the rows read: a table is too
        large to be scanned when it is loaded.
        """
        where = rows.to(table.data.device)
        flat = where.flatten()
        data = (
            table.data.view(torch.uint8)[flat].view(table.data.dtype) if table.scale is not None else table.data[flat]
        )
        if table.scale is not None:
            scale = table.scale.view(torch.uint8)[flat]
            if has_nan_scale(scale):
                raise CheckpointError(
                    f"{table.name}: NaN scales (byte 255) among the rows that this prompt looks up; expected powers of "
                    "two: the file is damaged, download it again"
                )
            data = dequantise_rows(data, scale)
        return data.to(self.device, self.dtype).view(rows.shape[0], -1)

    def engram_gate(
        self,
        streams: Tensor,
        memory: Tensor,
        weights: tuple[Tensor, Tensor],
        eps: float,
        image_rows: Tensor | None,
    ) -> Tensor:
        """Add gated memory to the streams: streams [T, S, D], memory [T, (S + 1) * D] = K of every stream, then V.

        weights = (q_weight, k_weight) [S, D] wide.  dot_k = sum_d S_kd K_kd q_kd k_kd / (rms(S_k) rms(K_k)) / sqrt(D);
        g_k = sigmoid(sign(dot) sqrt(max(|dot|, 1e-6))), 0 for image rows; S_k += g_k V.
        """
        count, width = streams.shape[1:]
        wide = self.widen(streams)
        memory = self.widen(memory).view(-1, count + 1, width)
        keys, values = memory[:, :-1], memory[:, -1:]
        norm = torch.rsqrt(wide.square().mean(2) + eps) * torch.rsqrt(keys.square().mean(2) + eps)
        dot = (wide * keys * (weights[0] * weights[1])).sum(2) * norm * width**-0.5
        gate = torch.sigmoid(torch.sign(dot) * dot.abs().clamp_min(1e-6).sqrt())
        if image_rows is not None:
            gate = gate.masked_fill(image_rows.unsqueeze(1), 0.0)
        return self.narrow(wide + gate.unsqueeze(2) * values)
