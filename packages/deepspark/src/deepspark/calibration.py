"""Calibration: owns how good confidences are, the temperatures that improve them, and the file that carries these.

Rounds are collected by whoever decodes (`RoundLog`); how confidences are used is `schedule`'s.
Source: DSpark specification, section 1.5.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepspark.errors import ConfigError, InputError

__all__ = [
    "Calibration",
    "DriftMonitor",
    "Fit",
    "RoundLog",
    "auroc",
    "brier",
    "calibrate",
    "ece",
    "fit_temperatures",
    "noise_floor",
    "soft_label",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GRID = np.logspace(-1, 1, 41)
ENOUGH_ROUNDS = 10_000
_FORMAT = "deepspark-calibration-1"


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    positive = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x >= 0, positive, 1 - positive)


def ece(p: Floats, y: Floats, bins: int = 15) -> float:
    """Expected calibration error: mean over equal-width bins of |mean p - mean y|, weighted by their counts."""
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(index, weights=p, minlength=bins) - np.bincount(index, weights=y, minlength=bins)
    return float(np.abs(gaps).sum() / p.size)


def brier(p: Floats, y: Floats) -> float:
    """Mean squared error of the probabilities."""
    return float(np.square(p - y).mean())


def auroc(p: Floats, y: Floats) -> float | None:
    """Chance that an accepted draft scored higher than a rejected one, ties half; None when one kind is missing."""
    accepted = y > 0
    count, other = int(accepted.sum()), int((~accepted).sum())
    if not count or not other:
        return None
    _, inverse, sizes = np.unique(p, return_inverse=True, return_counts=True)
    ranks = np.cumsum(sizes) - (sizes - 1) / 2
    return float((ranks[inverse][accepted].sum() - count * (count + 1) / 2) / (count * other))


def soft_label(p: Floats, q: Floats) -> float:
    """1 - TV(p, q) = sum of min(p, q): the chance that a draft from q is accepted against p."""
    return float(np.minimum(p, q).sum())


def noise_floor(p: Floats, bins: int = 15, draws: int = 20) -> float:
    """Return the ECE that a perfect predictor of the same probabilities shows on as many samples, by simulation."""
    rng = np.random.default_rng(0)
    return float(np.mean([ece(p, (rng.random(p.size) < p).astype(np.float64), bins) for _ in range(draws)]))


@dataclass(frozen=True, slots=True)
class Fit:
    """Temperatures [g] and the survivals' ECE [g] before (all temperatures 1) and after."""

    temperatures: list[float]
    ece_before: list[float]
    ece_after: list[float]


def fit_temperatures(logits: Floats, prefix_ok: Floats, bins: int = 15, grid: Floats = GRID) -> Fit:
    """Sequential temperature scaling: position by position, the grid value with the least ECE of the survival so far.

    logits: [N, g] confidence logits.  prefix_ok: [N, g], 1 where drafts 1..j were all accepted, from rounds that
    verified whole blocks.  Of equal values the first wins.
    """
    survival = np.ones(logits.shape[0])
    raw = np.ones(logits.shape[0])
    temperatures, before, after = [], [], []
    for k in range(logits.shape[1]):
        errors = [ece(survival * sigmoid(logits[:, k] / t), prefix_ok[:, k], bins) for t in grid]
        best = int(np.argmin(errors))
        raw = raw * sigmoid(logits[:, k])
        before.append(ece(raw, prefix_ok[:, k], bins))
        after.append(errors[best])
        temperatures.append(float(grid[best]))
        survival = survival * sigmoid(logits[:, k] / grid[best])
    return Fit(temperatures, before, after)


class RoundLog:
    """Collects rounds that verified whole blocks: only there the labels exist that calibration needs."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._logits: list[Floats] = []
        self._accepted: list[int] = []

    def __len__(self) -> int:
        return len(self._accepted)

    def add(self, confidence_logits: Floats, lengths: Ints, accepted: Ints) -> None:
        """Keep the requests of one step that verified all drafts: logits [R, g], lengths [R], accepted [R]."""
        for row in np.flatnonzero(lengths == self.width):
            self._logits.append(np.asarray(confidence_logits[row], np.float64))
            self._accepted.append(int(accepted[row]))

    def save(self, path: Path, *, model_hash: str, temperature: float) -> None:
        """Write an .npz with the rounds, the drafter's hash and the sampling temperature of the traffic."""
        np.savez_compressed(
            path,
            logits=np.asarray(self._logits).reshape(-1, self.width),
            accepted=np.asarray(self._accepted, np.int64),
            model_hash=model_hash,
            temperature=temperature,
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures of the confidence head, with what they were fitted on.

    temperature is the sampling temperature of the traffic: acceptance depends on it.  rounds: whole-block rounds.
    ece_before, ece_after, floor: on held-out rounds, by position.
    """

    temperatures: tuple[float, ...]
    model_hash: str
    temperature: float
    rounds: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    floor: tuple[float, ...]

    @classmethod
    def identity(cls, width: int) -> "Calibration":
        """Confidences as the head gives them."""
        return cls((1.0,) * width, "", 1.0, 0, (), (), ())

    def confidences(self, logits: Floats) -> Floats:
        """Return sigmoid(z_k / T_k) [R, g]."""
        return sigmoid(np.asarray(logits, np.float64) / np.asarray(self.temperatures))

    def save(self, path: Path) -> None:
        """Write the calibration as JSON."""
        path.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, *, model_hash: str, width: int) -> "Calibration":
        """Read a calibration; raise ConfigError unless it belongs to this drafter and width."""
        values = json.loads(path.read_text())
        if values.pop("format", None) != _FORMAT:
            raise ConfigError(
                f"{path} is no calibration file of format {_FORMAT}; write one with `deepspark calibrate`"
            )
        made = cls(
            temperatures=tuple(values["temperatures"]),
            model_hash=values["model_hash"],
            temperature=values["temperature"],
            rounds=values["rounds"],
            ece_before=tuple(values["ece_before"]),
            ece_after=tuple(values["ece_after"]),
            floor=tuple(values["floor"]),
        )
        if made.model_hash != model_hash:
            raise ConfigError(
                f"{path} was fitted for drafter {made.model_hash}, this one is {model_hash}; fit it again"
            )
        if len(made.temperatures) != width:
            raise ConfigError(f"{path} has {len(made.temperatures)} temperatures for a block of {width}; fit it again")
        return made


def calibrate(path: Path) -> Calibration:
    """Fit the rounds of a `RoundLog` file; keep T = 1 where held-out ECE does not fall by more than the noise floor.

    Every second round is held out.  Fitted on a few thousand rounds, temperatures chase bins and make things worse:
    with fewer than 10,000 rounds this raises InputError.
    """
    with np.load(path) as file:
        logits, accepted = file["logits"], file["accepted"]
        model_hash, temperature = str(file["model_hash"]), float(file["temperature"])
    if len(logits) < ENOUGH_ROUNDS:
        raise InputError(f"expected at least {ENOUGH_ROUNDS} whole-block rounds, got {len(logits)}; collect more")
    ok = (np.arange(logits.shape[1]) < accepted[:, None]).astype(np.float64)
    fit = fit_temperatures(logits[::2], ok[::2])
    held, labels = logits[1::2], ok[1::2]
    kept, before, after, floors = [], [], [], []
    survival = np.ones(len(held))
    for k, fitted in enumerate(fit.temperatures):
        plain, scaled = survival * sigmoid(held[:, k]), survival * sigmoid(held[:, k] / fitted)
        floor = noise_floor(scaled)
        errors = ece(plain, labels[:, k]), ece(scaled, labels[:, k])
        worth = errors[0] - errors[1] > floor
        kept.append(fitted if worth else 1.0)
        survival = scaled if worth else plain
        before.append(errors[0])
        after.append(errors[1] if worth else errors[0])
        floors.append(floor)
    return Calibration(tuple(kept), model_hash, temperature, len(logits), tuple(before), tuple(after), tuple(floors))


class DriftMonitor:
    """Watches whether confidences still mean what they were fitted to mean.

    Over windows of `window` verified rows a position it compares mean predicted with mean realised survival and reports
    a gap beyond `tolerance` plus four standard errors.
    """

    def __init__(self, width: int, *, window: int = 4096, tolerance: float = 0.03) -> None:
        self._window, self._tolerance = window, tolerance
        self._sums = np.zeros((4, width))

    def update(self, survivals: Floats, lengths: Ints, accepted: Ints) -> str | None:
        """Count one step: survivals [R, g] as predicted, verified lengths, accepted drafts; return a warning or
        None.
        """
        offsets = np.arange(survivals.shape[1])
        judged = offsets < lengths[:, None]
        promised = survivals * judged
        self._sums[0] += judged.sum(axis=0)
        self._sums[1] += promised.sum(axis=0)
        self._sums[2] += (offsets < accepted[:, None]).sum(axis=0)
        self._sums[3] += (promised * (1 - survivals)).sum(axis=0)
        full = self._sums[0] >= self._window
        if not full.any():
            return None
        rows, predicted, realised, variance = (self._sums[i][full] for i in range(4))
        gaps = np.abs(predicted - realised) / rows - 4 * np.sqrt(variance) / rows
        worst = int(np.argmax(gaps))
        position = int(np.flatnonzero(full)[worst])
        self._sums[:, full] = 0
        if gaps[worst] <= self._tolerance:
            return None
        return self._warning(position, float(predicted[worst] / rows[worst]), float(realised[worst] / rows[worst]))

    @staticmethod
    def _warning(position: int, predicted: float, realised: float) -> str:
        return (
            f"confidences have drifted: drafts 1..{position + 1} were predicted to survive in {predicted:.1%} of their "
            f"rows and did in {realised:.1%}; the text is right all the same, fit again with `deepspark calibrate`"
        )
