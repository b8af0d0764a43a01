"""The page of error messages, `docs/errors.md`: tests produce each message and hold the page to it.

A section is a heading and a table of two columns, what is wrong and what a user sees.  To bring the page up to date:

    WRITE_ERRORS_PAGE=1 uv run pytest packages/deepinfer-core/tests -k fault
"""

import os
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"
WRITE = "WRITE_ERRORS_PAGE"
HEADER = ["| what is wrong | what you see |", "|---|---|"]


class ErrorsPage:
    """Checks rows of the page, or writes them."""

    def check(self, section: str, fault: str, message: str) -> None:
        """Hold the row of `fault` in `section` to `message`; paths in it should read MODEL, not a temporary folder."""
        if os.environ.get(WRITE):
            self._write(section, fault, message)
        rows = self._rows(section)
        assert rows.get(fault) == _cell(message), f"{PAGE.name} is out of date; see the top of {Path(__file__).name}"

    def check_complete(self, section: str, faults: Iterable[str]) -> None:
        """Hold the rows of `section` to exactly `faults`, in their order."""
        faults = list(faults)
        if os.environ.get(WRITE):
            rows = self._rows(section)
            self._replace(section, {fault: rows[fault] for fault in faults})
        assert list(self._rows(section)) == faults, f"{PAGE.name} has other rows in {section!r}"

    def _rows(self, section: str) -> dict[str, str]:
        start, end = self._find(section)
        cells = [line.strip("| ").split(" | ", 1) for line in self._lines()[start:end] if line.startswith("| ")]
        return {cell[0]: cell[1] for cell in cells[1:]}

    def _write(self, section: str, fault: str, message: str) -> None:
        self._replace(section, self._rows(section) | {fault: _cell(message)})

    def _replace(self, section: str, rows: dict[str, str]) -> None:
        lines = self._lines()
        start, end = self._find(section)
        text = next((at for at in range(start, end) if lines[at].startswith("|")), end)
        table = [*HEADER, *(f"| {fault} | {message} |" for fault, message in rows.items()), ""]
        PAGE.write_text("\n".join([*lines[:text], *table, *lines[end:]]).rstrip() + "\n", encoding="utf-8")

    def _lines(self) -> list[str]:
        return PAGE.read_text(encoding="utf-8").splitlines()

    def _find(self, section: str) -> tuple[int, int]:
        """First line after the heading of `section`, and the line of the next heading."""
        lines = self._lines()
        heading = f"## {section}"
        assert heading in lines, f"{PAGE.name} needs a line {heading!r}"
        start = lines.index(heading) + 1
        return start, next((at for at in range(start, len(lines)) if lines[at].startswith("## ")), len(lines))


def _cell(message: str) -> str:
    return message.replace("|", r"\|").replace("\n", " ")
