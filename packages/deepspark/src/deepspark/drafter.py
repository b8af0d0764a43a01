"""The drafter: owns the draft state of every sequence and joins source, scheduler, noise and verification into a step.

The target's forward pass and caches are the engine's; so are the sampling transform's settings, which it hands in.
A step goes: `propose`, the engine lays and runs the rows (`Proposal.pack`), `verify`, `record`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspark.calibration import Calibration, DriftMonitor, RoundLog
from deepspark.cost import CostTable
from deepspark.errors import InputError
from deepspark.estimate import RealisedAcceptance
from deepspark.noise import accept_uniforms, draft_uniforms, extra_uniforms, match_gumbel
from deepspark.parking import Parking
from deepspark.policy import Asynchronous, Policy
from deepspark.proposing import Blocks, Chooser, Drafts, Law, by_argmax, by_match_noise, by_uniforms
from deepspark.ragged import RaggedBatch, pack
from deepspark.scheduler import Allocation, Scheduler, StepRequests
from deepspark.telemetry import Telemetry
from deepspark.transform import SamplingSettings, SettingsTable, transform_rows
from deepspark.verify import Noise, Rows, Rule, Verdict, VerifyKernels, verify_rows

__all__ = ["DSparkDrafter", "DraftRequest", "DraftSource", "DrafterSettings", "Proposal", "draft_law"]

Ints = NDArray[np.int64]

_log = logging.getLogger(__name__)


class DraftSource(Protocol):
    """Anything that drafts blocks: `proposing.HeadedSource`, or a table, or a retrieval index."""

    @property
    def width(self) -> int:
        """Drafts of a step."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def draft(self, block: Blocks, law: Law, choose: Chooser) -> Drafts:
        """Draft one block for each sequence; tokens must come from `choose`, applied to `law` of the draft logits."""


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """rule and policy are checked against each other; calibration None takes confidences as they are."""

    rule: Rule = "chain"
    policy: Policy = field(default_factory=Asynchronous)
    parking: Parking | None = field(default_factory=Parking)
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence of a step.

    anchor: its last token, not yet eaten by the target, at absolute `position`.  limit: most drafts it may verify
    (`emission.longest_draft`).  seed: of the request; draft noise is keyed by it and `position`.
    """

    slot: int
    anchor: int
    position: int
    seed: int
    limit: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a step verifies, as plain host numbers.

    drafts: [R, g]; only the first allocation.lengths [R] of each are verified.  certain: the drafts' laws are one-hot.
    scores: [R, g] the confidence head's logits, None without one.
    """

    requests: tuple[DraftRequest, ...]
    drafts: Ints
    allocation: Allocation
    certain: bool = True
    scores: NDArray[np.float64] | None = None

    @property
    def lengths(self) -> Ints:
        """Verified drafts [R]."""
        return self.allocation.lengths

    @property
    def drafted(self) -> bool:
        """Whether the drafter ran."""
        return self.allocation.survivals is not None

    def pack(self, padded_rows: int | None = None) -> RaggedBatch:
        """Lay the step's rows flat; see `ragged.pack`."""
        anchors = np.array([each.anchor for each in self.requests], np.int64)
        positions = np.array([each.position for each in self.requests], np.int64)
        return pack(anchors, self.drafts, self.lengths, positions, padded_rows)


def draft_law(requests: Sequence[DraftRequest], device: torch.device) -> Law:
    """Return the requests' own sampling transform as the law of their drafts (bans included, grammar not)."""
    table = SettingsTable.of([each.sampling for each in requests], device)
    bans = [(row, token) for row, each in enumerate(requests) for token in each.sampling.ban]

    def law(logits: Tensor, offset: int) -> Tensor:
        if not bans:
            return transform_rows(logits, table)
        allowed = torch.ones_like(logits, dtype=torch.bool)
        rows, tokens = zip(*bans, strict=True)
        allowed[list(rows), list(tokens)] = False
        return transform_rows(logits, table, allowed)

    return law


class DSparkDrafter:
    """Drafts, schedules and verifies for up to `num_slots` concurrent sequences.

    Keeps the draft laws of each slot's last block on the source's device (slot 0 of the pool is padding).
    kernels: a device's vocabulary-wide work, None the reference.
    """

    def __init__(
        self,
        source: DraftSource,
        cost: CostTable,
        num_slots: int,
        settings: DrafterSettings | None = None,
        *,
        kernels: VerifyKernels | None = None,
        device: torch.device | None = None,
    ) -> None:
        chosen = settings or DrafterSettings()
        self.source = source
        self.rule = chosen.rule
        self.width = source.width
        self.scheduler = Scheduler(chosen.policy, cost, self.width, num_slots, rule=chosen.rule, parking=chosen.parking)
        self.telemetry = Telemetry(num_slots, self.width)
        self.rounds: RoundLog | None = None
        """Set it to collect calibration rounds."""
        self._calibration = chosen.calibration or Calibration.identity(self.width)
        self._acceptance = RealisedAcceptance(self.width)
        self._drift = DriftMonitor(self.width)
        self._kernels = kernels
        self._device = device or torch.device("cpu")
        self._pool: Tensor | None = None
        self._num_slots = num_slots

    def begin(self, slot: int) -> None:
        """Give `slot` to a new sequence."""
        self.scheduler.begin(slot)
        self.telemetry.begin(slot)

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """Decide whether to draft, draft, and choose how many drafts each request verifies."""
        step = self._step(requests)
        decision = self.scheduler.decide(step)
        if not decision.draft:
            nothing = np.zeros((len(requests), self.width), np.int64)
            return Proposal(tuple(requests), nothing, self.scheduler.allocate(decision, None, step))
        block = Blocks(
            anchors=self._column([each.anchor for each in requests]),
            positions=self._column([each.position for each in requests]),
            slots=self._column([each.slot for each in requests]),
        )
        drafts = self.source.draft(block, draft_law(requests, self._device), self._chooser(requests, block))
        if drafts.Q is not None:
            self._store(block.slots, drafts.Q)
        scores = None
        if drafts.confidence_logits is None:
            conf = self._acceptance.confidences(len(requests))
        else:
            scores = drafts.confidence_logits.to(torch.float64).cpu().numpy()
            conf = self._calibration.confidences(scores)
        allocation = self.scheduler.allocate(decision, conf, step)
        return Proposal(tuple(requests), drafts.tokens.cpu().numpy(), allocation, drafts.Q is None, scores)

    def verify(self, P: Tensor, proposal: Proposal) -> Verdict:
        """Judge the step's rows: P [T, V] are the target's laws of `proposal.pack()`'s rows (logits are enough for
        'greedy').
        """
        batch = proposal.pack()
        if P.shape[0] < batch.num_rows:
            raise InputError(f"the step has {batch.num_rows} rows, got laws of {P.shape[0]}")
        requests = proposal.requests
        seeds, starts = self._column([r.seed for r in requests]), self._column([r.position for r in requests])
        slots = self._column([r.slot for r in requests])
        # Without drafts there is nothing that a coupled last row could judge.
        rule: Rule = "chain" if self.rule == "coupled" and not proposal.drafted else self.rule
        rows = Rows(
            P=P,
            start=self._column(batch.cu[:-1].tolist()),
            ell=self._column(proposal.lengths.tolist()),
            x=torch.from_numpy(proposal.drafts).to(self._device),
            Q=None if proposal.certain else self._pool,
            slot=slots + 1,
        )
        return verify_rows(rows, self._noise(rule, seeds, starts, batch, P.shape[1]), rule, self._kernels)

    def record(self, proposal: Proposal, verdict: Verdict) -> None:
        """Learn from the step and count it; warns in the log where confidences have drifted."""
        accepted = verdict.accepted.cpu().numpy()
        outcome = self.scheduler.record(self._step(proposal.requests), proposal.allocation, accepted)
        self.telemetry.record(outcome)
        self._acceptance.update(outcome)
        if proposal.scores is None or outcome.survivals is None:
            return
        if self.rounds is not None:
            self.rounds.add(proposal.scores, proposal.lengths, accepted)
        warning = self._drift.update(outcome.survivals, proposal.lengths, accepted)
        if warning is not None:
            _log.warning(warning)

    def observe(self, proposal: Proposal, ms: float) -> None:
        """Teach the cost table how long the target's pass over the proposal's rows took, drafter not counted."""
        rows = len(proposal.requests) + int(proposal.lengths.sum())
        self.scheduler.cost.observe(rows, self._step(proposal.requests).context_tokens, ms)

    def _step(self, requests: Sequence[DraftRequest]) -> StepRequests:
        weights = np.array([each.weight for each in requests])
        return StepRequests(
            slots=np.array([each.slot for each in requests], np.int64),
            limits=np.array([each.limit for each in requests], np.int64),
            context_tokens=float(sum(each.position for each in requests)),
            weights=None if (weights == 1).all() else weights,
        )

    def _chooser(self, requests: Sequence[DraftRequest], block: Blocks) -> Chooser:
        if self.rule == "greedy":
            return by_argmax()
        seeds = self._column([each.seed for each in requests])
        if self.rule == "match":
            return by_match_noise(seeds, block.positions)
        return by_uniforms(draft_uniforms(seeds, block.positions, self.width))

    def _noise(self, rule: Rule, seeds: Tensor, starts: Tensor, batch: RaggedBatch, vocab_size: int) -> Noise:
        if rule == "greedy":
            return Noise()
        if rule == "match":
            positions = torch.from_numpy(batch.pos + 1).to(self._device)
            return Noise(match=match_gumbel(seeds[torch.from_numpy(batch.req).to(self._device)], positions, vocab_size))
        return Noise(accept=accept_uniforms(seeds, starts, self.width), extra=extra_uniforms(seeds, starts))

    def _store(self, slots: Tensor, Q: Tensor) -> None:
        if self._pool is None:
            self._pool = torch.zeros(self._num_slots + 1, *Q.shape[1:], dtype=Q.dtype, device=Q.device)
        self._pool[slots + 1] = Q

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
