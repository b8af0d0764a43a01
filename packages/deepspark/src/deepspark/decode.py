"""Decoding with drafts for any target: owns a plain loop over prefill, step and finish.

It is small on purpose: an engine with batching, prefix cache and graphs has its own loop and calls `drafter` from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from deepspark.drafter import DraftRequest, DSparkDrafter, Proposal
from deepspark.emission import cut, longest_draft, token_logprobs
from deepspark.errors import InputError
from deepspark.noise import extra_uniforms, match_gumbel
from deepspark.penalties import Penalties, penalize, row_counts, row_minimum_mask
from deepspark.transform import SamplingSettings, argmax, transform
from deepspark.verify import Rule, draw

__all__ = ["ContextFeeder", "Generation", "GenerationSettings", "SpeculativeDecoder", "Target", "TargetRows"]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """logits [T, V] of all rows fed, flat; features [T, F] the tapped activations (None: the drafter needs none)."""

    logits: Tensor
    features: Tensor | None = None


class Target(Protocol):
    """The model whose text is wanted."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def begin(self, slot: int) -> None:
        """Give `slot` to a new sequence."""

    def forward(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> TargetRows:
        """Eat each sequence's tokens from position `start` on; what the slot held at or behind it is forgotten."""


class ContextFeeder(Protocol):
    """Takes the tapped activations of what the target ate; `deepspec.DeepSpecBackbone` is one."""

    def begin(self, slot: int, first: int = 0) -> None:
        """Give `slot` to a new sequence."""

    def feed(self, slot: int, features: Tensor, start: int) -> None:
        """Store activations [N, F] of positions from `start` on."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How one request is decoded; logprobs: alternatives a token (None: no log-probs at all)."""

    seed: int
    max_new: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    penalties: Penalties = field(default_factory=Penalties)
    stop: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None


@dataclass(slots=True)
class Generation:
    """What came of one request; `accepted_lengths` are the tokens of each step, the extra token counted."""

    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    logprobs: list[float] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    slot: int
    prompt: list[int]
    settings: GenerationSettings
    result: Generation

    @property
    def position(self) -> int:
        """Where the anchor stands."""
        return len(self.prompt) + len(self.result.tokens) - 1


class SpeculativeDecoder:
    """Decodes batches with `target`; drafter None decodes plainly, by the same noise and rule.

    feeder: gets the target's activations (None: the source needs none).  rule: of plain decoding; with a drafter its
    own.
    """

    def __init__(
        self, target: Target, drafter: DSparkDrafter | None, feeder: ContextFeeder | None = None, rule: Rule = "chain"
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.feeder = feeder
        self.rule: Rule = rule if drafter is None else drafter.rule

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], settings: Sequence[GenerationSettings]) -> list[Generation]:
        """Decode all prompts as one batch; each needs at least one token."""
        if len(prompts) != len(settings) or not all(prompts):
            raise InputError("expected one GenerationSettings a prompt and no empty prompt")
        sequences = [
            _Sequence(slot, list(prompt), each, Generation())
            for slot, (prompt, each) in enumerate(zip(prompts, settings, strict=True))
        ]
        self._prefill(sequences)
        while active := [each for each in sequences if each.result.finish is None]:
            self._step(active)
        return [each.result for each in sequences]

    def _prefill(self, sequences: list[_Sequence]) -> None:
        for each in sequences:
            self.target.begin(each.slot)
            if self.drafter is not None:
                self.drafter.begin(each.slot)
            if self.feeder is not None:
                self.feeder.begin(each.slot)
        rows = self.target.forward([s.slot for s in sequences], [s.prompt for s in sequences], [0] * len(sequences))
        self._feed(sequences, [len(s.prompt) for s in sequences], rows)
        last = torch.tensor([len(s.prompt) for s in sequences]).cumsum(0) - 1
        laws = torch.cat([self._laws(s, row[None], []) for s, row in zip(sequences, rows.logits[last], strict=True)])
        self._emit_plain(sequences, laws)

    def _step(self, active: list[_Sequence]) -> None:
        if self.drafter is None:
            tokens = [[each.result.tokens[-1]] for each in active]
            rows = self._forward(active, tokens)
            laws = torch.cat([self._laws(s, row[None], []) for s, row in zip(active, rows.logits, strict=True)])
            self._emit_plain(active, laws)
            return
        proposal = self.drafter.propose([self._request(each) for each in active])
        drafts = [row[:ell] for row, ell in zip(proposal.drafts.tolist(), proposal.lengths.tolist(), strict=True)]
        rows = self._forward(active, [[s.result.tokens[-1], *x] for s, x in zip(active, drafts, strict=True)])
        self._judge(active, proposal, drafts, rows.logits)

    def _judge(self, active: list[_Sequence], proposal: Proposal, drafts: list[list[int]], logits: Tensor) -> None:
        assert self.drafter is not None
        pieces = logits.split([len(x) + 1 for x in drafts])
        laws = [self._laws(s, piece, x) for s, piece, x in zip(active, pieces, drafts, strict=True)]
        verdict = self.drafter.verify(torch.cat(laws), proposal)
        self.drafter.record(proposal, verdict)
        emitted = verdict.emitted(torch.from_numpy(proposal.drafts))
        for each, tokens, law in zip(active, emitted, laws, strict=True):
            self._emit(each, tokens, law)

    def _forward(self, active: list[_Sequence], tokens: list[list[int]]) -> TargetRows:
        """Run the anchors and their drafts, and hand the activations on: rejected rows are overwritten a step later."""
        starts = [each.position for each in active]
        rows = self.target.forward([each.slot for each in active], tokens, starts)
        self._feed(active, [len(each) for each in tokens], rows, starts)
        return rows

    def _feed(
        self, sequences: list[_Sequence], counts: list[int], rows: TargetRows, starts: list[int] | None = None
    ) -> None:
        if self.feeder is None:
            return
        if rows.features is None:
            raise InputError("the drafter reads target activations, but the target returned no features")
        for i, (each, piece) in enumerate(zip(sequences, rows.features.split(counts), strict=True)):
            self.feeder.feed(each.slot, piece, starts[i] if starts else 0)

    def _request(self, each: _Sequence) -> DraftRequest:
        assert self.drafter is not None
        limit = longest_draft(
            self.drafter.width, each.position, len(each.result.tokens), each.settings.max_new, max_context=None
        )
        sampling = each.settings.sampling
        return DraftRequest(each.slot, each.result.tokens[-1], each.position, each.settings.seed, limit, sampling)

    def _laws(self, each: _Sequence, logits: Tensor, drafts: list[int]) -> Tensor:
        """Return the laws [ell+1, V] that plain decoding would use at each row of one sequence."""
        vocab_size, settings = logits.shape[-1], each.settings
        logits = logits if logits.dtype == torch.float64 else logits.float()
        allowed = None
        if settings.penalties != Penalties():
            counts = torch.bincount(torch.tensor(each.result.tokens, dtype=torch.int64), minlength=vocab_size)
            in_prompt = torch.bincount(torch.tensor(each.prompt), minlength=vocab_size) > 0
            rows = row_counts(counts, torch.tensor(drafts, dtype=torch.int64))
            logits = penalize(logits, rows, in_prompt, settings.penalties)
        if settings.min_tokens and settings.stop:
            stop = torch.zeros(vocab_size, dtype=torch.bool)
            stop[list(settings.stop)] = True
            allowed = row_minimum_mask(len(each.result.tokens), settings.min_tokens, stop, logits.shape[0])
        return transform(logits, settings.sampling, allowed)

    def _emit_plain(self, sequences: list[_Sequence], laws: Tensor) -> None:
        """Emit one token a sequence from its law, with the noise of its last row's position."""
        seeds = torch.tensor([each.settings.seed for each in sequences])
        positions = torch.tensor([each.position for each in sequences])
        if self.rule == "greedy":
            tokens = argmax(laws)
        elif self.rule == "match":
            tokens = argmax(laws.log() + match_gumbel(seeds, positions + 1, laws.shape[-1]))
        else:
            tokens = draw(laws, extra_uniforms(seeds, positions))
        for each, token, law in zip(sequences, tokens.tolist(), laws, strict=True):
            self._emit(each, [token], law[None])

    def _emit(self, each: _Sequence, tokens: list[int], laws: Tensor) -> None:
        result, settings = each.result, each.settings
        kept = cut(tokens, settings.stop, settings.max_new, len(result.tokens))
        if settings.logprobs is not None:
            result.logprobs += token_logprobs(laws, kept.kept, settings.logprobs).logprobs
        result.tokens += kept.kept
        result.finish = kept.finish
        result.accepted_lengths.append(len(tokens))
