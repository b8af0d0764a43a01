"""Which wheels are installed, and whether each is ours: strangers have published wheels of two of our names.

Finding accelerators and drafters among them is `accelerator/registry.py`'s.
"""

import re
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from deepinfer.errors import AcceleratorError

RECIPE = "deepseek-recipe"
RECIPE_FROM, RECIPE_BELOW = (0, 3), (0, 4)
"""The versions of our recipe that this engine works with; those of strangers are older."""

REQUIRED = ("deepinfer-core", RECIPE)
OPTIONAL = ("deepinfer", "deepspark")
LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface_hub", "xgrammar")


@dataclass(frozen=True)
class Wheel:
    """A distribution by name: `version` None = not installed; `fault` says what is wrong with it."""

    name: str
    version: str | None
    fault: str | None = None


def our_wheels() -> list[Wheel]:
    """Return the wheels of this project that are not kernel wheels, each with its fault."""
    return [_judge(name) for name in (*REQUIRED, *OPTIONAL)]


def libraries() -> list[Wheel]:
    """Return the libraries that decide what runs, with their versions."""
    return [Wheel(name, found.version if (found := _find(name)) else None) for name in LIBRARIES]


def check_recipe() -> None:
    """Raise `AcceleratorError` when deepseek-recipe is missing or a stranger's."""
    if (fault := _judge(RECIPE).fault) is not None:
        raise AcceleratorError(fault)


def _judge(name: str) -> Wheel:
    found = _find(name)
    if found is None:
        fault = f"{name} is not installed: install it from a checkout of DeepInfer" if name in REQUIRED else None
        return Wheel(name, None, fault)
    fault = None
    if name == RECIPE and not RECIPE_FROM <= _numbers(found.version) < RECIPE_BELOW:
        low, high = (".".join(map(str, version)) for version in (RECIPE_FROM, RECIPE_BELOW))
        fault = (
            f"{name} {found.version} is installed, {name} >={low},<{high} of DeepInfer is needed; older ones are of "
            f"somebody else: install it from a checkout of DeepInfer (packages/{name})"
        )
    if name == "deepinfer" and not _requires_core(found):
        fault = (
            f"{name} {found.version} is of somebody else (it does not need deepinfer-core) and overwrites our modules: "
            "uninstall it, then install DeepInfer again from its checkout"
        )
    return Wheel(name, found.version, fault)


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _requires_core(found: Distribution) -> bool:
    return any(re.match(r"deepinfer[-_.]core\b", text, re.IGNORECASE) for text in found.requires or [])


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 3, 0) of "0.3.0.dev1"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
