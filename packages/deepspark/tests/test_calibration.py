import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deepspark.audit import World
from deepspark.audit.engine import WorldSource, WorldTarget
from deepspark.calibration import Calibration, DriftMonitor, RoundLog, auroc, calibrate, ece, noise_floor, sigmoid
from deepspark.cli import main
from deepspark.collect import collect_rounds
from deepspark.cost import CostTable
from deepspark.decode import GenerationSettings, SpeculativeDecoder
from deepspark.drafter import DrafterSettings, DSparkDrafter
from deepspark.errors import ConfigError, InputError
from deepspark.policy import AlgorithmOne, Fixed
from deepspark.transform import SamplingSettings

Floats = NDArray[np.float64]


def rounds(path: Path, count: int, true_temperatures: Floats, seed: int = 0) -> None:
    """Write rounds whose acceptance is sigmoid(z / T) with the given T."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (count, len(true_temperatures)))
    passed = rng.random(logits.shape) < sigmoid(logits / true_temperatures)
    log = RoundLog(len(true_temperatures))
    log.add(logits, np.full(count, len(true_temperatures)), passed.cumprod(axis=1).sum(axis=1))
    log.save(path, model_hash="abc", temperature=0.7)


def test_overconfidence_is_found_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "rounds.npz", tmp_path / "calibration.json"
    rounds(file, 12_000, np.array([2.0, 1.0, 3.0]))
    assert main(["calibrate", str(file), "--out", str(out)]) == 0
    assert "12000 rounds at temperature 0.7, drafter abc" in capsys.readouterr().out
    made = Calibration.load(out, model_hash="abc", width=3)
    assert made.temperatures[0] == pytest.approx(2.0, rel=0.25)
    assert made.temperatures[1] == 1.0
    assert made.temperatures[2] == pytest.approx(3.0, rel=0.4)
    assert made.ece_after[0] < made.ece_before[0] / 3
    assert (made.rounds, made.temperature) == (12_000, 0.7)


def test_good_confidences_are_left_alone(tmp_path: Path) -> None:
    """Nothing to gain beyond the noise: every temperature stays 1."""
    rounds(tmp_path / "rounds.npz", 10_000, np.ones(4))
    assert calibrate(tmp_path / "rounds.npz").temperatures == (1.0,) * 4


def test_few_rounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds(tmp_path / "rounds.npz", 2_000, np.ones(2))
    with pytest.raises(InputError, match="at least 10000 whole-block rounds, got 2000"):
        calibrate(tmp_path / "rounds.npz")
    assert main(["calibrate", str(tmp_path / "rounds.npz")]) == 1
    assert "collect more" in capsys.readouterr().out


def test_a_file_of_another_drafter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    Calibration.identity(3).save(path)
    with pytest.raises(ConfigError, match="fitted for drafter"):
        Calibration.load(path, model_hash="other", width=3)
    with pytest.raises(ConfigError, match="3 temperatures for a block of 5"):
        Calibration.load(path, model_hash="", width=5)
    path.write_text(json.dumps({"format": "else"}))
    with pytest.raises(ConfigError, match="no calibration file"):
        Calibration.load(path, model_hash="", width=3)


def test_only_whole_blocks_have_labels() -> None:
    log = RoundLog(3)
    log.add(np.zeros((4, 3)), np.array([3, 2, 0, 3]), np.array([3, 2, 0, 1]))
    assert len(log) == 2


def test_drift_is_told_once_it_is_certain() -> None:
    rng = np.random.default_rng(0)
    survivals = np.tile([0.8, 0.6], (64, 1))
    lengths = np.full(64, 2)

    def warnings(first: float) -> list[str | None]:
        monitor = DriftMonitor(2, window=2048)
        found = []
        for _ in range(200):
            passed = rng.random((64, 2)) < np.array([first, 0.75])
            found.append(monitor.update(survivals, lengths, passed.cumprod(axis=1).sum(axis=1)))
        return [each for each in found if each]

    assert warnings(0.8) == []
    told = warnings(0.5)
    assert told
    assert "predicted to survive in 80.0%" in str(told[0])
    assert "deepspark calibrate" in str(told[0])


def test_noise_floor_is_what_a_perfect_predictor_shows() -> None:
    rng = np.random.default_rng(3)
    p = rng.random(4000)
    shown = np.mean([ece(p, (rng.random(4000) < p).astype(float)) for _ in range(20)])
    assert noise_floor(p) == pytest.approx(shown, rel=0.2)


def test_auroc_counts_ties_half_and_knows_when_it_is_undefined() -> None:
    assert auroc(np.array([0.5, 0.5]), np.array([1, 0])) == 0.5
    assert auroc(np.array([0.5, 0.7]), np.array([1, 1])) is None


def test_collecting_needs_whole_blocks_and_one_temperature(tmp_path: Path) -> None:
    target = WorldTarget(World(4, 1, agreement=0.7))
    cost = CostTable([1], [1.0], mode="linear")

    def decoder(settings: DrafterSettings) -> SpeculativeDecoder:
        return SpeculativeDecoder(target, DSparkDrafter(WorldSource(target, 3), cost, 2, settings))

    whole = DrafterSettings(policy=Fixed(3), parking=None)
    batch = ([[1], [2]], [GenerationSettings(seed=seed, max_new=30) for seed in (1, 2)])
    count = collect_rounds(decoder(whole), [batch] * 9, tmp_path / "r.npz", model_hash="h", rounds=60)
    assert 60 <= count < 60 + 2 * 30
    with np.load(tmp_path / "r.npz") as file:
        assert file["logits"].shape == (count, 3)
        assert 0 <= file["accepted"].min() <= file["accepted"].max() <= 3
    with pytest.raises(ConfigError, match=r"whole blocks: make the drafter with policy Fixed\(3\)"):
        collect_rounds(
            decoder(DrafterSettings(policy=AlgorithmOne(), parking=None)), [], tmp_path / "x", model_hash="h"
        )
    cold = GenerationSettings(seed=1, max_new=3, sampling=SamplingSettings(temperature=0.5))
    with pytest.raises(ConfigError, match="one temperature"):
        collect_rounds(decoder(whole), [batch, ([[1]], [cold])], tmp_path / "x", model_hash="h")
    with pytest.raises(ConfigError, match="with a drafter"):
        collect_rounds(SpeculativeDecoder(target, None), [], tmp_path / "x", model_hash="h")
