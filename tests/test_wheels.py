"""What the wheels promise one another: versions that fit, entry points that are found, the same papers in each."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT, *sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))]


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


VERSIONS = {_project(folder)["name"]: _project(folder)["version"] for folder in FOLDERS}


def test_all_wheels_are_here() -> None:
    assert set(VERSIONS) == {
        "deepinfer",
        "deepinfer-core",
        "deepinfer-kernels-ascend",
        "deepinfer-kernels-cuda",
        "deepseek-recipe",
        "deepspark",
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_ranges_admit_the_versions_of_this_checkout(folder: Path) -> None:
    project = _project(folder)
    extras = project.get("optional-dependencies", {}).values()
    for text in [*project["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        if requirement.name in VERSIONS:
            assert requirement.specifier, f"{text} needs a range"
            assert VERSIONS[requirement.name] in requirement.specifier


def test_a_recipe_of_strangers_never_fits() -> None:
    for folder in FOLDERS:
        for text in _project(folder)["dependencies"]:
            requirement = Requirement(text)
            if requirement.name == "deepseek-recipe":
                assert "0.2.0" not in requirement.specifier


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_folder_has_its_papers(folder: Path) -> None:
    project = _project(folder)
    assert project["requires-python"] == ">=3.12"
    assert project["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / "README.md").read_text().startswith("# ")
    assert f"## {project['version']}" in (folder / "CHANGELOG.md").read_text()
    if folder != ROOT:
        assert folder.name == project["name"]
        assert len(list(folder.glob("src/*/py.typed"))) == 1


@pytest.mark.parametrize(
    ("group", "names"), [("deepinfer.accelerators", {"ascend", "nvidia"}), ("deepinfer.drafters", {"deepspark"})]
)
def test_entry_points_are_found_once(group: str, names: set[str]) -> None:
    found = [point.name for point in entry_points(group=group)]
    assert sorted(found) == sorted(names)
