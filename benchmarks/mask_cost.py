"""What constrained rows cost a step: time to make the masks on the host, and time on the device to apply them.

    uv run python benchmarks/mask_cost.py --tokenizer TOKENIZER.json [--accelerator nvidia] [--rows 32]

The host makes masks while the device computes the logits, so that only the copy and the op are exposed: `exposed` is
their time, from logits that are ready to logits that are masked. Prints the median over repetitions and the 90 %
quantile of both.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.registry import open_accelerator
from deepinfer.engine.constraint import Constraint, Grammars
from deepinfer.engine.model_runner import Transfer

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
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=129280)
    parser.add_argument("--repetitions", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    grammars = Grammars(tokenizer, options.vocabulary, [1], options.rows)
    begin = time.perf_counter()
    matchings = [(row, grammars.begin(Constraint(json_schema=SCHEMA))) for row in range(options.rows)]
    matchings[0][1].wait(300)
    print(f"first grammar, with loading the grammar engine: {time.perf_counter() - begin:.2f} s")
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    for row, matching in matchings:
        assert all(matching.accept(token) for token in ids[: row % len(ids)])
    accelerator = open_accelerator(options.accelerator)
    ops, transfer = (
        accelerator.ops(Precision(torch.bfloat16, round_inputs=True, cache="records")),
        Transfer(accelerator),
    )
    logits = torch.randn(options.rows, options.vocabulary, device=accelerator.device)
    fills: list[float] = []
    exposed: list[float] = []
    for _ in range(options.repetitions):
        _compute(accelerator.device)
        begin = time.perf_counter()
        words = grammars.fill(matchings, options.rows)
        fills.append(time.perf_counter() - begin)
        staged = words.copy().view(np.int64)
        first, last = _events(accelerator.device), _events(accelerator.device)
        begin = _now(first)
        bitmask = transfer.to_device([staged])[0].view(torch.int32)
        ops.mask_tokens(logits, bitmask)
        exposed.append(_since(begin, first, last))
    for name, values in (("fill, behind the model", fills), ("exposed: copy and op", exposed)):
        ordered = sorted(values)
        tail = ordered[int(0.9 * len(ordered))]
        print(f"{name}: median {1e6 * statistics.median(values):.1f} us, 90 % {1e6 * tail:.1f} us")


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
