"""The real models that tests of the engine share, each loaded once a session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from .loaded import Loaded, load, load_tiny


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory, golden_dir: Callable[[str], Path]) -> Callable[[str], Loaded]:
    """Return a function that loads a model by name: a family ("deepseek_v4") or a golden checkpoint ("v41-a")."""

    @cache
    def load_once(name: str) -> Loaded:
        if name.startswith("deepseek"):
            return load_tiny(tmp_path_factory.mktemp("tiny") / name, name)
        return load(golden_dir(name))

    return load_once
