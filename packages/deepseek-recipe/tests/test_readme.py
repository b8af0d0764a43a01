"""Every example of the README runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
PATTERN = r"^### (\d+)\. [^\n]*\n\n```python\n(.*?)^```"
EXAMPLES = re.findall(PATTERN, README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_there_are_ten() -> None:
    assert [number for number, _ in EXAMPLES] == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize(("number", "code"), EXAMPLES, ids=[number for number, _ in EXAMPLES])
def test_example(number: str, code: str) -> None:
    exec(compile(code, f"README example {number}", "exec"), {"__name__": "example"})
