"""The training run: the target on text, rows that the target writes, then the draft stages on those rows.

Every phase ends by its steps or its seconds, whichever comes first, and a checkpoint is written after each, so that a
run that is cut short leaves the best so far.  On a GPU a step is one CUDA graph.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from corpus import STOP, WRITTEN, load_tokens
from drafting import DraftLoss, draft_loss
from export import write_checkpoint
from network import Network, document_starts
from rollout import Writer
from settings import BOS, EOS, PAD, Schedule

GIVEN = 0.1
"""Weight of tokens that are given to the model, against 1 of those that it is to write."""
BALANCE = 1e-3
"""How far a step moves the bias of an expert that is picked too often or too seldom."""
DECAYED = 0.1
SHOWN = 100
"""Steps from one line of the log to the next."""
TEMPERATURES = (1.0, 1.0, 0.7, 0.0)
"""Of the rows that the target writes, in turn."""
LOWEST = 0.03
"""Learning rate at the end, of the highest."""


@dataclass(frozen=True)
class Data:
    """What training reads, on the device: rows [N, T] and held-out rows, prompts and held-out prompts, flat."""

    rows: Tensor
    held: Tensor
    prompts: Tensor
    held_prompts: Tensor


def load_data(folder: Path, tokens: int, device: torch.device) -> Data:
    """Read the files of `prepare`; rows of 256 tokens are cut into rows of `tokens`."""

    def read(name: str, width: int | None) -> Tensor:
        return torch.from_numpy(load_tokens(folder / f"{name}.xz", width).astype(np.int32)).to(device)

    def prompts(name: str) -> Tensor:
        flat = read(name, None).long()
        return torch.where(flat == STOP, -1, flat)

    return Data(
        read("rows", 256)[:, :tokens], read("held", 256)[:, :tokens], prompts("prompts"), prompts("held_prompts")
    )


class Step:
    """A function of no arguments over static tensors: a CUDA graph where there is a GPU."""

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        self._run, self._graph = run, None
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        self._graph = graph

    def __call__(self) -> None:
        """Run it once."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


class Optimizer:
    """AdamW over some parameters, with a learning rate that a graph reads from a tensor."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], schedule: Schedule, rate: float) -> None:
        device = named[0][1].device
        self.parameters = [parameter for _, parameter in named]
        self.rate = torch.tensor(rate, device=device)
        self._highest, self._schedule = rate, schedule
        decayed = [p for name, p in named if p.ndim > 1 and "embed" not in name and "hc_" not in name]
        others = [p for name, p in named if not (p.ndim > 1 and "embed" not in name and "hc_" not in name)]
        groups = [{"params": decayed, "weight_decay": DECAYED}, {"params": others, "weight_decay": 0.0}]
        on_gpu = device.type == "cuda"
        rate_of: Any = self.rate if on_gpu else rate
        self._adam = torch.optim.AdamW(groups, lr=rate_of, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)

    def step(self, loss: Tensor) -> None:
        """Go one step down."""
        self._adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self._schedule.clip)
        self._adam.step()

    def forget_gradients(self) -> None:
        """Drop gradients that belong to a graph."""
        self._adam.zero_grad(set_to_none=True)

    def schedule(self, step: int, progress: float) -> None:
        """Set the rate: up over the warm-up, then down as a cosine over the whole phase."""
        factor = LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        rate = self._highest * min(1.0, (step + 1) / self._schedule.warmup) * factor
        self.rate.fill_(rate)
        if self.rate.device.type != "cuda":
            for group in self._adam.param_groups:
                group["lr"] = rate


def text_loss(network: Network, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss of rows [B, T] with their flags, and how often each expert was picked."""
    tokens, written = (rows & (WRITTEN - 1)).long(), rows >= WRITTEN
    output = network(tokens, document_starts(tokens, BOS))
    target = tokens[:, 1:]
    weight = torch.where(written[:, 1:], 1.0, GIVEN) * ((target != PAD) & (target != BOS))
    losses = F.cross_entropy(
        network.head(output.hidden[:, :-1]).float().flatten(0, 1), target.flatten(), reduction="none"
    )
    return (losses * weight.flatten()).sum() / weight.sum(), output.loads


@torch.no_grad()
def held_out_losses(network: Network, rows: Tensor, batch: int) -> dict[str, float]:
    """Nats a token that the model is to write, apart for prose and for answers, on held-out rows."""
    sums = torch.zeros(2, 2, device=rows.device)
    for part in rows.split(batch):
        tokens, written = (part & (WRITTEN - 1)).long(), part >= WRITTEN
        starts = document_starts(tokens, BOS)
        logits = network.head(network(tokens, starts).hidden[:, :-1]).float()
        target = tokens[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        counted = written[:, 1:] & (target != PAD) & (target != BOS)
        prose = written.gather(1, (starts + 1).clamp_max(tokens.shape[1] - 1))[:, 1:]
        for index, chosen in enumerate((counted & prose, counted & ~prose)):
            sums[index] += torch.stack((losses[chosen].sum(), chosen.sum()))
    prose, answers = (sums[:, 0] / sums[:, 1].clamp_min(1)).tolist()
    return {"prose": prose, "answers": answers}


class Trainer:
    """A whole run; `report` keeps what the model card says of it."""

    def __init__(
        self, network: Network, data: Data, schedule: Schedule, config: dict[str, Any], tokenizer: Tokenizer, out: Path
    ) -> None:
        self.network, self.data, self.schedule = network, data, schedule
        self.config, self.tokenizer, self.out = config, tokenizer, out
        self.device = data.rows.device
        self.report: dict[str, Any] = {}
        self._began = time.perf_counter()
        self._random = torch.Generator().manual_seed(schedule.seed)
        torch.manual_seed(schedule.seed)

    def run(self) -> dict[str, Any]:
        """Train both, write the checkpoint; returns the report."""
        self.train_target()
        self.save()
        rows, flags = self.write_rows(self.data.prompts, self.schedule.rollouts)
        self.train_draft(rows, flags)
        self.save()
        held = self.write_rows(self.data.held_prompts, 1)
        self.report["draft_held_out"] = self.judge_draft(*held)
        self.say(f"held out: {self.report['draft_held_out']}")
        return self.report

    def warm(self) -> None:
        """Pass every step once, so that what the run will need is compiled and lies in torch's cache on disk."""
        self.schedule = replace(self.schedule, target_steps=1, rounded=1.0, draft_steps=1, rollouts=1)
        self.train_target()
        self.write_rows(self.data.prompts, 1)
        rows = self.data.rows
        self.train_draft((rows & (WRITTEN - 1)).to(torch.int32), rows >= WRITTEN)

    def say(self, text: str) -> None:
        """Write a line of the log."""
        print(f"{time.perf_counter() - self._began:7.1f} s  {text}", flush=True)

    def save(self) -> None:
        """Write the checkpoint as it is now."""
        write_checkpoint(self.network, self.config, self.tokenizer, self.out)
        size = (self.out / "model.safetensors").stat().st_size
        self.say(f"wrote {self.out} ({size / 1e6:.2f} MB)")

    def train_target(self) -> None:
        """Next-token training of everything but the draft stages."""
        schedule, network = self.schedule, self.network
        named = [(n, p) for n, p in network.named_parameters() if p.requires_grad and not n.startswith("mtp/")]
        optimizer = Optimizer(named, schedule, schedule.target_rate)
        rows = torch.empty((schedule.batch, self.data.rows.shape[1]), dtype=torch.int32, device=self.device)
        loss = torch.zeros((), device=self.device)

        def learn() -> None:
            found, loads = text_loss(network, rows)
            optimizer.step(found)
            loss.copy_(found.detach())
            with torch.no_grad():
                for prefix, load in loads.items():
                    network.weight(f"{prefix}.ffn.gate.bias").add_(torch.sign(load.mean() - load), alpha=BALANCE)

        def feed() -> None:
            chosen = torch.randint(len(self.data.rows), (schedule.batch,), generator=self._random)
            rows.copy_(self.data.rows[chosen.to(self.device)])

        limits = schedule.target_steps, self._began + schedule.target_until_s
        self._phase("target", _Phase(learn, feed, optimizer, loss, *limits, rounded=schedule.rounded))
        network.rounded = True
        for prefix in [f"layers.{layer.index}" for layer in network.config.layers]:
            bias = network.weight(f"{prefix}.ffn.gate.bias")
            network.weight(f"{prefix}.ffn.gate.bias_vl").data.copy_(bias)
        self.report["target_held_out"] = held_out_losses(network, self.data.held, schedule.batch)
        self.report["target_tokens"] = self.report["target_steps"] * rows.numel()
        self.say(f"target: held-out loss {self.report['target_held_out']}")

    def write_rows(self, prompts: Tensor, times: int) -> tuple[Tensor, Tensor]:
        """Rows [N, T] that the target writes from prompts, and which tokens of them it wrote."""
        schedule = self.schedule
        temperatures = torch.tensor(TEMPERATURES, device=self.device).repeat(schedule.rollout_rows // 4 or 1)
        firsts = torch.nonzero(F.pad(prompts, (1, 0), value=-1)[:-1] < 0).squeeze(1)
        with torch.no_grad():
            writer = Writer(self.network, prompts, temperatures, schedule.tokens, eos=EOS, pad=PAD)
            writer.reset(firsts[torch.arange(len(temperatures), device=self.device) % len(firsts)])
            step = Step(writer.step, self.device)
            made: list[tuple[Tensor, Tensor]] = []
            for done in range(times):
                if done and time.perf_counter() - self._began > schedule.write_until_s:
                    break
                chosen = torch.randint(len(firsts), temperatures.shape, generator=self._random)
                writer.reset(firsts[chosen.to(self.device)])
                for _ in range(schedule.tokens):
                    step()
                made.append((writer.tokens.to(torch.int32), writer.flags.clone()))
        tokens, flags = torch.cat([part[0] for part in made]), torch.cat([part[1] for part in made])
        self.say(f"the target wrote {int(flags.sum())} tokens in {len(tokens)} rows")
        return tokens, flags

    def train_draft(self, written_rows: Tensor, flags: Tensor) -> None:
        """Train the draft stages on rows that the target wrote."""
        schedule, network = self.schedule, self.network
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name.startswith("mtp/") and not name.endswith(("bias", "bias_vl")))
        named = [(n, p) for n, p in network.named_parameters() if p.requires_grad]
        optimizer = Optimizer(named, schedule, schedule.draft_rate)
        shape = (schedule.draft_batch, written_rows.shape[1])
        tokens = torch.empty(shape, dtype=torch.int64, device=self.device)
        written = torch.empty(shape, dtype=torch.bool, device=self.device)
        loss, expected = torch.zeros((), device=self.device), torch.zeros((), device=self.device)

        def learn() -> None:
            found = draft_loss(network, tokens, document_starts(tokens, BOS), written, schedule.anchors)
            optimizer.step(found.loss)
            loss.copy_(found.loss.detach())
            expected.copy_(found.expected)

        def feed() -> None:
            chosen = torch.randint(len(written_rows), (schedule.draft_batch,), generator=self._random).to(self.device)
            tokens.copy_(written_rows[chosen])
            written.copy_(flags[chosen])

        limits = schedule.draft_steps, self._began + schedule.draft_until_s
        self._phase("draft", _Phase(learn, feed, optimizer, loss, *limits, expected=expected))

    @torch.no_grad()
    def judge_draft(self, tokens: Tensor, flags: Tensor) -> dict[str, Any]:
        """Agreement by place and expected tokens a round, on rows of each temperature."""
        found: dict[str, Any] = {}
        for temperature in sorted(set(TEMPERATURES)):
            chosen = [i for i in range(len(tokens)) if TEMPERATURES[i % len(TEMPERATURES)] == temperature][:512]
            parts: list[DraftLoss] = []
            for start in range(0, len(chosen), self.schedule.draft_batch):
                rows = torch.tensor(chosen[start : start + self.schedule.draft_batch], device=self.device)
                read = tokens[rows].long()
                starts = document_starts(read, BOS)
                parts.append(draft_loss(self.network, read, starts, flags[rows], self.schedule.anchors))
            agreement = torch.stack([part.agreement for part in parts]).mean(0).tolist()
            expected = torch.stack([part.expected for part in parts]).mean().item()
            found[f"temperature {temperature:g}"] = {
                "agreement at temperature 1": [round(share, 3) for share in agreement],
                "expected tokens a round": round(expected, 3),
            }
        return found

    def _tell(self, name: str, count: int, phase: "_Phase") -> None:
        more = "" if phase.expected is None else f", {phase.expected.item():.3f} tokens a round expected"
        self.say(f"{name}: step {count}, loss {phase.loss.item():.4f}{more}")

    def _phase(self, name: str, phase: "_Phase") -> None:
        """Run steps until the clock is over; the last part with everything in its format."""
        network = self.network
        network.rounded = phase.rounded >= 1.0
        phase.feed()
        step = Step(phase.learn, self.device)
        self.say(f"{name}: first step done")
        clock = _Clock(phase.steps, time.perf_counter(), phase.until)
        count = 0
        while not clock.over(count):
            progress = clock.progress(count)
            if not network.rounded and progress > 1 - phase.rounded:
                network.rounded = True
                del step
                phase.optimizer.forget_gradients()
                step = Step(phase.learn, self.device)
                self.say(f"{name}: from here on in the released formats")
            phase.optimizer.schedule(count, progress)
            phase.feed()
            step()
            count += 1
            if count % SHOWN == 0:
                self._tell(name, count, phase)
        self._tell(name, count, phase)
        phase.optimizer.forget_gradients()
        self.report[f"{name}_steps"], self.report[f"{name}_loss"] = count, phase.loss.item()


@dataclass(frozen=True)
class _Clock:
    """When a phase is over: after `steps`, or at the moment `until`, whichever comes first; it began at `began`."""

    steps: int
    began: float
    until: float

    def progress(self, step: int) -> float:
        """Share of the phase that is over before this step."""
        return max(step / self.steps, (time.perf_counter() - self.began) / max(1e-3, self.until - self.began))

    def over(self, step: int) -> bool:
        """Whether there is no further step."""
        return step > 0 and self.progress(step) >= 1.0


@dataclass(frozen=True)
class _Phase:
    """A phase's step and what goes with it; `rounded` is the share of its end that trains in the formats."""

    learn: Callable[[], None]
    feed: Callable[[], None]
    optimizer: Optimizer
    loss: Tensor
    steps: int
    until: float
    rounded: float = 1.0
    expected: Tensor | None = None
