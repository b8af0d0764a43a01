"""Every example runs on the embedded demo model and prints what `examples/README.md` says."""

import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SECTION = re.compile(r"## \[(\w+\.py)\].*?```text\n(.*?)```", re.DOTALL)
SAID = dict(SECTION.findall((EXAMPLES / "README.md").read_text(encoding="utf-8")))


def test_every_example_is_told() -> None:
    assert set(SAID) == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", sorted(SAID))
def test_it_prints_what_the_readme_says(name: str) -> None:
    settings = {**os.environ, "DEEPINFER_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    settings.pop("DEEPINFER_HF_MODEL_DIR", None)
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = SAID[name]
    if name == "offline_inference.py":  # a text may have lines of its own
        pattern = ".*".join(re.escape(part) for part in expected.split("…"))
        assert re.fullmatch(pattern, done.stdout, re.DOTALL)
        return
    for line, said in zip_longest(done.stdout.splitlines(), expected.splitlines(), fillvalue=""):
        assert re.fullmatch(".+".join(re.escape(part) for part in said.split("…")), line), line
