"""An LLM that is killed while it generates: the next one finds what was kept, and gives the tokens of a cold one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from deepinfer import LLM, SamplingParams
from deepinfer.engine.request import Completion
from deepinfer.model.tiny import write_tiny

CHILD = """
import json, sys
from deepinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], accelerator="cpu", dtype="float64", kv_cache_dtype="model", max_num_seqs=4, max_model_len=1024,
          overlap=True, prefix_cache_dir=sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
for turn, prompts in enumerate(json.load(open(sys.argv[3]))):
    for _ in llm.generate(prompts, params, stream=True):
        print(turn, flush=True)
"""


def prompts(turn: int) -> list[list[int]]:
    """Three texts, of which two begin as those of other turns do."""
    lengths = (300, 420, 90)
    return [[5 + (7 * i * i + i + 3 * turn * (i >= 260)) % 190 for i in range(length)] for length in lengths]


def open_llm(folder: Path, **options: object) -> LLM:
    return LLM(
        folder,
        accelerator="cpu",
        dtype="float64",
        kv_cache_dtype="model",
        max_num_seqs=4,
        max_model_len=1024,
        overlap=True,
        **options,  # type: ignore[arg-type]
    )


def killed_at(folder: Path, kept: Path, increments: int) -> int:
    """Run a process that serves turn after turn, kill it behind so many increments; return the turn it was in."""
    turns = folder.parent / "turns.json"
    turns.write_text(json.dumps([prompts(turn) for turn in range(30)]))
    command = [sys.executable, "-c", CHILD, str(folder), str(kept), str(turns)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    turn = 0
    for _ in range(increments):
        turn = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    return turn


def ask(llm: LLM, turn: int) -> list[Completion]:
    return llm.generate(prompts(turn), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))


def check_kills(tmp_path: Path, kills: int) -> None:
    """Each time the folder goes on from the last kill, and what was served before it is found again."""
    folder, kept = tmp_path / "model", tmp_path / "kept"
    write_tiny(folder)
    generator = np.random.default_rng(kills)
    cold = open_llm(folder, prefix_cache="off")
    for _ in range(kills):
        # Turns of 3 x 24 tokens: always behind the first turn, which is kept, and in the middle of another.
        turn = killed_at(folder, kept, int(generator.integers(100, 400)))
        assert turn >= 1
        warm = open_llm(folder, prefix_cache_dir=kept)
        for asked in (turn, 0):
            for found, wanted in zip(ask(warm, asked), ask(cold, asked), strict=True):
                assert found.token_ids == wanted.token_ids
                assert found.cache is not None
                assert found.cache.hit in (0, 128, 256, 384)
                if asked == 0 and len(found.prompt_token_ids) > 256:
                    assert found.cache.hit >= 256, found.cache
                    assert found.num_cached_tokens >= 128, found.cache
        warm.close()


def test_a_killed_llm_goes_on_from_what_it_kept(tmp_path: Path) -> None:
    check_kills(tmp_path, 1)


def test_an_llm_killed_many_times(tmp_path: Path, soak_s: float) -> None:
    assert soak_s > 0
    check_kills(tmp_path, 20)
