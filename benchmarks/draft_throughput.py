"""Tokens a second on the CPU with drafts and without, of the embedded tiny model: what drafts cost where they lose.

    python benchmarks/draft_throughput.py --tokens 600 --rounds 5

Its random weights make drafts that are seldom right, so "auto" has to find out that they do not pay, and rest.  Both
engines take turns in every round, on one thread; a ratio is of processor time in one round, and the median of all is
given with the lowest and highest.
"""

import argparse
import time
from statistics import median

import torch

from deepinfer import LLM, SamplingParams


def seconds(llm: LLM, batch: int, tokens: int) -> float:
    """Processor time of one call that continues `batch` prompts by `tokens` tokens each."""
    prompts = [{"prompt_token_ids": [30 + (7 * row + place) % 200 for place in range(20)]} for row in range(batch)]
    begin = time.process_time()
    done = llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    taken = time.process_time() - begin
    assert all(len(completion.token_ids) == tokens for completion in done)
    return taken


def main() -> None:
    """Read the command line and print a line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--draft", choices=("auto", "on"), default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for batch in arguments.batches:
        engines = {choice: LLM("tiny", accelerator="cpu", draft=choice) for choice in ("off", arguments.draft)}
        ratios, rates = [], []
        for _ in range(arguments.rounds):
            off, drafted = (seconds(llm, batch, arguments.tokens) for llm in engines.values())
            ratios.append(off / drafted)
            rates.append(batch * arguments.tokens / off)
        print(
            f"batch {batch}: {arguments.draft} / off {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"off {median(rates):.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
