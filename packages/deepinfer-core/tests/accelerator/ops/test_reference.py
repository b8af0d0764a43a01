"""The definitions against independent formulas: loops over single numbers, on tiny shapes, in float64."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.accelerator.batch import ROLLBACK_TOKENS, Batch, Groups, RecordView, Rope, TailView, tail_ring
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import PackedExperts, RouteSettings
from deepinfer.accelerator.ops.ngram_memory import EngramHash
from deepinfer.accelerator.ops.sparse_attention import IndexRequest, KeySources
from deepinfer.accelerator.parameters import Precision

OPS = Ops(torch.device("cpu"), Precision(torch.float64, round_inputs=False, cache="model"))
WINDOW, WIDTH, ROPE_DIM = 8, 12, 4
ROPE = Rope("compressed", ROPE_DIM, torch.tensor([1.0, 0.25]))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(spans: list[tuple[int, int]], ratio: int, starts: list[int] | None = None, max_context: int = 0) -> Batch:
    """Rows first .. last - 1 of some sequences; sequence r owns blocks 2 r and 2 r + 1."""
    positions = torch.cat([torch.arange(*span) for span in spans])
    counts = torch.tensor([last - first for first, last in spans])
    sequences = torch.repeat_interleave(torch.arange(len(spans)), counts)
    tables = torch.arange(2 * len(spans)).view(-1, 2)
    ends = torch.nonzero((positions + 1) % ratio == 0).squeeze(1)
    slots = tables[sequences[ends], positions[ends] // 128] * (128 // ratio) + positions[ends] % 128 // ratio
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequences=sequences,
        history=torch.zeros(len(positions), 0, dtype=torch.int64),
        query_starts=counts.cumsum(0) - counts,
        query_lens=counts,
        context_lens=torch.tensor([last for _, last in spans]),
        block_tables=tables,
        window_tables=tables,
        window_bases=torch.zeros(len(spans), dtype=torch.int64),
        states=torch.arange(len(spans)),
        decoder_starts=torch.tensor(starts or [0] * len(spans)),
        groups={ratio: Groups(ends, slots)},
        logit_rows=torch.arange(len(positions)),
        max_context=max(max_context, *(last for _, last in spans)),
    )


def prepared(batch: Batch, dense: tuple[int, ...] = ()) -> Batch:
    return OPS.prepare(batch, WINDOW, (ROPE,), dense)


def plain_records(slots: int, width: int) -> RecordView:
    view = RecordView(OPS.new_records("float64", slots, width, ROPE_DIM), "float64", width, ROPE_DIM)
    view.data.copy_(numbers(slots + 1, width, seed=3))
    return view


def turned(x: list[float], position: int, direction: int = 1) -> list[float]:
    out = list(x)
    for pair, frequency in enumerate(ROPE.frequencies.tolist()):
        at, angle = len(x) - ROPE_DIM + 2 * pair, direction * position * frequency
        out[at] = x[at] * math.cos(angle) - x[at + 1] * math.sin(angle)
        out[at + 1] = x[at] * math.sin(angle) + x[at + 1] * math.cos(angle)
    return out


@pytest.mark.parametrize("decoder", [False, True])
def test_attention(decoder: bool) -> None:
    """Window, entries, sink and the inverse rotation, row by row."""
    batch = prepared(step([(20, 26), (0, 5)], 2, starts=[21, 0]), (2,))
    window, entries, sink = plain_records(512, WIDTH), plain_records(256, WIDTH), numbers(2)
    q = numbers(11, 2, WIDTH, seed=1)
    keys = KeySources(window, entries, OPS.everything(batch, 2), decoder)
    out = OPS.attention(q, keys, sink, batch, ROPE)
    for row in range(11):
        position, sequence = int(batch.positions[row]), int(batch.sequences[row])
        first = max(position - WINDOW + 1, int(batch.decoder_starts[sequence]) if decoder else 0, 0)
        vectors = [window.data[sequence * 256 + j] for j in range(first, position + 1)]
        vectors += [entries.data[sequence * 128 + e] for e in range((position + 1) // 2)]
        for head in range(2):
            weights = [math.exp(float(q[row, head] @ k) / math.sqrt(WIDTH)) for k in vectors]
            total = sum(weights) + math.exp(float(sink[head]))
            mixed = sum((w / total) * k for w, k in zip(weights, vectors, strict=True))
            assert isinstance(mixed, Tensor)
            expected = torch.tensor(turned(mixed.tolist(), position, -1), dtype=torch.float64)
            assert torch.allclose(out[row, head], expected, atol=1e-12)


def test_rotation_of_queries() -> None:
    batch = prepared(step([(3, 6)], 2))
    q = numbers(3, 2, WIDTH)
    out = OPS.rotate_queries(q, batch, ROPE, None)
    for row in range(3):
        for head in range(2):
            expected = turned(q[row, head].tolist(), 3 + row)
            assert torch.allclose(out[row, head], torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@given(
    ratio=st.sampled_from([2, 4, 128]),
    length=st.integers(1, 150),
    cuts=st.sets(st.integers(1, 149), max_size=4),
    rejected=st.integers(0, ROLLBACK_TOKENS),
    seed=st.integers(0, 9),
)
def test_compression_in_any_chunks(ratio: int, length: int, cuts: set[int], rejected: int, seed: int) -> None:
    """Latents of every whole group, whatever the chunks: a softmax over the group's tokens, channel by channel.

    Behind every chunk lie `rejected` rows that are taken back.
    """
    width = 3
    channels = 2 * width if ratio == 4 else width
    values, scores = numbers(length, channels, seed=seed), numbers(length, channels, seed=seed + 50)
    tail = TailView(*(torch.full((2, tail_ring(ratio), channels), 9.0, dtype=torch.float64) for _ in range(2)))
    borders = [0, *sorted(cut for cut in cuts if cut < length), length]
    found = []
    for first, last in pairwise(borders):
        rows, garbage = slice(first, last), numbers(rejected, channels, seed=last)
        batch = prepared(step([(first, last + rejected)], ratio))
        projected = torch.cat((torch.cat((values[rows], scores[rows]), 1), torch.cat((garbage, garbage), 1)))
        pooled = OPS.compress(projected, None, batch, ratio, tail)
        found.append(pooled[: last // ratio - first // ratio])
    latents = torch.cat(found)
    assert latents.shape == (length // ratio, width)
    for group in range(length // ratio):
        for channel in range(width):
            tokens = [(t, channel) for t in range(group * ratio, (group + 1) * ratio)]
            if ratio == 4:
                tokens = [(t, channel + width) for t, _ in tokens]
                tokens += [(t, channel) for t in range((group - 1) * 4, group * 4) if group]
            weights = [math.exp(float(scores[t, c])) for t, c in tokens]
            expected = sum(w * float(values[t, c]) for w, (t, c) in zip(weights, tokens, strict=True)) / sum(weights)
            assert float(latents[group, channel]) == pytest.approx(expected, abs=1e-12)


@given(seed=st.integers(0, 200), top_k=st.integers(1, 12), candidates=st.booleans())
def test_selection_of_entries(seed: int, top_k: int, candidates: bool) -> None:
    """The best visible entries, the smaller on ties, only inside candidate blocks; and the blocks themselves."""
    batch = prepared(step([(3, 21), (40, 42)], 2))
    keys = plain_records(256, WIDTH)
    keys.data.copy_((keys.data * 2).round())
    keys.data[10:14] = keys.data[9]  # equal keys: the rule on ties decides
    query, weights = (numbers(20, 2, WIDTH, seed=seed) * 2).round(), numbers(20, 2, seed=seed + 1).abs().round() + 1
    still = Rope("compressed", ROPE_DIM, torch.zeros(ROPE_DIM // 2))
    batch = OPS.prepare(batch, WINDOW, (still,), ())
    allowed = torch.tensor([[0, 2, -1]]).expand(20, -1) if candidates else None
    request = IndexRequest(query, weights, keys, still, 2, top_k, 4, allowed, keep_blocks=0 if candidates else 2)
    selection, blocks = OPS.select_entries(request, batch)
    for row in range(20):
        position, sequence = int(batch.positions[row]), int(batch.sequences[row])
        scores = {
            e: sum(
                float(weights[row, h]) * max(0.0, float(query[row, h] @ keys.data[sequence * 128 + e]))
                for h in range(2)
            )
            for e in range((position + 1) // 2)
            if not candidates or e // 4 in (0, 2)
        }
        best = sorted(scores, key=lambda e: (-scores[e], e))[:top_k]
        assert set(selection.entries[row].tolist()) - {-1} == set(best)
        chosen = [e for e in selection.entries[row].tolist() if e >= 0]
        assert [s for s in selection.slots[row].tolist() if s >= 0] == [sequence * 128 + e for e in chosen]
        if blocks is not None:
            newest = (position + 1) // 2 - 1
            of_block = {b: max(s for e, s in scores.items() if e // 4 == b) for b in {e // 4 for e in scores}}
            order = sorted(of_block, key=lambda b: (b != newest // 4, -of_block[b], b))
            assert set(blocks[row].tolist()) - {-1} == set(order[:2])


def test_routing_and_experts() -> None:
    x, gate, bias = numbers(5, WIDTH), numbers(6, WIDTH, seed=1), numbers(6, seed=2)
    picks, shares = OPS.route(x, gate, bias, None, RouteSettings(top_k=2, normalise=True, scale=1.5))
    w13, w2 = numbers(6, 8, WIDTH, seed=4), numbers(6, WIDTH, 4, seed=5)
    experts = PackedExperts(w13, w2, (), 0, 6)
    out = OPS.experts(x, picks.masked_fill(picks == 3, -1), shares, experts, 1.0)
    for row in range(5):
        scores = [math.sqrt(math.log1p(math.exp(float(x[row] @ gate[e])))) for e in range(6)]
        best = sorted(range(6), key=lambda e: -(scores[e] + float(bias[e])))[:2]
        assert picks[row].tolist() == best
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        for place, expert in enumerate(best):
            share = scores[expert] / (sum(scores[e] for e in best) + 1e-20) * 1.5
            assert float(shares[row, place]) == pytest.approx(share, abs=1e-12)
            if expert != 3:
                gates, ups = (w13[expert] @ x[row]).split(4)
                gates = gates.clamp(max=1.0)
                hidden = share * gates / (1 + torch.exp(-gates)) * ups.clamp(-1.0, 1.0)
                expected += w2[expert] @ hidden
        assert torch.allclose(out[row], expected, atol=1e-12)


def test_one_pick_is_not_normalised() -> None:
    x, gate = numbers(3, WIDTH), numbers(4, WIDTH, seed=1)
    picks, shares = OPS.route(x, gate, None, None, RouteSettings(top_k=1, normalise=True, scale=2.0))
    scores = torch.nn.functional.softplus(x @ gate.T).sqrt()
    assert torch.allclose(shares, 2 * scores.gather(1, picks))


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    images=st.sets(st.integers(0, 7)),
)
def test_ngram_rows(ids: list[int], images: set[int]) -> None:
    """Hashes of up to four compressed ids, cut at the start and at image tokens."""
    compressed, pad = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 7
    multipliers, primes, offsets = [2**40 + 1, 2**41 + 3, 2**42 + 5, 2**43 + 7], [11, 13, 17, 19, 23, 29], [0] * 6
    hashing = EngramHash(*(torch.tensor(compressed),), pad, *map(torch.tensor, (multipliers, primes, offsets)))
    count = len(ids)
    batch = step([(0, count)], 1)
    back = [[ids[i - k] if i >= k else -1 for k in (1, 2, 3)] for i in range(count)]
    image = [[i >= k and i - k in images for k in (1, 2, 3)] for i in range(count)]
    batch = Batch(
        **{
            **vars(batch),
            "token_ids": torch.tensor(ids),
            "history": torch.tensor(back),
            "image_rows": torch.tensor([i in images for i in range(count)]),
            "history_images": torch.tensor(image),
        }
    )
    rows = OPS.ngram_rows(batch, hashing)
    for i in range(count):
        grams, cut = [], False
        for k in range(4):
            cut = cut or i < k or i - k in images
            grams.append(pad if cut else compressed[ids[i - k]])
        expected, value = [], grams[0] * multipliers[0]
        for order in range(1, 4):
            value ^= grams[order] * multipliers[order]
            expected += [value % primes[2 * (order - 1)], value % primes[2 * (order - 1) + 1]]
        assert rows[i].tolist() == expected


def test_engram_gate() -> None:
    streams, memory = numbers(3, 2, WIDTH), numbers(3, 3 * WIDTH, seed=1)
    q, k = numbers(2, WIDTH, seed=2), numbers(2, WIDTH, seed=3)
    out = OPS.engram_gate(streams, memory, (q, k), 1e-20, torch.tensor([False, True, False]))
    for row in range(3):
        values = memory[row, 2 * WIDTH :]
        for stream in range(2):
            s, key = streams[row, stream], memory[row, stream * WIDTH : (stream + 1) * WIDTH]
            dot = float((s * key * q[stream] * k[stream]).sum()) / math.sqrt(WIDTH)
            dot /= math.sqrt(float((s * s).mean()) * float((key * key).mean()))
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
            expected = s if row == 1 else s + gate * values
            assert torch.allclose(out[row, stream], expected, atol=1e-12)
