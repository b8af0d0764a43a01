"""The drafter as an engine of batches meets it: owns draft state by sequence, in columns of host numbers.

The engine's shape for it is `deepinfer.engine.drafter.Drafter`; the same step for lists of requests is `drafter`'s.
A step of the engine goes: `verify` what was proposed last, then `propose` for the next step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspark.backbone import DraftBackbone
from deepspark.calibration import Calibration
from deepspark.cost import CostTable
from deepspark.errors import ConfigError
from deepspark.estimate import Outcome
from deepspark.heads import HeadsConfig, SequentialHeads
from deepspark.noise import accept_uniforms, draft_uniforms, extra_uniforms
from deepspark.parking import Parking
from deepspark.policy import Asynchronous, Fixed, Policy
from deepspark.proposing import Blocks, Chooser, Drafts, HeadedSource, by_argmax, by_match_noise, by_uniforms
from deepspark.ragged import count_accepted
from deepspark.scheduler import Allocation, Scheduler, StepRequests
from deepspark.transform import GREEDY_BELOW, SettingsTable, transform_rows
from deepspark.verify import Noise, Rows, verify_rows

__all__ = ["HeadTensors", "ServedRows", "ServingDrafter", "ServingRule", "Verdicts"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ServingRule = Literal["match", "chain", "block", "greedy"]


class ServedRows(Protocol):
    """The sequences of a step, as columns [R]; the order of their filters is top_k, top_p, min_p.

    states: name a sequence.  anchors: its last token, not yet eaten by the target, at `positions`.  limits: most drafts
    that it may verify; 0 takes part in the step without drafts.
    """

    states: Ints
    anchors: Ints
    positions: Ints
    seeds: Ints
    limits: Ints
    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats


class HeadTensors(Protocol):
    """V4.1's heads: markov_embed and markov_head [V, rank], confidence [1, D + rank]."""

    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Of R sequences: accepted drafts, the token behind them, and how many drafts were expected to be accepted."""

    accepted: Ints
    tokens: Ints
    predicted: Floats


class ServingDrafter:
    """DSpark for an engine's continuous batch.

    backbone: the engine's draft stages.  num_states: sequences that may run at once.  rule: how drafts are judged.
    mode: "auto" verifies as many as pay, and rests while none do; "on" verifies whole blocks, whatever it costs.
    """

    def __init__(  # noqa: PLR0913 - keyword-only behind the second
        self,
        backbone: DraftBackbone,
        heads: HeadTensors,
        *,
        num_states: int,
        rule: ServingRule = "match",
        mode: Literal["auto", "on"] = "auto",
        policy: Policy | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if rule not in ("match", "chain", "block", "greedy"):
            raise ConfigError(f"rule must be 'match', 'chain', 'block' or 'greedy', got {rule!r}")
        if mode not in ("auto", "on"):
            raise ConfigError(f"mode must be 'auto' or 'on', got {mode!r}")
        self.rule = rule
        self._source = HeadedSource(backbone, _heads_of(heads))
        self._width = backbone.block_size
        self._device = heads.markov_embed.device
        self._num_states = num_states
        self._calibration = calibration or Calibration.identity(self._width)
        chosen = policy or (Fixed(self._width) if mode == "on" else Asynchronous(lag=1))
        parking = Parking() if mode == "auto" else None
        costs = CostTable([1], [1.0], mode="linear")
        self._scheduler = Scheduler(chosen, costs, self._width, num_states, rule=rule, parking=parking)
        self._drafts = np.zeros((num_states, self._width), np.int64)
        self._survivals = np.zeros((num_states, self._width))
        self._seeds, self._starts = np.zeros((2, num_states), np.int64)
        self._laws: Tensor | None = None
        self._step = 0
        self._to_time = 0

    @property
    def width(self) -> int:
        """Drafts of a step."""
        return self._width

    @property
    def needs_laws(self) -> bool:
        """Whether `verify` reads the target's laws; else the tokens of plain decoding are enough."""
        return self.rule in ("chain", "block")

    @property
    def rests_for(self) -> int:
        """Steps until drafting may begin again, as far as can be known; 0 while it goes on."""
        return self._scheduler.rests_for

    def rest(self, requests: int) -> bool:
        """Whether the coming step of so many sequences drafts nothing, without asking `propose`; counts the step."""
        return self._scheduler.rest(requests)

    def set_costs(self, target_ms: Mapping[int, float], draft_ms: Mapping[int, float]) -> None:
        """Take measured milliseconds of a target step by its rows, and of drafting by its sequences."""
        sizes, ms = _columns(target_ms)
        # No step is dearer than one of more rows: a hiccup in the measurement would make drafts look cheap.
        ms = np.minimum.accumulate(ms[::-1])[::-1].tolist()
        self._scheduler.cost = CostTable(
            sizes, ms, mode="linear", draft_sizes=list(draft_ms), draft_ms=list(draft_ms.values())
        )
        self._to_time = _TIMED_FIRST if self._scheduler.parking is not None else 0

    def rehearse(self, rows: ServedRows) -> None:
        """Draft for `rows` and forget it, to be timed."""
        self._draft(rows, np.arange(rows.states.size)).tokens.cpu()

    def begin(self, state: int) -> None:
        """Give `state` to a new sequence."""
        self._scheduler.begin(state)

    def propose(self, rows: ServedRows, room: int) -> tuple[Ints, Ints] | None:
        """Return drafts [R, g] and how many [R] of them to verify, at most `room` in all; None: none in this step."""
        if self._to_time > 0:
            return None
        limits = rows.limits
        if not isinstance(self._scheduler.policy, Asynchronous):
            # Without a budget the room is shared out beforehand: what a draft has drawn must not decide on it.
            limits = np.minimum(limits, room // max(int((limits > 0).sum()), 1))
        step = StepRequests(rows.states, limits, float(rows.positions.sum()))
        decision = self._scheduler.decide(step)
        if not decision.draft:
            return None
        if decision.budget is not None:
            decision = replace(decision, budget=min(decision.budget, room))
        places = np.flatnonzero(limits > 0)
        drafts = self._draft(rows, places)
        states = rows.states[places]
        if drafts.Q is not None:
            self._keep_laws(states, drafts.Q)
        assert drafts.confidence_logits is not None
        confidences = np.zeros((rows.states.size, self._width))
        confidences[places] = self._calibration.confidences(drafts.confidence_logits.to(torch.float64).cpu().numpy())
        allocation = self._scheduler.allocate(decision, confidences, step)
        assert allocation.survivals is not None
        tokens = np.zeros((rows.states.size, self._width), np.int64)
        tokens[places] = drafts.tokens.cpu().numpy()
        self._drafts[rows.states], self._survivals[rows.states] = tokens, allocation.survivals
        self._seeds[rows.states], self._starts[rows.states] = rows.seeds, rows.positions
        self._step = allocation.step
        return tokens, allocation.lengths

    def verify(self, states: Ints, counts: Ints, drawn: Ints | None, laws: Tensor | None) -> Verdicts:
        """Judge the last proposals of `states` [R], of which the first `counts` [R] were computed.

        Their rows lie flat, counts + 1 of each: `drawn` [T] the tokens that plain decoding draws there, or `laws` [T,
        V] the target's laws, as `needs_laws` says.
        """
        starts = np.cumsum(counts + 1) - counts - 1
        if drawn is not None:
            offsets = np.minimum(np.arange(self._width), counts[:, None])
            accepted = count_accepted(drawn[starts[:, None] + offsets] == self._drafts[states], counts)
            tokens = drawn[starts + accepted]
        else:
            assert laws is not None
            accepted, tokens = self._judge(states, counts, starts, laws)
        step = StepRequests(states, counts)
        outcome = self._scheduler.record(step, Allocation(counts, self._survivals[states], self._step), accepted)
        return Verdicts(accepted, tokens, _promised(outcome))

    def observe(self, rows: int, context_tokens: int, target_ms: float) -> None:
        """Learn how long a step of the target took that only decoded; drafting is not in it."""
        self._to_time -= 1
        self._scheduler.cost.observe(rows, context_tokens, target_ms)

    def observe_draft(self, requests: int, draft_ms: float) -> None:
        """Learn how long `propose` took with drafts for so many sequences."""
        self._scheduler.cost.observe_draft(requests, draft_ms)

    def _judge(self, states: Ints, counts: Ints, starts: Ints, laws: Tensor) -> tuple[Ints, Ints]:
        slots = self._column(states)
        seeds, begins = self._column(self._seeds[states]), self._column(self._starts[states])
        rows = Rows(
            P=laws,
            start=self._column(starts),
            ell=self._column(counts),
            x=self._column(self._drafts[states]),
            Q=self._laws,
            slot=slots,
        )
        noise = Noise(accept=accept_uniforms(seeds, begins, self._width), extra=extra_uniforms(seeds, begins))
        verdict = verify_rows(rows, noise, "block" if self.rule == "block" else "chain")
        return verdict.accepted.cpu().numpy(), verdict.token.cpu().numpy()

    def _draft(self, rows: ServedRows, places: Ints) -> Drafts:
        columns = (rows.anchors, rows.positions, rows.states)
        block = Blocks(*(self._column(column[places]) for column in columns))
        temperature = rows.temperature[places]
        settings = SettingsTable(
            temperature=self._column(temperature),
            top_k=self._column(rows.top_k[places]),
            top_p=self._column(rows.top_p[places]),
            min_p=self._column(rows.min_p[places]),
            order="k_p",
        )
        if self.rule == "greedy" or (self.rule == "match" and bool((temperature < GREEDY_BELOW).all())):
            return self._source.draft(block, lambda logits, _: logits, by_argmax())
        seeds = self._column(rows.seeds[places])
        return self._source.draft(
            block, lambda logits, _: transform_rows(logits, settings), self._chooser(seeds, block)
        )

    def _chooser(self, seeds: Tensor, block: Blocks) -> Chooser:
        if self.rule == "match":
            return by_match_noise(seeds, block.positions)
        return by_uniforms(draft_uniforms(seeds, block.positions, self._width))

    def _keep_laws(self, states: Ints, Q: Tensor) -> None:
        if self._laws is None:
            self._laws = torch.zeros(self._num_states, *Q.shape[1:], dtype=Q.dtype, device=Q.device)
        self._laws[self._column(states)] = Q

    def _column(self, values: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


_TIMED_FIRST = 5
"""Steps of decoding that are timed before drafts begin, where their gain is weighed against such steps."""


def _heads_of(tensors: HeadTensors) -> SequentialHeads:
    vocab_size, rank = tensors.markov_embed.shape
    config = HeadsConfig(
        vocab_size=vocab_size,
        hidden_size=tensors.confidence.shape[1] - rank,
        markov_rank=rank,
        confidence_reads="prenorm",
        confidence_bias=False,
    )
    with torch.device("meta"):
        heads = SequentialHeads(config)
    weights = {
        "markov_head.markov_w1.weight": tensors.markov_embed,
        "markov_head.markov_w2.weight": tensors.markov_head,
        "confidence_head.proj.weight": tensors.confidence,
    }
    heads.load_state_dict(weights, assign=True)
    return heads.eval()


def _columns(times: Mapping[int, float]) -> tuple[list[int], list[float]]:
    sizes = sorted(times)
    return sizes, [times[size] for size in sizes]


def _promised(outcome: Outcome) -> Floats:
    assert outcome.promised is not None
    return outcome.promised.sum(axis=1)
