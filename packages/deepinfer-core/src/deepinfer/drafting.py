"""Whether and with what an `LLM` drafts: finds a drafter, and says in words where there is none.

How drafts are made and judged is `engine/speculation.py`'s and the drafter's.
"""

import logging
from typing import Any

from deepinfer.accelerator.registry import drafter_class, list_drafters
from deepinfer.engine.config import DraftChoice
from deepinfer.errors import ConfigError
from deepinfer.model.config import ModelConfig

_log = logging.getLogger(__name__)


def find_drafter(choice: DraftChoice, model: ModelConfig) -> Any:
    """Return the class of the drafter to use, None for none.

    "auto" does without where the checkpoint or the installation has none, and says so in the log; "on" raises
    ConfigError, which says what is missing.
    """
    if choice == "off":
        return None
    problem = _problem(model)
    if problem is None:
        return drafter_class(list_drafters()[0].name)
    if choice == "on":
        raise ConfigError(f'draft="on" cannot be: {problem}, or use draft="off"')
    _log.warning("no drafts: %s", problem)
    return None


def _problem(model: ModelConfig) -> str | None:
    """Why nothing can be drafted, and what to do about it."""
    if model.draft is None:
        return f"this {model.family} checkpoint has no draft stages (mtp.*); take one that has"
    candidates = list_drafters()
    if not candidates:
        return "no drafter is installed: `pip install deepspark`"
    best = candidates[0]
    return None if best.reason is None else f"drafter {best.name!r} of {best.wheel} cannot be used: {best.reason}"
