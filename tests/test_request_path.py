"""One request is one straight line: the files that it passes are those ARCHITECTURE.md lists, and they stay few."""

import re
import sys
from pathlib import Path
from types import CodeType

import deepinfer
from deepinfer import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
CORE = Path(deepinfer.__file__).parent
OP_BODIES = ("accelerator/ops/", "accelerator/cpu_ops")
MOST_FILES, MOST_LINES = 26, 4500


def listed() -> set[str]:
    """The files of the list behind `<!-- request path -->`, relative to core's folder."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    block = text.split("<!-- request path -->")[1].split("```")[1]
    return {name.removeprefix("deepinfer/") for name in re.findall(r"deepinfer/\S+\.py", block)}


def traced() -> set[str]:
    """The files whose code runs between a prompt and its completion, op bodies left out."""
    llm = LLM("tiny", accelerator="cpu", max_num_seqs=2)
    seen: set[str] = set()

    def entered(code: CodeType, offset: int) -> object:
        seen.add(code.co_filename)
        return sys.monitoring.DISABLE

    tool = sys.monitoring.PROFILER_ID
    sys.monitoring.use_tool_id(tool, "request path")
    sys.monitoring.register_callback(tool, sys.monitoring.events.PY_START, entered)
    sys.monitoring.set_events(tool, sys.monitoring.events.PY_START)
    try:
        prompt = {"prompt_token_ids": [5 + i % 90 for i in range(150)]}
        llm.generate([prompt, "twice"], SamplingParams(max_tokens=4, temperature=0.5, logprobs=1, ignore_eos=True))
    finally:
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.free_tool_id(tool)
    names = {str(Path(name).relative_to(CORE)) for name in seen if Path(name).is_relative_to(CORE)}
    return {name for name in names if not name.startswith(OP_BODIES)}


def test_the_list_is_the_path_and_the_path_is_short() -> None:
    files = listed()
    assert traced() <= files
    assert len(files) <= MOST_FILES
    assert sum(len((CORE / name).read_text(encoding="utf-8").splitlines()) for name in files) <= MOST_LINES
