"""Recognising our wheels and those of strangers who use the same names."""

from typing import Any

import pytest

from deepinfer.errors import AcceleratorError
from deepinfer.installation import Wheel, check_recipe, libraries, our_wheels


def wheel(name: str) -> Wheel:
    return next(found for found in our_wheels() if found.name == name)


def test_our_own_recipe_and_core_are_in_order() -> None:
    check_recipe()
    for name in ("deepinfer-core", "deepseek-recipe"):
        assert wheel(name).version is not None
        assert wheel(name).fault is None


@pytest.mark.parametrize("version", ["0.1.1", "0.2.0", "0.4.0", "1.0"])
def test_a_strangers_recipe_is_named(site: Any, version: str) -> None:
    site.install("deepseek-recipe", version=version)
    with pytest.raises(AcceleratorError) as caught:
        check_recipe()
    text = str(caught.value)
    assert f"deepseek-recipe {version} is installed, deepseek-recipe >=0.3,<0.4 of DeepInfer is needed" in text
    assert "install it from a checkout" in text


def test_a_prerelease_of_ours_fits(site: Any) -> None:
    site.install("deepseek-recipe", version="0.3.1.dev2")
    check_recipe()


def test_a_strangers_deepinfer_is_named(site: Any) -> None:
    site.install("deepinfer", version="0.0.9", requires="numpy")
    fault = wheel("deepinfer").fault
    assert fault is not None
    assert "deepinfer 0.0.9 is of somebody else" in fault
    assert "uninstall it" in fault


def test_our_meta_wheel_is_known_by_what_it_needs(site: Any) -> None:
    site.install("deepinfer", version="0.1.0", requires="deepinfer-core[structured]<0.2,>=0.1")
    assert wheel("deepinfer") == Wheel("deepinfer", "0.1.0")


def test_libraries_have_versions() -> None:
    versions = {library.name: library.version for library in libraries()}
    assert versions["torch"]
    assert versions["numpy"]
