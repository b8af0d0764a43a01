"""Decode speed on this CPU: our engine against transformers' DeepseekV4, same tiny V4 weights, float32, one run.

    uv run python benchmarks/cpu_decode.py [--json FILE] [--threads N] [--tokens N] [--rounds N]

Both sides decode greedily from the same prompts with their caches; rounds alternate and the median of each side
counts.  Our numbers are those of `LLM.generate`, with scheduling, sampling and text; theirs are the bare model loop.
On one thread, the default, seconds are of processor time, which other programs disturb less; on more, of the clock.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from deepinfer import LLM, SamplingParams
from deepinfer.model.tiny import write_tiny

PROMPT_TOKENS = 64


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tiny-v4"
        write_tiny(folder, family="deepseek_v4", quantised=False)
        llm = LLM(str(folder), accelerator="cpu", dtype="float32", kv_cache_dtype="model", max_num_seqs=32)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [compare(llm, peer, batch, options.tokens, options.rounds) for batch in (1, 32)]
    report = {
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} thread(s)")
    print(f"{'batch':>5} {'ours tok/s':>11} {'peer tok/s':>11} {'ratio':>6} {'same text':>10}")
    for row in rows:
        print(
            f"{row['batch']:>5} {row['ours']:>11.0f} {row['peer']:>11.0f} {row['ratio']:>6.2f} {row['agreed']:>10.0%}"
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def compare(llm: LLM, peer: torch.nn.Module, batch: int, tokens: int, rounds: int) -> dict[str, float]:
    """Alternate rounds of both sides; their texts must agree before anything is timed.

    In float32 a router or index choice of a random model may flip where two scores differ by 1e-7, so a quarter of the
    sequences may part from one another.
    """
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(3, llm.model_config.vocab_size - 16, (batch, PROMPT_TOKENS), generator=generator)
    ours, theirs = our_decode(llm, prompts, tokens), peer_decode(peer, prompts, tokens)
    agreed = sum(a == b for a, b in zip(ours(), theirs(), strict=True)) / batch
    assert agreed >= 0.75, f"only {agreed:.0%} of the sequences agree: nothing is timed"
    seconds = [(timed(ours), timed(theirs)) for _ in range(rounds)]
    # Both sides prefill in a round; a round of one token takes that part out.
    prefill = [(timed(our_decode(llm, prompts, 1)), timed(peer_decode(peer, prompts, 1))) for _ in range(rounds)]
    speed = [
        batch
        * (tokens - 1)
        / (statistics.median(s[side] for s in seconds) - statistics.median(p[side] for p in prefill))
        for side in (0, 1)
    ]
    return {"batch": batch, "agreed": agreed, "ours": speed[0], "peer": speed[1], "ratio": speed[0] / speed[1]}


def our_decode(llm: LLM, prompts: torch.Tensor, tokens: int) -> Callable[[], list[list[int]]]:
    """A call that decodes `tokens` for every prompt with our engine."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rows = prompts.tolist()
    return lambda: [list(done.token_ids) for done in llm.generate(rows, params)]


def peer_decode(peer: torch.nn.Module, prompts: torch.Tensor, tokens: int) -> Callable[[], list[list[int]]]:
    """The same with the peer: one prefill, then a token at a time with its cache."""

    @torch.inference_mode()
    def run() -> list[list[int]]:
        out = peer(prompts, use_cache=True)
        picked = [out.logits[:, -1:].argmax(-1)]
        while len(picked) < tokens:
            out = peer(picked[-1], past_key_values=out.past_key_values, use_cache=True)
            picked.append(out.logits[:, -1:].argmax(-1))
        return torch.cat(picked, 1).tolist()

    return run


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


if __name__ == "__main__":
    main()
