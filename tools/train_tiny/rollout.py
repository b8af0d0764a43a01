"""Text that the target writes: rows of prompts and sampled answers, one token a step, with caches of their own.

A row takes one prompt after the other from a list; an answer ends at end-of-sequence or at its longest, and the next
prompt follows at an even place.  Everything is a tensor operation of a fixed shape, so a step can be a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.model.config import LayerConfig
from network import Flow, Network

COLDEST = 1e-4
"""Temperature that stands for the best token."""


@dataclass
class State:
    """Of R rows: the token to be read next, whether the model wrote it, where its document starts, its place in the
    prompts, whether the prompt still lasts, and how long the answer is; all [R].
    """

    token: Tensor
    written: Tensor
    start: Tensor
    pointer: Tensor
    reading: Tensor
    length: Tensor


class Writer:
    """Writes rows of `length` tokens with `network`, which is not trained meanwhile.

    prompts       flat list of tokens, each prompt ended by -1
    temperatures  of the rows [R]
    """

    def __init__(
        self, network: Network, prompts: Tensor, temperatures: Tensor, length: int, *, eos: int, pad: int
    ) -> None:
        self.network, self.prompts, self.length, self.eos, self.pad = network, prompts, length, eos, pad
        self.temperatures = temperatures.clamp_min(COLDEST).unsqueeze(1)
        self.longest = length // 2
        rows, device, config = temperatures.shape[0], temperatures.device, network.config
        self.place = torch.zeros((), dtype=torch.int64, device=device)
        self.tokens = torch.zeros((rows, length), dtype=torch.int64, device=device)
        self.flags = torch.zeros((rows, length), dtype=torch.bool, device=device)
        self.turns = network.turns(torch.arange(length, device=device))
        self.caches = {
            layer.index: torch.zeros((rows, length, config.head_dim), dtype=network.dtype, device=device)
            for layer in config.layers
        }
        self.entries = {
            layer.index: torch.zeros((rows, length // layer.ratio, config.head_dim), dtype=network.dtype, device=device)
            for layer in config.layers
            if layer.owns_kv
        }
        self.pending = {
            layer.index: torch.zeros((2, rows, 1, config.head_dim), device=device)
            for layer in config.layers
            if layer.owns_kv and layer.ratio > 1
        }
        self.state = self._begin(rows, device)

    def _begin(self, rows: int, device: torch.device) -> State:
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        return State(zeros, zeros.bool(), zeros.clone(), zeros.clone(), ~zeros.bool(), zeros.clone())

    def reset(self, firsts: Tensor) -> None:
        """Begin new rows at the prompts that start at `firsts` [R]; caches may keep what they hold."""
        self.place.zero_()
        state = self.state
        state.token.copy_(self.prompts[firsts])
        state.pointer.copy_(firsts)
        state.reading.fill_(True)
        for tensor in (state.written, state.start, state.length):
            tensor.zero_()

    def step(self) -> None:
        """Read one token of each row, sample the next, and decide what each row reads then."""
        state, place = self.state, self.place
        self.tokens.index_copy_(1, place.view(1), state.token.unsqueeze(1))
        self.flags.index_copy_(1, place.view(1), state.written.unsqueeze(1))
        logits = self.network.head(self._forward()).float() / self.temperatures
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-20, 1 - 1e-7)))
        logits[:, self.pad].fill_(-torch.inf)
        sampled = (logits + noise).argmax(1)
        self._advance(sampled)
        place += 1

    def _advance(self, sampled: Tensor) -> None:
        state, count = self.state, self.prompts.shape[0]
        following = (state.pointer + state.reading) % count
        at_end = state.reading & (self.prompts[following] < 0)
        ended = ~state.reading & ((state.token == self.eos) | (state.length >= self.longest))
        fresh = (following + 1) % count
        # A document begins at an even place: an odd one is filled with padding, and the row waits where it is.
        waits = ended & (self.place % 2 == 0)
        starts = ended & ~waits
        reads = state.reading & ~at_end
        token = torch.where(reads, self.prompts[following], sampled)
        token = torch.where(waits, self.pad, torch.where(starts, self.prompts[fresh], token))
        written = ~(reads | ended)
        state.length.copy_(torch.where(written, state.length + 1, torch.where(waits, self.longest, 0)))
        state.pointer.copy_(torch.where(starts, fresh, torch.where(state.reading, following, state.pointer)))
        state.start.copy_(torch.where(starts, self.place + 1, state.start))
        state.reading.copy_(reads | starts)
        state.written.copy_(written)
        state.token.copy_(token)

    def _forward(self) -> Tensor:
        """Hidden rows [R, D] of the tokens at `place`."""
        network, place = self.network, self.place.view(1)
        flow = network.begin(self.state.token.unsqueeze(1))
        turns = {name: (cos[place], sin[place]) for name, (cos, sin) in self.turns.items()}
        bias = self._bias()
        grams = self._grams()
        for layer in network.config.layers:
            prefix = f"layers.{layer.index}"
            if layer.engram is not None:
                flow.streams = network.recall(f"{prefix}.engram", layer, flow.streams, grams)
            x, written, pre = network.enter(flow, prefix, "attn")
            y = self._attention(f"{prefix}.attn", layer, x, turns, bias[layer.ratio])
            flow = Flow(network.pieces.leave(flow.streams, y, written), pre, {})
            x, written, pre = network.enter(flow, prefix, "ffn")
            y, _ = network.experts(f"{prefix}.ffn", x, network.config.top_k)
            flow = Flow(network.pieces.leave(flow.streams, y, written), pre, {})
        return network.norm(network.collapse(flow), "norm.weight").squeeze(1)

    def _bias(self) -> dict[int, Tensor]:
        where = torch.arange(self.length, device=self.place.device)
        start = self.state.start.view(-1, 1, 1)
        window = (where <= self.place) & (where > self.place - self.network.config.window) & (where >= start)
        seen = {0: [window]}
        for ratio in self.network.config.ratios:
            first = where[: self.length // ratio] * ratio
            seen[ratio] = [window, (first + ratio - 1 <= self.place) & (first >= start)]
        return {ratio: self.network.bias(masks) for ratio, masks in seen.items()}

    def _grams(self) -> list[Tensor]:
        found = [self.state.token.unsqueeze(1)]
        for ago in range(1, self.network.config.history + 1):
            at = (self.place - ago).view(1)
            earlier = self.tokens.index_select(1, at.clamp_min(0))
            found.append(torch.where(at >= self.state.start.unsqueeze(1), earlier, -1))
        return found

    def _attention(
        self, prefix: str, layer: LayerConfig, x: Tensor, turns: dict[str, tuple[Tensor, Tensor]], bias: Tensor
    ) -> Tensor:
        network, place = self.network, self.place.view(1)
        turn = turns["compressed" if layer.ratio else "plain"]
        q, window = network.queries(prefix, x, turn)
        self.caches[layer.index].index_copy_(1, place, window)
        keys = [self.caches[layer.index]]
        if layer.owns_kv:
            self._publish(f"{prefix}.compressor", layer, x)
        if layer.kv_source is not None:
            keys.append(self.entries[layer.kv_source])
        return network.output(prefix, network.attend(prefix, q, torch.cat(keys, 1), bias), turn)

    def _publish(self, prefix: str, layer: LayerConfig, x: Tensor) -> None:
        """Write the entry that this token completes, or begins: an unfinished one is not visible yet."""
        network, ratio = self.network, layer.ratio
        values, gates = network.project(prefix, ratio, x)
        if ratio > 1:
            assert ratio == 2, "the tokens before the last are kept for one token only"
            old = self.pending[layer.index]
            pooled = network.pool(prefix, ratio, torch.cat((old[0], values), 1), torch.cat((old[1], gates), 1))
            old.copy_(torch.stack((values, gates)))
        else:
            pooled = network.pool(prefix, ratio, values, gates)
        entry = (self.place // ratio).view(1)
        cos, sin = self.turns["compressed"]
        made = network.entry(pooled, (cos[entry * ratio], sin[entry * ratio]))
        self.entries[layer.index].index_copy_(1, entry, made)
