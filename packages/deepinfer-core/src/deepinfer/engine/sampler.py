"""Logits become tokens and log-probabilities, each row by its request's parameters.

The arithmetic is `accelerator/ops/sampling.py`'s; what a token means for its request is the `Scheduler`'s.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator.base import Event
from deepinfer.accelerator.batch import Batch
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sampling import GREEDY_TEMPERATURE, SamplingRows, TokenAdjustments
from deepinfer.engine.drafter import Judged
from deepinfer.engine.model_runner import Transfer
from deepinfer.engine.plan import Plan, Sampled
from deepinfer.engine.request import Logprobs, TokenLogprobs
from deepinfer.engine.sequence import NO_LOGPROBS, Integers, SequenceTable
from deepinfer.engine.token_rules import RuledRow, gather
from deepinfer.model.deepseek import ModelOutput

if TYPE_CHECKING:
    from deepinfer.engine.constraint import Words


@dataclass(frozen=True, slots=True)
class Copied:
    """Log-probabilities on their way to the host: `whole` rows, or each row's best and that of the token that came."""

    whole: Tensor | None = None
    values: Tensor | None = None
    ids: Tensor | None = None
    came: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that the device was given: what it computes, and its results on their way to the host.

    token_ids     int64 [L] on the device: the tokens drawn for `plan.rows[plan.samples]`
    host_tokens   the same on the host, -1 for logits that are not finite; as everything below, valid once `landed` is
                  reached (None = at once)
    logprobs, prompt_logprobs  by table row
    judged        the sequences whose drafts `Speculation` judges
    """

    plan: Plan
    batch: Batch
    token_ids: Tensor
    host_tokens: Tensor
    logprobs: dict[int, Copied]
    prompt_logprobs: dict[int, Copied]
    landed: Event | None
    judged: Judged | None = None


class Sampler:
    """Samples for the sequences of one table."""

    may_run_ahead = True
    """Whether the next step can be launched before `read`, as far as the sampler minds."""

    def __init__(self, ops: Ops, table: SequenceTable, transfer: Transfer) -> None:
        self._ops = ops
        self._table = table
        self._transfer = transfer

    @torch.inference_mode()
    def draw(self, output: ModelOutput, batch: Batch, plan: Plan) -> Flight:
        """Draw one token for each sequence that wants one, with the log-probabilities that were asked for.

        Gives the device its work and waits for nothing.
        """
        logits = output.logits
        if int(plan.samples.sum()) != logits.shape[0]:
            last = np.cumsum(plan.logit_counts)[plan.samples] - 1
            logits = logits.index_select(0, self._transfer.to_device([last])[0])
        rows = plan.rows[plan.samples]
        ruled = self._ruled(logits, rows) if self._table.host_bound[rows].any() else logits
        token_ids = self.draw_rows(ruled, rows, self._table.lengths[rows])
        return Flight(
            plan=plan,
            batch=batch,
            token_ids=token_ids,
            # The largest of a row is NaN where any of them is; for what a row of -inf alone means there is no token.
            host_tokens=self._transfer.to_host(token_ids.masked_fill(~logits.amax(-1).isfinite(), -1)),
            logprobs=self._generated(logits, ruled, token_ids, rows),
            prompt_logprobs=self._prompts(output.logits, plan),
            landed=self._transfer.mark(),
        )

    def read(self, flight: Flight, *, ahead: bool = False) -> Sampled:
        """Wait for what `draw` began and return it as plain numbers; raises what the device raises."""
        if flight.landed is not None:
            flight.landed.synchronize()
        plan = flight.plan
        tokens = flight.host_tokens.numpy()
        counts = np.ones(len(tokens), dtype=np.int64)
        lost: frozenset[int] = frozenset()
        if len(tokens) and tokens.min() < 0:
            lost = frozenset(plan.rows[plan.samples][tokens < 0].tolist())
            tokens = np.maximum(tokens, 0)
        if not (flight.logprobs or flight.prompt_logprobs):
            return Sampled(tokens, counts, lost=lost)
        drawn = dict(zip(plan.rows[plan.samples].tolist(), tokens.tolist(), strict=True))
        return Sampled(
            tokens,
            counts,
            {row: _logprobs(copied, [drawn[row]]) for row, copied in flight.logprobs.items()},
            {
                int(plan.rows[i]): _logprobs(flight.prompt_logprobs[int(plan.rows[i])], self._following(plan, i))
                for i in plan.prompt_rows
            },
            lost,
        )

    def draw_rows(self, logits: Tensor, rows: Integers, positions: Integers) -> Tensor:
        """Draw a token from each row of logits [N, V], for `positions` [N] of the sequences in table `rows` [N]."""
        if (self._table.temperature[rows] < GREEDY_TEMPERATURE).all():
            return self._ops.greedy(logits)
        return self._ops.sample(logits, self.parameters(rows, positions))

    def parameters(self, rows: Integers, positions: Integers) -> SamplingRows:
        """Return how tokens for `positions` [N] of the sequences in table `rows` [N] are drawn, on the device."""
        table = self._table
        top_p, top_k, min_p = table.top_p[rows], table.top_k[rows], table.min_p[rows]
        columns = [table.temperature[rows], top_p, top_k, min_p, table.seeds[rows], positions]
        tensors = self._transfer.to_device(columns)
        return SamplingRows(
            temperature=tensors[0],
            top_p=tensors[1],
            top_k=tensors[2],
            min_p=tensors[3],
            seeds=tensors[4],
            positions=tensors[5],
            filtered=bool(((top_p < 1) | (top_k > 0) | (min_p > 0)).any()),
        )

    def token_logprobs(self, logits: Tensor, row: int, first: int, tokens: Integers) -> Logprobs:
        """Wait for the log-probabilities of `tokens` [N], from position `first` on, of the sequence in table `row`.

        logits [N, V] are the rows that gave them: of the model, or where the sequence wants processed ones, ruled.
        """
        rows, count = np.full(len(tokens), row), int(self._table.logprobs[row])
        if self._table.processed[row]:
            logits = self._ops.shape_logits(logits, self.parameters(rows, first + np.arange(len(tokens))))
        came = self._transfer.to_device([tokens])[0]
        copied, landed = self._copied(self._ops.log_probs(logits), count, came), self._transfer.mark()
        if landed is not None:
            landed.synchronize()
        return _logprobs(copied, tokens.tolist())

    def _ruled(self, logits: Tensor, rows: Integers) -> Tensor:
        """Logits [R, V] of the sequences in table `rows` [R] after penalties, bias, banned tokens and masks of each."""
        sequences = [self._table[row] for row in rows.tolist()]
        matchings = [(place, one.matching) for place, one in enumerate(sequences) if one.matching is not None]
        # The host makes the masks while the device still computes the logits.
        words = matchings[0][1].grammars.fill(matchings, len(rows)) if matchings else None
        ending = {place for place, one in matchings if words is not None and one.grammars.is_end(words[place])}
        rules = [
            RuledRow(place, one.rules, one.generated, ending=place in ending)
            for place, one in enumerate(sequences)
            if one.rules is not None
        ]
        return self.apply(logits, gather(rules) if rules else None, words)

    def apply(self, logits: Tensor, entries: list[NDArray[Any]] | None, words: "Words | None") -> Tensor:
        """Logits [R, V] after `entries`, columns of `TokenAdjustments`, and masks [R, W]; None = without."""
        if entries is not None:
            logits = self._ops.adjust(logits, TokenAdjustments(*self._transfer.to_device(entries)))
        if words is not None:
            bitmask = self._transfer.to_device([words.copy().view(np.int64)])[0].view(torch.int32)
            logits = self._ops.mask_tokens(logits, bitmask)
        return logits

    def _generated(self, logits: Tensor, ruled: Tensor, token_ids: Tensor, rows: Integers) -> dict[int, Copied]:
        """Log-probabilities of the drawing sequences in table `rows` [R]: of the model, or of what was drawn from."""
        table, counts = self._table, self._table.logprobs[rows]
        wanted = np.flatnonzero(counts != NO_LOGPROBS)
        if not len(wanted):
            return {}
        places = self._transfer.to_device([wanted])[0]
        chosen, processed = logits.index_select(0, places), table.processed[rows[wanted]]
        if processed.any():
            shaped = self._ops.shape_logits(ruled, self.parameters(rows, table.lengths[rows])).index_select(0, places)
            which = self._transfer.to_device([processed.astype(np.int64)])[0].unsqueeze(1)
            chosen = torch.where(which == 1, shaped, chosen)
        log_probs, came = self._ops.log_probs(chosen), token_ids.index_select(0, places)
        return {
            int(rows[i]): self._copied(log_probs[place : place + 1], int(counts[i]), came[place : place + 1])
            for place, i in enumerate(wanted.tolist())
        }

    def _prompts(self, logits: Tensor, plan: Plan) -> dict[int, Copied]:
        """Log-probabilities after each prompt token of this step, with those of the token that does follow."""
        copied: dict[int, Copied] = {}
        for i in plan.prompt_rows:
            row, wanted, end = int(plan.rows[i]), int(plan.logit_counts[i]), int(plan.logit_counts[: i + 1].sum())
            following = np.array([token or 0 for token in self._following(plan, i)], dtype=np.int64)
            count = self._table[row].request.params.prompt_logprobs
            assert count is not None
            log_probs = self._ops.log_probs(logits[end - wanted : end])
            copied[row] = self._copied(log_probs, count, self._transfer.to_device([following])[0])
        return copied

    def _following(self, plan: Plan, i: int) -> list[int | None]:
        """The token behind each prompt row of sequence number `i` of the plan, None behind the last."""
        wanted = int(plan.logit_counts[i])
        first = int(plan.starts[i] + plan.counts[i]) - wanted
        tokens: list[int | None] = self._table[plan.rows[i]].tokens[first + 1 : first + 1 + wanted].tolist()
        return tokens + [None] * (wanted - len(tokens))

    def _copied(self, log_probs: Tensor, count: int, came: Tensor) -> Copied:
        """Rows [N, V] on their way to the host in the form that `count` asks for; `came` [N] are their tokens."""
        to_host = self._transfer.to_host
        if count == -1:
            return Copied(whole=to_host(log_probs))
        values, ids = self._ops.best(log_probs, count)
        chosen = log_probs.gather(1, came.unsqueeze(1)).squeeze(1)
        return Copied(values=to_host(values), ids=to_host(ids), came=to_host(chosen))


def _logprobs(copied: Copied, tokens: list[int] | list[int | None]) -> Logprobs:
    """What has come, in the form that the caller gets it; `tokens` are those of its rows."""
    if copied.whole is not None:
        return copied.whole.clone()
    assert copied.values is not None
    assert copied.ids is not None
    assert copied.came is not None
    values, ids, came = copied.values.tolist(), copied.ids.tolist(), copied.came.tolist()
    return [
        TokenLogprobs(
            token,
            None if token is None else came[i],
            {best: value for best, value in zip(ids[i], values[i], strict=True) if value > -torch.inf},
        )
        for i, token in enumerate(tokens)
    ]
