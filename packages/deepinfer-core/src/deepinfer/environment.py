"""The environment variables of DeepInfer, read once into a frozen `Environment` for command line, server and examples.

Nothing else reads the environment: `LLM` and the engine take the values as arguments.
"""

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from deepinfer.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]

VARIABLES = {
    "DEEPINFER_ACCELERATOR": 'name of the accelerator, or "auto": the best one that is usable (default)',
    "DEEPINFER_HF_MODEL_DIR": "folder of a checkpoint, or its name on the Hugging Face Hub (default: the demo model)",
    "DEEPINFER_LOG_LEVEL": 'what is written to stderr: "debug", "info" (default), "warning" or "error"',
}
"""Every variable that is read, and what it says."""

_PREFIX = "DEEPINFER_"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    """What the environment says; `model` is None where it names none."""

    accelerator: str = "auto"
    model: str | None = None
    log_level: LogLevel = "info"


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read every DEEPINFER_* variable; an empty one counts as not set, an unknown one gets a warning.

    Raises `ConfigError` for a value that cannot be.
    """
    for name in sorted(variables):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            _log.warning("environment variable %s is not known and has no effect; %s", name, _nearest(name))
    return Environment(
        accelerator=variables.get("DEEPINFER_ACCELERATOR") or "auto",
        model=variables.get("DEEPINFER_HF_MODEL_DIR") or None,
        log_level=_log_level(variables.get("DEEPINFER_LOG_LEVEL") or "info"),
    )


def prepare_for_torch() -> None:
    """Set what torch reads when it is imported, where the user has not; call it before that.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0: plain `import torch` would import every device package that is installed, and with
    torch_npu but no driver it raises.  A kernel wheel imports what it needs.
    OMP_WAIT_POLICY=PASSIVE: threads that wait for the next small op sleep instead of spinning; where other processes
    want the same cores, spinning makes decoding on the CPU more than ten times slower.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _nearest(name: str) -> str:
    tails = [known.removeprefix(_PREFIX) for known in VARIABLES]  # the shared prefix would make every name look close
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), tails, n=1)
    return f"did you mean {_PREFIX}{close[0]}?" if close else f"known are {', '.join(VARIABLES)}"


def _log_level(value: str) -> LogLevel:
    for level in get_args(LogLevel):
        if value.lower() == level:
            return level  # type: ignore[no-any-return]
    raise ConfigError(f"DEEPINFER_LOG_LEVEL is expected to be one of {', '.join(get_args(LogLevel))}, got {value!r}")
