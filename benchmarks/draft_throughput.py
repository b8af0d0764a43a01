"""Tokens a second on the CPU with drafts and without: what drafts cost where they lose, and bring where they gain.

    python benchmarks/draft_throughput.py --tokens 600 --rounds 5
    python benchmarks/draft_throughput.py --chat

The tiny model's random weights make drafts that are seldom right, so "auto" has to find out that they do not pay, and
rest.  With --chat the demo model answers questions one after the other, in which most drafts are right.  Both engines
take turns in every round, on one thread; a ratio is of processor time in one round, and the median of all is given with
the lowest and highest.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from deepinfer import LLM, SamplingParams

QUESTIONS = [f"What is {left} + {right}?" for left, right in ((12, 7), (31, 22), (8, 45), (60, 17))]
QUESTIONS += [f"What is {left} - {right}?" for left, right in ((45, 12), (80, 33), (19, 6), (72, 51))]


def continued(batch: int, tokens: int) -> Callable[[LLM], int]:
    """A call that continues `batch` prompts by `tokens` tokens each; returns how many came."""
    prompts = [{"prompt_token_ids": [30 + (7 * row + place) % 200 for place in range(20)]} for row in range(batch)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return lambda llm: sum(len(done.token_ids) for done in llm.generate(prompts, params))


def answered(llm: LLM) -> int:
    """Ask every question, one after the other; returns how many tokens came."""
    params, tokens = SamplingParams(temperature=0, max_tokens=200), 0
    for asked in QUESTIONS:
        answer = llm.chat([{"role": "user", "content": asked}], None, params, thinking=False, stream=True)
        for _ in answer:
            pass
        tokens += len(answer.completion.token_ids)
    return tokens


def compare(name: str, model: str, draft: str, run: Callable[[LLM], int], rounds: int) -> None:
    """Print the ratio of processor times of both engines, after one call that warms up."""
    engines = [LLM(model, accelerator="cpu", draft=choice) for choice in ("off", draft)]
    assert len({run(llm) for llm in engines}) == 1, "both give the same tokens"
    ratios, rates = [], []
    for _ in range(rounds):
        times = []
        for llm in engines:
            begin = time.process_time()
            tokens = run(llm)
            times.append(time.process_time() - begin)
        ratios.append(times[0] / times[1])
        rates.append(tokens / times[0])
    print(
        f"{name}: {draft} / off {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"off {median(rates):.0f} tokens/s",
        flush=True,
    )


def main() -> None:
    """Read the command line and print a line a batch size, or one of the questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--draft", choices=("auto", "on"), default="auto")
    parser.add_argument("--chat", action="store_true", help="questions to the demo model instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.chat:
        compare("questions", "demo", arguments.draft, answered, arguments.rounds)
        return
    for batch in arguments.batches:
        run = continued(batch, arguments.tokens)
        compare(f"batch {batch}", "tiny", arguments.draft, run, arguments.rounds)


if __name__ == "__main__":
    main()
