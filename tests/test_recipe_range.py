"""The recipe that the engine accepts when it runs is the one that its wheel asks for."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from deepinfer.installation import RECIPE, RECIPE_BELOW, RECIPE_FROM

CORE = Path(__file__).parents[1] / "packages/deepinfer-core/pyproject.toml"


def test_the_two_ranges_are_one() -> None:
    texts = tomllib.loads(CORE.read_text())["project"]["dependencies"]
    (needed,) = [requirement for requirement in map(Requirement, texts) if requirement.name == RECIPE]
    bounds = {part.operator: Version(part.version).release[:2] for part in needed.specifier}
    assert bounds == {">=": RECIPE_FROM, "<": RECIPE_BELOW}
