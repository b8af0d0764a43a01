"""Wrong installations: each ends with a message that says what to do, and `docs/errors.md` shows it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.accelerator.cpu import host_memory
from deepinfer.accelerator.parameters import Precision
from deepinfer.accelerator.registry import drafter_class, open_accelerator
from deepinfer.errors import AcceleratorError
from deepinfer.installation import check_recipe, our_wheels

SECTION = "Installation"
NOWHERE = Path("/nowhere")
ENTRY = "AcceleratorEntry({version}, 2000, '{module}_device:Device', lambda: {reason})"
DEVICE = "from deepinfer.accelerator.cpu import CpuAccelerator as Device"
CARELESS = """
from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.cpu import CpuAccelerator
class Device(CpuAccelerator):
    name = "abacus"
    deterministic_ops = Accelerator.deterministic_ops
"""


@dataclass(frozen=True)
class Fault:
    """What is wrong, how to bring it about in a site, and how a user meets it."""

    what: str
    breaks: Callable[[Any], None]
    meets: Callable[[], object]
    words: tuple[str, ...]


def wheel(
    name: str, *, version: int = 1, reason: str = "None", entry: str = "", target: str = DEVICE
) -> Callable[[Any], None]:
    """Install a wheel that publishes the accelerator "abacus"."""
    expression = entry or ENTRY.format(version=version, module=name.replace("-", "_"), reason=reason)
    return lambda site: site.accelerator(name, "abacus", expression, target=target)


def both(*steps: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda site: [step(site) for step in steps] and None


def nothing(site: Any) -> None:
    """Break nothing."""


def rival(site: Any) -> None:
    expression = "AcceleratorEntry(1, 2000, 'fake_rival_device:Device', lambda: None)"
    site.accelerator("fake-rival", "rival", expression, target=DEVICE)


def extra(site: Any) -> None:
    """A meta wheel with the extra "abacus", whose wheel is not installed."""
    site.install("deepinfer", version="0.1.0", requires="deepinfer-core")
    (metadata,) = site.folder.glob("deepinfer-*.dist-info/METADATA")
    metadata.write_text(metadata.read_text() + "Provides-Extra: abacus\n")


def stranger(name: str, version: str) -> Callable[[Any], None]:
    return lambda site: site.install(name, version=version, requires="numpy")


def open_abacus() -> object:
    return open_accelerator("abacus")


def deepinfer_wheel() -> None:
    (found,) = [found for found in our_wheels() if found.name == "deepinfer"]
    if found.fault is not None:
        raise AcceleratorError(found.fault)


FAULTS = [
    Fault("an accelerator that nobody publishes", nothing, open_abacus, ("no accelerator is named 'abacus'",)),
    Fault("a slip of the pen", nothing, lambda: open_accelerator("cpuu"), ("did you mean 'cpu'?",)),
    Fault("an extra that is not installed", extra, open_abacus, ("comes with an extra", 'uv pip install ".[abacus]"')),
    Fault(
        "a missing device", wheel("fake-wheel", reason="'no abacus on this desk'"), open_abacus, ("no abacus on this",)
    ),
    Fault(
        "a wheel that does not import",
        wheel("fake-wheel", entry="__import__('beads')"),
        open_abacus,
        ("fake-wheel 1.0", "No module named 'beads'", "reinstall or uninstall fake-wheel"),
    ),
    Fault(
        "a wheel for a newer contract",
        wheel("fake-wheel", version=2),
        open_abacus,
        ("version 2 of the accelerator contract", "update deepinfer-core"),
    ),
    Fault(
        "a wheel for an older contract",
        wheel("fake-wheel", version=0),
        open_abacus,
        ("version 0 of the accelerator contract", "update fake-wheel"),
    ),
    Fault(
        "a wheel that publishes something else", wheel("fake-wheel", entry="42"), open_abacus, ("to be an entry with",)
    ),
    Fault(
        "a probe that fails", wheel("fake-wheel", reason="1 / 0"), open_abacus, ("its probe failed: ZeroDivisionError",)
    ),
    Fault(
        "two wheels with one name",
        both(wheel("fake-wheel"), wheel("fake-other")),
        open_abacus,
        ("fake-wheel 1.0", "fake-other 1.0", "uninstall all but one"),
    ),
    Fault(
        "two wheels with one name, under auto",
        both(wheel("fake-wheel"), wheel("fake-other")),
        lambda: open_accelerator("auto"),
        ("cannot be chosen", "uninstall all but one"),
    ),
    Fault(
        "two accelerators of equal priority, under auto",
        both(wheel("fake-wheel"), rival),
        lambda: open_accelerator("auto"),
        ("the same priority 2000", "choose one with"),
    ),
    Fault(
        "a class that does not load",
        wheel("fake-wheel", target="import beads"),
        open_abacus,
        ("fake_wheel_device:Device does not load", "reinstall fake-wheel"),
    ),
    Fault(
        "a device that does not open",
        wheel("fake-wheel", target="def Device(): raise RuntimeError('the beads are stuck')"),
        open_abacus,
        ("did not open its device", "the beads are stuck"),
    ),
    Fault(
        "a class that is no accelerator",
        wheel("fake-wheel", target="class Device: pass"),
        open_abacus,
        ("is expected to be a deepinfer.accelerator.base.Accelerator",),
    ),
    Fault(
        "deterministic=True on an accelerator that cannot",
        wheel("fake-wheel", target=CARELESS),
        lambda: open_accelerator("abacus").deterministic_ops(Precision(torch.float32, False, "model")),
        ("accelerator 'abacus' has no deterministic ops", 'choose accelerator="cpu"'),
    ),
    Fault("a drafter that nobody publishes", nothing, lambda: drafter_class("beads"), ("no drafter is named 'beads'",)),
    Fault(
        "a stranger's deepseek-recipe",
        stranger("deepseek-recipe", "0.2.0"),
        check_recipe,
        ("deepseek-recipe 0.2.0 is installed", ">=0.3,<0.4 of DeepInfer is needed"),
    ),
    Fault("a stranger's deepinfer", stranger("deepinfer", "0.0.9"), deepinfer_wheel, ("0.0.9 is of somebody else",)),
    Fault("a kernel that does not show /proc/meminfo", nothing, lambda: host_memory(NOWHERE), ("runs on Linux",)),
]


def told(fault: Fault) -> str:
    """The message, with what differs between machines left out."""
    with pytest.raises(AcceleratorError) as caught:
        fault.meets()
    return re.sub(r"installed: [^;]*", "installed: (their names and wheels)", str(caught.value))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_fault_has_its_message(fault: Fault, site: Any, errors_page: Any) -> None:
    fault.breaks(site)
    message = told(fault)
    assert "\n" not in message
    for words in fault.words:
        assert words in message
    errors_page.check(SECTION, fault.what, message)


def test_page_has_all_faults(errors_page: Any) -> None:
    errors_page.check_complete(SECTION, [fault.what for fault in FAULTS])
