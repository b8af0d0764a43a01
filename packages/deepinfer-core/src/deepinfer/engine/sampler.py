"""Logits become tokens and log-probabilities, each row by its request's parameters.

The arithmetic is `accelerator/ops/sampling.py`'s; what a token means for its request is the `Scheduler`'s.
"""

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sampling import GREEDY_TEMPERATURE, SamplingRows
from deepinfer.engine.plan import Plan, Sampled
from deepinfer.engine.request import Logprobs, TokenLogprobs
from deepinfer.engine.sequence import NO_LOGPROBS, Integers, SequenceTable
from deepinfer.model.deepseek import ModelOutput


class Sampler:
    """Samples for the sequences of one table."""

    def __init__(self, ops: Ops, table: SequenceTable) -> None:
        self._ops = ops
        self._table = table

    @torch.inference_mode()
    def sample(self, output: ModelOutput, plan: Plan) -> Sampled:
        """Draw one token for each sequence that wants one, and collect the log-probabilities that were asked for."""
        rows = plan.rows[plan.samples]
        logits = output.logits
        if len(rows) != logits.shape[0]:
            last = np.cumsum(plan.logit_counts)[plan.samples] - 1
            logits = logits.index_select(0, self._tensor(last))
        tokens: Integers = self._draw(logits, rows).cpu().numpy()
        counts = np.ones(len(rows), dtype=np.int64)
        return Sampled(tokens, counts, self._generated(logits, rows, tokens), self._prompts(output.logits, plan))

    def _draw(self, logits: Tensor, rows: Integers) -> Tensor:
        table = self._table
        temperature = table.temperature[rows]
        if (temperature < GREEDY_TEMPERATURE).all():
            return self._ops.greedy(logits)
        top_p, top_k, min_p = table.top_p[rows], table.top_k[rows], table.min_p[rows]
        parameters = SamplingRows(
            temperature=self._tensor(temperature),
            top_p=self._tensor(top_p),
            top_k=self._tensor(top_k),
            min_p=self._tensor(min_p),
            seeds=self._tensor(table.seeds[rows]),
            positions=self._tensor(table.lengths[rows]),
            filtered=bool(((top_p < 1) | (top_k > 0) | (min_p > 0)).any()),
        )
        return self._ops.sample(logits, parameters)

    def _generated(self, logits: Tensor, rows: Integers, tokens: Integers) -> dict[int, Logprobs]:
        counts = self._table.logprobs[rows]
        wanted = np.flatnonzero(counts != NO_LOGPROBS)
        if not len(wanted):
            return {}
        log_probs = self._ops.log_probs(logits.index_select(0, self._tensor(wanted)))
        return {
            int(rows[i]): self._logprobs(log_probs[place : place + 1], int(counts[i]), [int(tokens[i])])
            for place, i in enumerate(wanted.tolist())
        }

    def _prompts(self, logits: Tensor, plan: Plan) -> dict[int, Logprobs]:
        """Log-probabilities after each prompt token of this step, with those of the token that does follow."""
        found: dict[int, Logprobs] = {}
        for i in plan.prompt_rows:
            row, wanted, end = int(plan.rows[i]), int(plan.logit_counts[i]), int(plan.logit_counts[: i + 1].sum())
            sequence = self._table[row]
            first = int(plan.starts[i] + plan.counts[i]) - wanted
            following: list[int | None] = sequence.tokens[first + 1 : first + 1 + wanted].tolist()
            count = sequence.request.params.prompt_logprobs
            assert count is not None
            log_probs = self._ops.log_probs(logits[end - wanted : end])
            found[row] = self._logprobs(log_probs, count, following + [None] * (wanted - len(following)))
        return found

    def _logprobs(self, log_probs: Tensor, count: int, tokens: list[int] | list[int | None]) -> Logprobs:
        """Rows [N, V] of which `tokens` came, in the form that `count` asks for."""
        if count == -1:
            return log_probs.cpu().clone()
        values, ids = (best.tolist() for best in self._ops.best(log_probs, count))
        chosen = self._tensor(np.array([token or 0 for token in tokens], dtype=np.int64))
        came = log_probs.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
        return [
            TokenLogprobs(token, None if token is None else came[i], dict(zip(ids[i], values[i], strict=True)))
            for i, token in enumerate(tokens)
        ]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._ops.device)
