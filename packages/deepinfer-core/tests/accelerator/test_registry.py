"""Finding accelerators and drafters: who is taken, and what each broken installation is told.

Every wheel here is really installed in a folder of its own and found by the same means as those of users.
"""

import logging
import subprocess
import sys
from typing import Any

import pytest

from deepinfer.accelerator.registry import drafter_class, list_accelerators, list_drafters, open_accelerator
from deepinfer.errors import AcceleratorError

USABLE = "AcceleratorEntry(1, {priority}, '{module}_device:Device', lambda: None)"
DEVICE = """
from deepinfer.accelerator.cpu import CpuAccelerator


class Device(CpuAccelerator):
    name = "quick"
"""


def usable(module: str, priority: int = 1000) -> str:
    return USABLE.format(module=module, priority=priority)


def refusal(name: str) -> str:
    with pytest.raises(AcceleratorError) as caught:
        open_accelerator(name)
    return str(caught.value)


def test_the_reference_is_always_there() -> None:
    candidate = next(c for c in list_accelerators() if c.name == "cpu")
    assert candidate.wheel.startswith("deepinfer-core ")
    assert candidate.reason is None
    assert open_accelerator("cpu").device.type == "cpu"


def test_auto_takes_the_usable_one_of_highest_priority(site: Any) -> None:
    site.accelerator("fake-quick", "quick", usable("fake_quick", 2000), target=DEVICE)
    site.accelerator("fake-slower", "slower", usable("fake_slower", 1000), target=DEVICE)
    site.accelerator("fake-absent", "absent", "AcceleratorEntry(1, 3000, 'm:C', lambda: 'no such device')")
    assert type(open_accelerator("auto")).__module__ == "fake_quick_device"
    assert type(open_accelerator("slower")).__module__ == "fake_slower_device"
    assert "fake_absent_device" not in sys.modules


def test_auto_without_a_device_takes_the_cpu(site: Any) -> None:
    site.accelerator("fake-slowest", "slowest", usable("fake_slowest", -1), target=DEVICE)
    listed = list_accelerators()
    if all(c.reason for c in listed if c.name not in {"cpu", "slowest"}):
        assert open_accelerator("auto").name == "cpu"
    assert [c.name for c in listed].index("cpu") < [c.name for c in listed].index("slowest")


def test_a_missing_device_is_told_with_its_wheel(site: Any) -> None:
    site.accelerator("fake-absent", "absent", "AcceleratorEntry(1, 3000, 'm:C', lambda: 'no such device')")
    text = refusal("absent")
    assert "'absent' of fake-absent 1.0 cannot be used: no such device" in text
    assert 'accelerator="cpu"' in text


def test_an_unknown_name_lists_what_exists() -> None:
    text = refusal("cpuu")
    assert "no accelerator is named 'cpuu'" in text
    assert "'cpu' of deepinfer-core" in text
    assert "did you mean 'cpu'?" in text


def test_an_extra_that_is_not_installed_is_named(site: Any) -> None:
    site.install("deepinfer", version="0.1.0")
    metadata = next(site.folder.glob("deepinfer-*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text() + "Provides-Extra: abacus\n")
    assert 'uv pip install ".[abacus]"' in refusal("abacus")


@pytest.mark.parametrize(("version", "older"), [(0, "fake-old"), (2, "deepinfer-core")])
def test_another_contract_version_is_refused_and_the_older_side_named(site: Any, version: int, older: str) -> None:
    site.accelerator("fake-old", "old", f"AcceleratorEntry({version}, 1, 'm:C', lambda: None)")
    text = refusal("old")
    assert f"fake-old 1.0 cannot be used: was written for version {version} of the accelerator contract" in text
    assert f"the engine has 1: update {older}" in text


def test_a_wheel_that_does_not_import_is_named(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    site.accelerator("fake-broken", "broken", "__import__('no_such_module')")
    text = refusal("broken")
    assert "fake-broken 1.0 cannot be used: does not import: ModuleNotFoundError" in text
    assert "reinstall or uninstall fake-broken" in text
    with caplog.at_level(logging.WARNING):
        open_accelerator("auto")
    (warning,) = [record.getMessage() for record in caplog.records if "fake-broken" in record.getMessage()]
    assert warning.startswith("accelerator 'broken' of fake-broken 1.0 is passed over: does not import")


@pytest.mark.parametrize("entry", ["object()", "AcceleratorEntry(1, 'high', 'm:C', lambda: None)", "None"])
def test_an_entry_of_another_shape_is_refused(site: Any, entry: str) -> None:
    site.accelerator("fake-shape", "shape", entry)
    assert "is expected to be an entry with contract_version, priority, target" in refusal("shape")


def test_a_failing_probe_is_the_wheels_fault(site: Any) -> None:
    site.accelerator("fake-probe", "probing", "AcceleratorEntry(1, 1, 'm:C', lambda: 1 / 0)")
    assert "its probe failed: ZeroDivisionError" in refusal("probing")


def test_two_wheels_with_one_name_are_an_error_for_auto_too(site: Any) -> None:
    site.accelerator("fake-one", "twin", usable("fake_one"), target=DEVICE)
    site.accelerator("fake-two", "twin", usable("fake_two"), target=DEVICE, version="2.0")
    for name in ("twin", "auto"):
        text = refusal(name)
        assert "fake-one 1.0" in text
        assert "fake-two 2.0" in text
        assert "uninstall all but one" in text


def test_nobody_takes_the_name_of_the_reference(site: Any) -> None:
    site.accelerator("fake-cpu", "cpu", usable("fake_cpu"), target=DEVICE)
    assert type(open_accelerator("cpu")).__module__ == "deepinfer.accelerator.cpu"
    assert "fake-cpu 1.0 must not publish it" in refusal("auto")


def test_equal_priorities_are_an_error_only_for_auto(site: Any) -> None:
    site.accelerator("fake-left", "left", usable("fake_left", 5000), target=DEVICE)
    site.accelerator("fake-right", "right", usable("fake_right", 5000), target=DEVICE)
    text = refusal("auto")
    assert "'left' of fake-left 1.0 and 'right' of fake-right 1.0 are usable with the same priority 5000" in text
    assert type(open_accelerator("right")).__module__ == "fake_right_device"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("import no_such_module", "fake_late_device:Device does not load: ModuleNotFoundError"),
        ("", "fake_late_device:Device does not load: AttributeError"),
        ("class Device: pass", "is expected to be a deepinfer.accelerator.base.Accelerator, is Device"),
        ("def Device(): raise RuntimeError('device lost')", "did not open its device: RuntimeError: device lost"),
    ],
)
def test_a_class_that_does_not_open_names_its_wheel(site: Any, target: str, told: str) -> None:
    site.accelerator("fake-late", "late", usable("fake_late"), target=target)
    text = refusal("late")
    assert "'late' of fake-late 1.0" in text
    assert told in text


def test_drafters_follow_the_same_rules_without_importing_the_engine(site: Any) -> None:
    source = """
    class Entry:
        contract_version, priority, target = 1, 0, "{module}:Drafter"
        def probe(self): return {reason!r}
    entry = Entry()
    class Drafter: pass
    """
    for name, reason in (("guess", None), ("tired", "needs a nap")):
        module = f"fake_{name}"
        points = f"[deepinfer.drafters]\n{name} = {module}:entry\n"
        code = source.format(module=module, reason=reason)
        site.install(f"fake-{name}", entry_points=points, **{module: code})
    assert {"guess", "tired"} <= {candidate.name for candidate in list_drafters()}
    assert drafter_class("guess").__module__ == "fake_guess"
    with pytest.raises(AcceleratorError, match=r"drafter 'tired' of fake-tired 1\.0 cannot be used: needs a nap"):
        drafter_class("tired")
    with pytest.raises(AcceleratorError, match=r"no drafter is named 'gues'.*did you mean 'guess'"):
        drafter_class("gues")


def test_listing_loads_no_torch() -> None:
    code = (
        "import sys\nfrom deepinfer.accelerator.registry import list_accelerators, list_drafters\n"
        "list_accelerators(), list_drafters()\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
