"""The bars on stderr that show how loading weights, or a long command, advances; on a terminal only.

How much there is to read is told by `model/weights.py`.
"""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LARGE_BYTES = 64 << 20
"""Below this no bar is shown: it would be gone before it is seen."""


class LoadingBar:
    """A bar of bytes; shown on a terminal only, and only where there is much to read."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def start(self, total: int) -> None:
        """Begin a bar of `total` bytes."""
        if total < LARGE_BYTES or not self._console.is_terminal:
            return
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(TextColumn("loading"), *columns, console=self._console, transient=True)
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def advance(self, count: int) -> None:
        """Add `count` bytes."""
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def finish(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def counted[Item](what: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """Yield `items`, of which there will be `total`, under a bar."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(items, total=total)
