"""A timeline of an engine as a file that chrome://tracing and ui.perfetto.dev show.

What happens when is told by `observer.py`; nothing here is kept in memory.
Source: Trace Event Format, JSON array.
"""

import json
import threading
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError

STEPS, REQUESTS = 1, 2
"""Process numbers, which viewers show as groups: one track of steps, and a track for each request."""


class Trace:
    """Writes events to `path` as they come; the file can be read from the start on, also without its end.

    Times are seconds of one monotonic clock.  Raises ConfigError when the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: the trace cannot be written ({error.strerror}): choose another file") from error
        self._file.write("[\n")
        self._begun = False
        self._lock = threading.Lock()
        for process, name in ((STEPS, "engine"), (REQUESTS, "requests")):
            self._write({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})

    def name_track(self, process: int, track: int, name: str) -> None:
        """Give a track its name."""
        self._write({"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}})

    def span(self, process: int, track: int, name: str, begin: float, end: float, **facts: Any) -> None:
        """Something that took from `begin` to `end`; spans of a track may lie inside one another."""
        times = {"ts": round(begin * 1e6, 1), "dur": round((end - begin) * 1e6, 1)}
        self._write({"ph": "X", "name": name, "pid": process, "tid": track, **times, "args": facts})

    def levels(self, name: str, at: float, **levels: float) -> None:
        """Some quantities at one moment, shown as a curve."""
        self._write({"ph": "C", "name": name, "pid": STEPS, "ts": round(at * 1e6, 1), "args": levels})

    def close(self) -> None:
        """Finish the file; may be repeated."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._file.write((",\n" if self._begun else "") + json.dumps(event))
            self._begun = True
