"""Sequential heads: owns the Markov bias that chains a block's rows and the confidence that scores them.

Hidden rows and base logits come from a `DraftBackbone`; the loop over the block is `proposing`'s.
Source: DSpark specification, sections 1.3 and 1.4.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, override

import torch
from torch import Tensor, nn

from deepspark.errors import ConfigError

__all__ = [
    "ConfidenceHead",
    "ConfidenceReads",
    "GatedMarkov",
    "HeadsConfig",
    "MarkovHead",
    "MarkovKind",
    "NoMarkov",
    "RnnMarkov",
    "SequentialHeads",
    "VanillaMarkov",
]

MarkovKind = Literal["vanilla", "gated", "rnn", "none"]
ConfidenceReads = Literal["normed", "prenorm"]
"""Whether the confidence head reads the hidden row behind the last norm or before it; wrong, nothing crashes, all
scores drift.
"""


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """What heads a drafter has.  rank 0 with kind 'none' is DFlash: rows do not know their predecessor."""

    vocab_size: int
    hidden_size: int
    markov_kind: MarkovKind = "vanilla"
    markov_rank: int = 256
    has_confidence: bool = True
    confidence_reads: ConfidenceReads = "normed"
    confidence_with_markov: bool = True
    confidence_bias: bool = True

    def __post_init__(self) -> None:
        if self.markov_kind not in ("vanilla", "gated", "rnn", "none"):
            raise ConfigError(f"markov_kind must be 'vanilla', 'gated', 'rnn' or 'none', got {self.markov_kind!r}")
        if (self.markov_rank == 0) != (self.markov_kind == "none"):
            raise ConfigError(
                f"markov_rank 0 goes with kind 'none' only, got rank {self.markov_rank} and {self.markov_kind!r}"
            )
        if self.confidence_reads not in ("normed", "prenorm"):
            raise ConfigError(f"confidence_reads must be 'normed' or 'prenorm', got {self.confidence_reads!r}")
        if self.has_confidence and self.confidence_with_markov and self.markov_kind == "none":
            raise ConfigError(
                "a confidence head with Markov features needs a Markov head; set confidence_with_markov=False"
            )


class MarkovHead(Protocol):
    """A low-rank bias over the vocabulary from the previous token, carried along the block by `state`."""

    def start(self, hidden: Tensor) -> Tensor:
        """Return the state before the first row; `hidden` [R, D] gives count, device and dtype."""

    def embed(self, previous: Tensor) -> Tensor:
        """Return the features [R, rank] of the previous tokens [R]."""

    def advance(self, features: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias [R, V] in float32 and the next state, from `features` [R, rank] and the row's `hidden` [R,
        D].
        """


def _project(features: Tensor, weight: Tensor) -> Tensor:
    """Multiply in float32 whatever the weights are: the bias is added to float32 logits, and bf16 sums lose
    acceptance.
    """
    return features.float() @ weight.float().T if features.dtype != torch.float64 else features @ weight.T


class VanillaMarkov(nn.Module):
    """B = W2 W1[x_{k-1}]."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        """No state: an empty tensor."""
        return hidden.new_zeros(hidden.shape[0], 0)

    def embed(self, previous: Tensor) -> Tensor:
        """Return W1[x_{k-1}]."""
        return self.markov_w1(previous)  # type: ignore[no-any-return]

    def advance(self, features: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias of the previous token alone."""
        return _project(features, self.markov_w2.weight), state


class GatedMarkov(VanillaMarkov):
    """B = W2( sigmoid(G [h_k; W1[x_{k-1}]] + b) * W1[x_{k-1}] )."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    @override
    def advance(self, features: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias of the previous token's gated features."""
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, features], -1)))
        return _project(gate * features, self.markov_w2.weight), state


class RnnMarkov(VanillaMarkov):
    """u = [s; W1[x]; h]; g = sigmoid(W_g u), s' = g s + (1-g) tanh(W_c u), B = W2 tanh(W_o u); one projection, s_0
    = 0.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    @override
    def start(self, hidden: Tensor) -> Tensor:
        """Return a state [R, rank] of zeros."""
        return hidden.new_zeros(hidden.shape[0], self.rank)

    @override
    def advance(self, features: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias and the next state."""
        gate, candidate, out = self.joint_proj(torch.cat([state, features, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return _project(torch.tanh(out), self.markov_w2.weight), gate * state + (1 - gate) * torch.tanh(candidate)


class NoMarkov(nn.Module):
    """Rank 0 (DFlash): no bias, no features."""

    def start(self, hidden: Tensor) -> Tensor:
        """No state: an empty tensor."""
        return hidden.new_zeros(hidden.shape[0], 0)

    def embed(self, previous: Tensor) -> Tensor:
        """Return features of width 0."""
        return torch.zeros(*previous.shape, 0, device=previous.device)

    def advance(self, features: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return a bias of zero that broadcasts over the vocabulary."""
        return torch.zeros(hidden.shape[0], 1, device=hidden.device), state


class ConfidenceHead(nn.Module):
    """z_k = w . [h_k; W1[x_{k-1}]] (+ b); sigmoid(z_k / T_k) estimates P(x_k accepted | all before it accepted).

    It never sees x_k: that is what lets current confidences choose what is verified.
    """

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.proj = nn.Linear(width, 1, bias=config.confidence_bias)
        self.with_markov = config.confidence_with_markov

    @override
    def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Return confidence logits [...] (at least float32) of `hidden` [..., D] and Markov `features` [..., rank]."""
        rows = torch.cat([hidden, features.to(hidden.dtype)], -1) if self.with_markov else hidden
        rows = rows if rows.dtype == torch.float64 else rows.float()
        bias = None if self.proj.bias is None else self.proj.bias.to(rows.dtype)
        return nn.functional.linear(rows, self.proj.weight.to(rows.dtype), bias)[..., 0]


class SequentialHeads(nn.Module):
    """The Markov head and, where the checkpoint has one, the confidence head of one drafter."""

    markov_head: VanillaMarkov | NoMarkov
    confidence_head: ConfidenceHead | None

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        if config.markov_kind == "none":
            self.markov_head = NoMarkov()
        else:
            kinds = {"vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}
            self.markov_head = kinds[config.markov_kind](config)
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None

    def confidence_logits(self, hidden: Tensor, normed: Tensor, features: Tensor) -> Tensor | None:
        """Return z [...] of the rows before (`hidden`) and behind (`normed`) the last norm; None without the head."""
        if self.confidence_head is None:
            return None
        read = normed if self.config.confidence_reads == "normed" else hidden
        return self.confidence_head(read, features)  # type: ignore[no-any-return]

    def teacher_forced(
        self, hidden: Tensor, normed: Tensor, base: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [R, g, V] and confidence logits [R, g] when row k follows the given token previous[:, k]."""
        state = self.markov_head.start(normed[:, 0])
        features = self.markov_head.embed(previous)
        biases = []
        for k in range(previous.shape[1]):
            bias, state = self.markov_head.advance(features[:, k], normed[:, k], state)
            biases.append(bias)
        return base + torch.stack(biases, 1), self.confidence_logits(hidden, normed, features)
