"""Checks of schedules, calibration and dialects against rows of golden vectors; owns the translation of their
fields.
"""

from pathlib import Path
from typing import Any

import numpy as np

from deepspark.calibration import auroc, brier, ece, fit_temperatures, sigmoid, soft_label
from deepspark.cost import CostTable
from deepspark.schedule import algorithm_one, allocate, choose_budget, fill, survival
from deepspark.testing.dialects import SlopeEstimator, WindowMedian, deepinfer_rows, deepinfer_total_rows, vllm_budget
from deepspark.testing.verify_vectors import expect, expect_close

__all__ = ["confidence", "dialects", "estimators", "schedule"]


def _numbers(values: Any) -> Any:
    return np.asarray(values, np.float64)


def schedule(row: dict[str, Any], folder: Path) -> None:
    """schedule.jsonl: cost table, Algorithm 1, budget, allocation, the asynchronous pair."""
    conf = _numbers(row["conf"])
    requests, width = conf.shape
    table = CostTable(**row["cost"])
    times = table.budgets_ms(requests, width)
    want = [np.inf if ms is None else ms for ms in row["step_ms"]]
    expect_close("step_ms", times, want)
    current, history = survival(conf), survival(_numbers(row["history_conf"]))
    walk = algorithm_one(current, times)
    expect("algorithm1", walk.lengths.tolist(), row["algorithm1"])
    expect_close("algorithm1_theta", walk.theta, row["algorithm1_theta"])
    by_request = algorithm_one(current, times, "request").lengths.tolist()
    expect("algorithm1_request_order", by_request, row["algorithm1_request_order"])
    budget = choose_budget(history, times)
    expect("budget", budget.drafts, row["budget"])
    expect_close("budget_theta", budget.theta, row["budget_theta"])
    expect("allocate", allocate(current, row["K"]).tolist(), row["allocate"])
    expect("allocate_request_order", allocate(current, row["K"], "request").tolist(), row["allocate_request_order"])
    expect("async_ell", allocate(current, budget.drafts).tolist(), row["async_ell"])
    expect("async_fill", allocate(current, fill(budget.drafts, times)).tolist(), row["async_fill"])


def confidence(row: dict[str, Any], folder: Path) -> None:
    """confidence.jsonl: calibration metrics, soft labels, sequential temperature scaling."""
    match row["what"]:
        case "metrics":
            p, y = _numbers(row["p"]), _numbers(row["y"])
            expect_close("ece15", ece(p, y, 15), row["ece15"])
            expect_close("ece20", ece(p, y, 20), row["ece20"])
            expect_close("brier", brier(p, y), row["brier"])
            if row["auroc"] is None:
                expect("auroc", auroc(p, y), None)
            else:
                expect_close("auroc", auroc(p, y), row["auroc"])
        case "soft_label":
            expect_close("label", soft_label(_numbers(row["p"]), _numbers(row["q"])), row["label"])
        case "sts":
            _temperatures(row)
        case what:
            raise AssertionError(f"unknown kind of confidence vector {what!r}")


def _temperatures(row: dict[str, Any]) -> None:
    logits = _numbers(row["logits"])
    low, high, count = (int(part) for part in row["grid"].removeprefix("logspace(").removesuffix(")").split(","))
    fit = fit_temperatures(logits, _numbers(row["prefix_ok"]), row["bins"], np.logspace(low, high, count))
    expect_close("temperatures", fit.temperatures, row["temperatures"])
    expect_close("ece_before", fit.ece_before, row["ece_before"])
    expect_close("ece_after", fit.ece_after, row["ece_after"])
    calibrated = sigmoid(logits[:20] / _numbers(fit.temperatures))
    expect_close("calibrated20", calibrated, row["calibrated20"])
    expect_close("survival20", survival(calibrated), row["survival20"])


def dialects(row: dict[str, Any], folder: Path) -> None:
    """dialects.jsonl: how DeepInfer and vLLM choose budgets."""
    survivals = _numbers(row["survival"])
    total = deepinfer_total_rows(survivals, row["sizes"], row["ms"], row["sampler_ms"], row["slope_ms"])
    expect("deepinfer_total_rows", total, row["deepinfer_total_rows"])
    expect("deepinfer_rows", deepinfer_rows(survivals, total), row["deepinfer_rows"])
    budget = vllm_budget(survivals, row["vllm_draft_ms"], row["vllm_verify_ms"], row["vllm_non_draft_rows"])
    expect("vllm_budget", budget, row["vllm_budget"])
    expect_close("survival of conf", survival(_numbers(row["conf"])), survivals, 1e-4)


def estimators(row: dict[str, Any], folder: Path) -> None:
    """estimators.jsonl: running medians and DeepInfer's slope."""
    if row["what"] == "window_median":
        window = WindowMedian(row["n"], row["min_samples"])
        got = [window.push(value) for value in row["values"]]
    elif row["what"] == "slope":
        slope = SlopeEstimator(row["window"], row["min_samples"])
        got = [slope.push(*event) for event in row["events"]]
    else:
        raise AssertionError(f"unknown kind of estimator vector {row['what']!r}")
    expect("which are known", [value is None for value in got], [value is None for value in row["out"]])
    expect_close("values", [value or 0.0 for value in got], [value or 0.0 for value in row["out"]])
