"""What constrained rows cost a step: time to make the masks on the host, and time on the device to apply them.

    uv run python benchmarks/mask_cost.py --tokenizer TOKENIZER.json [--accelerator nvidia] [--rows 32]
    uv run python benchmarks/mask_cost.py --tokenizer TOKENIZER.json --write-masks masks.npy
    python benchmarks/mask_cost.py --masks masks.npy --accelerator nvidia

The host makes masks while the device computes the logits, so that only the copy and the op are exposed: `exposed` is
their time, from logits that are ready to logits that are masked. Prints the median over repetitions and the 90 %
quantile of both.  Masks that were made elsewhere serve a machine without the grammar engine: then only `exposed` is
measured.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.registry import open_accelerator
from deepinfer.engine.constraint import Constraint, Grammars, Matching, Words
from deepinfer.engine.model_runner import Transfer

WARM_UP = 5
"""Repetitions that are left out: kernels are compiled in the first."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "code": {"type": "string", "maxLength": 200},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        },
    },
    "required": ["name", "code", "age", "tags", "address"],
}
TEXT = (
    '{"name": "Ada Lovelace", "code": "x = 1; y = 2", "age": 36, "tags": ["red", "blue"], '
    '"address": {"street": "1 St James\'s Square", "zip": "12345"}}'
)


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokenizer", type=Path)
    source.add_argument("--masks", type=Path, help="masks that --write-masks wrote; their rows count")
    parser.add_argument("--write-masks", type=Path, help="write the masks of the first step and stop")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=129280)
    parser.add_argument("--repetitions", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.masks is not None:
        words = np.load(options.masks)
        _measure(options, len(words), words)
        return
    rows: int = options.rows
    grammars, matchings = _grammars(options.tokenizer, options.vocabulary, rows)
    if options.write_masks is not None:
        np.save(options.write_masks, grammars.fill(matchings, rows))
        return
    fills: list[float] = []

    def fill() -> Words:
        begin = time.perf_counter()
        words = grammars.fill(matchings, rows)
        fills.append(time.perf_counter() - begin)
        return words

    _measure(options, rows, fill)
    _print("fill, behind the model", fills)


def _grammars(path: Path, vocabulary: int, rows: int) -> tuple[Grammars, list[tuple[int, Matching]]]:
    """Rows that stand at different places of one schema's text."""
    tokenizer = Tokenizer.from_file(str(path))
    grammars = Grammars(tokenizer, vocabulary, [1], rows)
    begin = time.perf_counter()
    matchings = [(row, grammars.begin(Constraint(json_schema=SCHEMA))) for row in range(rows)]
    matchings[0][1].wait(300)
    print(f"first grammar, with loading the grammar engine: {time.perf_counter() - begin:.2f} s")
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    for row, matching in matchings:
        assert all(matching.accept(token) for token in ids[: row % len(ids)])
    return grammars, matchings


def _measure(options: argparse.Namespace, rows: int, source: Words | Callable[[], Words]) -> None:
    """Time copy and op; `source` gives the masks of a step."""
    accelerator = open_accelerator(options.accelerator)
    ops = accelerator.ops(Precision(torch.bfloat16, round_inputs=True, cache="records"))
    transfer = Transfer(accelerator)
    logits = torch.randn(rows, options.vocabulary, device=accelerator.device)
    exposed: list[float] = []
    for _ in range(options.repetitions):
        _compute(accelerator.device)
        words = source() if callable(source) else source
        staged = words.copy().view(np.int64)
        first, last = _events(accelerator.device), _events(accelerator.device)
        begin = _now(first)
        bitmask = transfer.to_device([staged])[0].view(torch.int32)
        ops.mask_tokens(logits, bitmask)
        exposed.append(_since(begin, first, last))
    _print(f"exposed, {rows} rows: copy and op", exposed[WARM_UP:] or exposed)


def _print(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    tail = ordered[int(0.9 * len(ordered))]
    print(f"{name}: median {1e6 * statistics.median(seconds):.1f} us, 90 % {1e6 * tail:.1f} us")


def _compute(device: torch.device) -> None:
    """Give a device some milliseconds of work, as a model does; the host computes its model before it makes masks."""
    if device.type != "cpu":
        square = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
        for _ in range(3):
            square = square @ square * 1e-4


def _events(device: torch.device) -> torch.Event | None:
    return None if device.type == "cpu" else torch.Event(device, enable_timing=True)


def _now(event: torch.Event | None) -> float:
    if event is not None:
        event.record()
    return time.perf_counter()


def _since(begin: float, first: torch.Event | None, last: torch.Event | None) -> float:
    if first is None or last is None:
        return time.perf_counter() - begin
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


if __name__ == "__main__":
    main()
