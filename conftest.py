"""Pytest options that all packages' tests share; what a test checks stays in the folder of its package.

A test that asks for the fixture `extra_data` runs only with `--extra-data DIR`, one that asks for `soak_s` only with
`--soak SECONDS`; without the option it is deselected, so that a plain clone has no skipped tests.
"""

from pathlib import Path

import pytest
from hypothesis import settings

OPTION_OF_FIXTURE = {"extra_data": "--extra-data", "soak_s": "--soak"}

settings.register_profile("deepinfer", deadline=None, print_blob=True)
settings.register_profile("soak", parent=settings.get_profile("deepinfer"), max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("deepinfer")
    group.addoption("--extra-data", type=_folder, metavar="DIR", help="also run the tests that need data from DIR")
    group.addoption("--accelerator", default="cpu", metavar="NAME", help="run the golden tests on this accelerator")
    group.addoption("--soak", type=float, metavar="SECONDS", help="also run the soak tests, each for SECONDS")


def pytest_configure(config: pytest.Config) -> None:
    """Load the hypothesis profile: no deadline, because a shared machine may pause a test at any point."""
    soak = config.getoption("--soak") is not None
    if config.getoption("--hypothesis-profile", default=None) is None:
        settings.load_profile("soak" if soak else "deepinfer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect every test whose fixture needs an option that was not given."""
    absent = {name for name, option in OPTION_OF_FIXTURE.items() if config.getoption(option) is None}
    deselected = [item for item in items if absent.intersection(getattr(item, "fixturenames", ()))]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        gone = set(map(id, deselected))
        items[:] = [item for item in items if id(item) not in gone]


@pytest.fixture(scope="session")
def extra_data(pytestconfig: pytest.Config) -> Path:
    """Return the folder given with `--extra-data`."""
    folder: Path = pytestconfig.getoption("--extra-data")
    return folder


@pytest.fixture(scope="session")
def soak_s(pytestconfig: pytest.Config) -> float:
    """Return the seconds given with `--soak`."""
    seconds: float = pytestconfig.getoption("--soak")
    return seconds


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise pytest.UsageError(f"--extra-data expects an existing folder, got {text!r}")
    return path
