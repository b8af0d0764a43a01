"""DeepInfer: an inference engine for DeepSeek-V4.1-Flash and V4-Flash.

    from deepinfer import LLM, SamplingParams

    llm = LLM()  # the embedded demo model; or a folder, or a name on the Hugging Face Hub
    for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
        print(completion.text)

Importing the package costs nothing: torch and the engine are loaded when a name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from deepinfer.errors import AcceleratorError, CheckpointError, ConfigError, DeepInferError, RequestError

if TYPE_CHECKING:
    from deepinfer.engine.constraint import Constraint
    from deepinfer.engine.request import Completion, Increment, SamplingParams
    from deepinfer.llm import LLM

__all__ = [
    "LLM",
    "AcceleratorError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Constraint",
    "DeepInferError",
    "Increment",
    "RequestError",
    "SamplingParams",
]

_HOMES = {
    "Constraint": "deepinfer.engine.constraint",
    "LLM": "deepinfer.llm",
    "Increment": "deepinfer.engine.request",
    "Completion": "deepinfer.engine.request",
    "SamplingParams": "deepinfer.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
