"""The sampler of an engine that drafts: rows of draft tokens are judged, and new drafts proposed behind what they gave.

What one row draws is the `Sampler`'s, which also serves the sequences that verify nothing; what is proposed and
accepted is the `Drafter`'s; who runs is the `Scheduler`'s.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.batch import ROLLBACK_TOKENS, Batch
from deepinfer.accelerator.ops.sampling import law_of
from deepinfer.engine.config import DraftRule, EngineConfig
from deepinfer.engine.draft_backbone import StagesBackbone, TimedModel, Trial
from deepinfer.engine.draft_context import DraftContext
from deepinfer.engine.draft_report import RESTED, DraftStep
from deepinfer.engine.draft_rules import DraftRules
from deepinfer.engine.drafter import Drafter, DrafterClass, DraftMode, DraftRows, DraftVerdict, Judged
from deepinfer.engine.model_runner import Model, Transfer
from deepinfer.engine.plan import Plan, Proposal, Sampled
from deepinfer.engine.request import Logprobs
from deepinfer.engine.sampler import Flight, Sampler
from deepinfer.engine.sequence import NO_LOGPROBS, Integers, SequenceTable
from deepinfer.errors import ConfigError
from deepinfer.model.config import ModelConfig
from deepinfer.model.deepseek import ModelOutput
from deepinfer.model.draft import DraftStages
from deepinfer.model.kv_cache import KVCache

OBSERVED_REST = 8
"""While drafting rests, one in so many steps is timed."""


@dataclass(frozen=True, slots=True)
class _Gains:
    """What the sequences that draw gain: the first counts [R] of token_ids [R, W + 1]."""

    token_ids: Integers
    counts: Integers

    @property
    def last(self) -> Integers:
        """The newest token of each."""
        return self.token_ids[np.arange(len(self.counts)), self.counts - 1]

    @property
    def flat(self) -> Integers:
        """All tokens, one sequence behind the other."""
        return self.token_ids[np.arange(self.token_ids.shape[1]) < self.counts[:, None]]


class Speculation:
    """Takes the place of the `Sampler` in the loop.

    The drafts of a step need the tokens before them, so that it is read before the next is launched; while drafting
    rests the loop overlaps as it does without drafts.
    """

    def __init__(self, parts: "Parts", drafter: Drafter, model: TimedModel, context: DraftContext) -> None:
        self._sampler, self._table = parts.sampler, parts.table
        self._drafter = drafter
        self._model = model
        self._context = context
        self._budget = parts.config.max_num_batched_tokens
        # What leaves for slower memory is read as it stands.
        self._may_hold = not parts.config.prefix_cache_host_bytes and parts.config.prefix_cache_dir is None
        self._known = np.full(len(parts.table.sequences), -1, dtype=np.int64)
        self._rules = DraftRules(parts.sampler, parts.table, reads_laws=drafter.needs_laws)
        self._must_ask = self._was_ahead = False

    @property
    def may_run_ahead(self) -> bool:
        """Whether the step in flight proposes nothing, so that the next one can be launched without its tokens."""
        return self._drafter.rests_for > 0 and not self._must_ask

    @torch.inference_mode()
    def draw(self, output: ModelOutput, batch: Batch, plan: Plan) -> Flight:
        """Draw at every row that counts; nothing is waited for."""
        if output.hidden is not None:
            hold = self._may_hold and self._drafter.rests_for > 0
            self._context.take(output.hidden, batch, plan.rows, hold=hold)
        rows = plan.rows[plan.samples]
        asked = self._table.draft_counts[rows] >= 0
        if not asked.any():
            return self._sampler.draw(output, batch, plan)
        samples = plan.samples.copy()
        samples[plan.samples] = ~asked
        plain = self._sampler.draw(output, batch, replace(plan, samples=samples))
        return replace(plain, plan=plan, judged=self._judged(output, plan, plain.plan, np.flatnonzero(asked)))

    @torch.inference_mode()
    def read(self, flight: Flight, *, ahead: bool = False) -> Sampled:
        """Wait for the step, judge its drafts, and propose those of the next, unless that is launched `ahead`."""
        if flight.judged is None:
            return self._read_plain(flight, ahead=ahead)
        judged, plan = flight.judged, flight.plan
        plain = self._sampler.read(replace(flight, plan=judged.plain))
        rows = plan.rows[plan.samples]
        gains = _Gains(np.zeros((len(rows), self._drafter.width + 1), np.int64), np.ones(len(rows), np.int64))
        gains.token_ids[np.delete(np.arange(len(rows)), judged.places), 0] = plain.token_ids
        verdict = self._verify(judged)
        self._take(gains, judged, verdict)
        steps = self._steps(judged, verdict)
        logprobs = {**plain.logprobs, **self._logprobs(gains, judged)}
        self._observe(plan)
        proposal = self._propose(plan, rows, gains)
        lost = plain.lost.union(rows[gains.last < 0].tolist())
        return Sampled(gains.flat.clip(0), gains.counts, logprobs, plain.prompt_logprobs, lost, proposal, steps)

    def _read_plain(self, flight: Flight, *, ahead: bool) -> Sampled:
        """Wait for a step without drafts; while drafting rests that is all."""
        sampled, plan = self._sampler.read(flight), flight.plan
        if not (ahead or self._was_ahead or self._drafter.rests_for % OBSERVED_REST):
            self._observe(plan)
        self._was_ahead = ahead
        rows = plan.rows[plan.samples]
        rested = self._drafter.rest(len(rows))
        self._must_ask = ahead and not rested
        if rested or ahead:
            return replace(sampled, draft_steps=dict.fromkeys(rows.tolist(), RESTED))
        gains = _Gains(sampled.token_ids[:, None], sampled.counts)
        if sampled.lost:
            gains.token_ids[np.isin(rows, list(sampled.lost))] = -1
        proposal = self._propose(plan, rows, gains)
        steps = dict.fromkeys(rows.tolist(), RESTED) if proposal is None and self._drafter.rests_for else {}
        return replace(sampled, token_ids=sampled.token_ids.clip(0), proposal=proposal, draft_steps=steps)

    def _judged(self, output: ModelOutput, plan: Plan, plain: Plan, places: Integers) -> Judged:
        table, rows = self._table, plan.rows[plan.samples]
        drafts = np.zeros_like(rows) if plan.drafts is None else plan.drafts[plan.samples]
        counts = drafts[places]
        spans = counts + 1
        offsets = np.arange(int(spans.sum())) - np.repeat(np.cumsum(spans) - spans, spans)
        ends = np.cumsum(plan.logit_counts)[plan.samples][places]
        owners = np.repeat(rows[places], spans)
        wanted = np.repeat(ends - spans, spans) + offsets
        logits = output.logits
        if len(wanted) != logits.shape[0]:
            logits = logits.index_select(0, torch.from_numpy(wanted).to(logits.device))
        positions = table.lengths[owners] + offsets
        ruled = self._rules.apply(logits, rows[places], counts)
        if self._drafter.needs_laws:
            laws = law_of(ruled, self._sampler.parameters(owners, positions))
            return Judged(plain, places, rows[places], counts, logits, ruled, None, laws)
        tokens = self._sampler.draw_rows(ruled, owners, positions).masked_fill(_broken(logits), -1)
        return Judged(plain, places, rows[places], counts, logits, ruled, tokens, None)

    def _verify(self, judged: Judged) -> DraftVerdict:
        drawn = None if judged.tokens is None else judged.tokens.cpu().numpy()
        return self._drafter.verify(judged.rows, judged.counts, drawn, judged.laws)

    def _take(self, gains: _Gains, judged: Judged, verdict: DraftVerdict) -> None:
        """Lay accepted drafts, and the token behind them, into `gains`."""
        places, accepted = judged.places, verdict.accepted
        tokens = verdict.tokens
        if judged.laws is not None:
            broken = np.add.reduceat(_broken(judged.logits).cpu().numpy(), _starts(judged.counts)) > 0
            tokens = np.where(broken, -1, tokens)
        gains.token_ids[places, :-1] = self._table.draft_tokens[judged.rows]
        gains.token_ids[places, accepted] = tokens
        gains.counts[places] = accepted + 1

    def _steps(self, judged: Judged, verdict: DraftVerdict) -> dict[int, DraftStep]:
        columns = (judged.counts, verdict.accepted, verdict.predicted)
        values = zip(*(column.tolist() for column in columns), strict=True)
        width = self._drafter.width
        return {row: DraftStep(width, *value) for row, value in zip(judged.rows.tolist(), values, strict=True)}

    def _logprobs(self, gains: _Gains, judged: Judged) -> dict[int, Logprobs]:
        """Log-probabilities of the target for what judged sequences gained: token i comes from row i."""
        wanted = self._table.logprobs[judged.rows]
        starts = _starts(judged.counts)
        found: dict[int, Logprobs] = {}
        for i in np.flatnonzero(wanted != NO_LOGPROBS).tolist():
            place, start = int(judged.places[i]), int(starts[i])
            tokens = gains.token_ids[place, : gains.counts[place]]
            row = int(judged.rows[i])
            logits = (judged.ruled if self._table.processed[row] else judged.logits)[start : start + len(tokens)]
            # The step has been counted already, so the first of its tokens is the last that the table counts.
            found[row] = self._sampler.token_logprobs(logits, row, int(self._table.lengths[row]) - 1, tokens)
        return found

    def _observe(self, plan: Plan) -> None:
        """Tell the drafter how long a step took that only decoded."""
        known = plan.counts if plan.drafts is None else plan.counts - plan.drafts
        if len(known) and (plan.samples & (known == 1)).all():
            taken_ms = self._model.clock.now_ms() - self._model.began_ms
            self._drafter.observe(int(plan.counts.sum()), int(plan.starts.sum()), taken_ms)

    def _propose(self, plan: Plan, rows: Integers, gains: _Gains) -> Proposal | None:
        """Ask for drafts behind the last tokens of all sequences that go on."""
        table, began_ms = self._table, self._model.clock.now_ms()
        self._welcome(rows)
        # The table counts one token of this step; accepted drafts come on top.
        positions = table.lengths[rows] - 1 + gains.counts - 1
        most = np.minimum(self._drafter.width, table.limits[rows] - positions - 2)
        limits = np.where(gains.last < 0, 0, most).clip(0)
        for i, row in enumerate(rows.tolist()):
            stop_ids = table[row].stop_ids
            if stop_ids and limits[i] and not stop_ids.isdisjoint(gains.token_ids[i, : gains.counts[i]].tolist()):
                limits[i] = 0
        if not limits.any():
            return None
        self._context.flush()
        asked = DraftRows(
            states=rows,
            anchors=gains.last,
            positions=positions,
            seeds=table.seeds[rows],
            limits=limits,
            temperature=table.temperature[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            min_p=table.min_p[rows],
        )
        proposed = self._drafter.propose(asked, self._budget - len(plan.rows))
        if proposed is None:
            return None
        drafting = np.flatnonzero(limits > 0)
        drafts, counts = (column[drafting] for column in proposed)
        if table.host_bound[rows[drafting]].any():
            gained = [gains.token_ids[i, : gains.counts[i]].tolist() for i in drafting.tolist()]
            counts = self._rules.cut(rows[drafting], gained, drafts, counts)
        self._drafter.observe_draft(len(drafting), self._model.clock.now_ms() - began_ms)
        return Proposal(rows[drafting], drafts, counts)

    def _welcome(self, rows: Integers) -> None:
        """Tell the drafter which rows have become another sequence's."""
        for row in rows.tolist():
            number = self._table[row].id
            if number != self._known[row]:
                self._known[row] = number
                self._drafter.begin(row)


def _starts(counts: Integers) -> Integers:
    """First row of each judged sequence."""
    return np.cumsum(counts + 1) - counts - 1


def _broken(logits: Tensor) -> Tensor:
    """Rows [N] whose logits are not finite: the largest of a row is NaN where any of them is."""
    return ~logits.amax(-1).isfinite()


@dataclass(frozen=True)
class Parts:
    """The parts of an engine that drafting touches."""

    model: Model
    model_config: ModelConfig
    config: EngineConfig
    table: SequenceTable
    cache: KVCache
    transfer: Transfer
    sampler: Sampler


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts: the model's stages, who makes drafts of their rows, and by which rule they are judged.

    mode: "auto" drafts where it pays, "on" always.
    """

    stages: DraftStages
    drafter: DrafterClass
    rule: DraftRule = "match"
    mode: DraftMode = "auto"

    def join(self, parts: Parts) -> tuple[TimedModel, Speculation]:
        """Return what takes the place of the model and of the sampler; measures both where times decide."""
        if self.stages.draft.block_size > ROLLBACK_TOKENS:
            raise ConfigError(
                f"the checkpoint drafts blocks of {self.stages.draft.block_size} tokens, and at most {ROLLBACK_TOKENS} "
                'can be taken back: use draft="off"'
            )
        seats = parts.config.max_num_seqs
        backbone = StagesBackbone(self.stages, parts.table, parts.transfer, parts.cache)
        drafter = self.drafter(backbone, self.stages.heads, num_states=seats, rule=self.rule, mode=self.mode)
        if self.mode == "auto":
            trial = Trial(parts.model, parts.model_config, parts.cache, parts.transfer)
            most = min(seats * (1 + drafter.width), parts.config.max_num_batched_tokens)
            drafter.set_costs(trial.target_ms(most), trial.draft_ms(drafter, seats))
        model = TimedModel(parts.model, parts.transfer)
        return model, Speculation(parts, drafter, model, DraftContext(self.stages, parts.cache))
