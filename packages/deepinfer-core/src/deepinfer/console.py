"""What the command line shows on stderr: log lines, errors in one line, a clean end on Ctrl-C.

Commands are `cli.py`'s; stdout belongs to their results.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import override

import click
from click.exceptions import Exit

from deepinfer.environment import LogLevel
from deepinfer.errors import DeepInferError

FAILED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
"""Exit codes: an error of the tree in `errors.py`, Ctrl-C, and a reader of stdout that has gone (128 + signal)."""


@contextmanager
def reported(*, debug: bool = False) -> Iterator[None]:
    """Turn every `DeepInferError` into one red line and exit code 2; with `debug` show where it came from as well."""
    try:
        yield
    except DeepInferError as error:
        if debug:
            traceback.print_exc()
        click.secho(f"error: {error}", fg="red", err=True)
        raise Exit(FAILED) from None
    except KeyboardInterrupt:
        click.echo("\ninterrupted", err=True)
        raise Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Python would complain again when it flushes stdout on the way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Exit(PIPE_CLOSED) from None


class _Lines(logging.Handler):
    """Writes `deepinfer: text` to stderr, with the level where it is a warning or worse."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        click.echo(f"deepinfer: {level}{self.format(record)}", err=True)


def show_log(level: LogLevel) -> None:
    """Write the engine's log lines of `level` and above to stderr."""
    logger = logging.getLogger("deepinfer")
    logger.handlers = [_Lines()]
    logger.setLevel(level.upper())
