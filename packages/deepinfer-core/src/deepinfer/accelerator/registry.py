"""How devices and drafters are found: the entries that wheels publish, why each can or cannot be used, opening one.

What an accelerator offers is `base.py`'s.  No torch is imported here, so that listing takes milliseconds; the class of
an accelerator is loaded by the name in its entry, when it is opened.
"""

import difflib
import importlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata, version
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer.errors import AcceleratorError

if TYPE_CHECKING:
    from deepinfer.accelerator.base import Accelerator

CONTRACT_VERSION = 1
"""Raised when an `Ops` or `Accelerator` method changes meaning; a wheel for another version is refused by name."""

DRAFTER_VERSION = 1
"""The same for drafters."""

AUTO = "auto"

_log = logging.getLogger(__name__)


class Entry(Protocol):
    """The shape of a published entry: plain values and a probe, behind which nothing heavy is imported."""

    @property
    def contract_version(self) -> int:
        """The contract version that the wheel was written for, as a number of its own."""

    @property
    def priority(self) -> int:
        """Among usable accelerators "auto" takes the highest; the CPU reference has 0."""

    @property
    def target(self) -> str:
        """The class to load, as "module:Class"."""

    def probe(self) -> str | None:
        """Return in one line why this cannot be used here, or None when it can; imports no torch."""


@dataclass(frozen=True)
class AcceleratorEntry:
    """An `Entry` made of its parts; what kernel wheels publish in the group `deepinfer.accelerators`."""

    contract_version: int
    priority: int
    target: str
    probe: Callable[[], str | None]


@dataclass(frozen=True)
class Candidate:
    """One published entry and whether it can be used here.

    wheel   name and version of the distribution that publishes it
    reason  in one line why it cannot be used; None = it can
    broken  the wheel is at fault, not the machine
    """

    name: str
    wheel: str
    priority: int
    target: str
    reason: str | None = None
    broken: bool = False


@dataclass(frozen=True)
class _Kind:
    """What accelerators and drafters do not share."""

    word: str
    group: str
    version: int


_ACCELERATOR = _Kind("accelerator", "deepinfer.accelerators", CONTRACT_VERSION)
_DRAFTER = _Kind("drafter", "deepinfer.drafters", DRAFTER_VERSION)


def list_accelerators() -> list[Candidate]:
    """Return every accelerator that is installed, the best usable one first, each with its reason when unusable."""
    return _sorted([_cpu(), *_published(_ACCELERATOR)])


def list_drafters() -> list[Candidate]:
    """Return every drafter that is installed, by the rules of `list_accelerators`."""
    return _sorted(_published(_DRAFTER))


def open_accelerator(name: str = AUTO) -> "Accelerator":
    """Load the accelerator `name` and return it, ready to use.

    "auto" takes the usable one of highest priority and warns about broken wheels that it passes over.  Raises
    `AcceleratorError`, which names the wheel, for an unknown name, a missing device, a wheel that does not import or
    has another contract version, two wheels with one name, and (for "auto") a tie of priorities.
    """
    if not isinstance(name, str):
        raise AcceleratorError(f"an accelerator is chosen by its name or {AUTO!r}, got {name!r}")
    candidates = list_accelerators()
    chosen = _automatic(candidates) if name == AUTO else _named(_ACCELERATOR, candidates, name)
    kind = _load_target(_ACCELERATOR, chosen)
    try:
        opened = kind()
    except AcceleratorError:
        raise
    except Exception as error:
        raise AcceleratorError(
            f"accelerator {chosen.name!r} of {chosen.wheel} did not open its device: {_told(error)}; "
            'run `deepinfer doctor`, or choose accelerator="cpu"'
        ) from error
    contract = _resolve("deepinfer.accelerator.base:Accelerator")
    if not isinstance(opened, contract):
        raise AcceleratorError(
            f"accelerator {chosen.name!r} of {chosen.wheel}: {chosen.target} is expected to be a "
            f"deepinfer.accelerator.base.Accelerator, is {type(opened).__name__}; report it to the wheel's maintainers"
        )
    return opened  # type: ignore[no-any-return]


def drafter_class(name: str) -> Any:
    """Load the class of the drafter `name`; raises `AcceleratorError` by the rules of `open_accelerator`."""
    return _load_target(_DRAFTER, _named(_DRAFTER, list_drafters(), name))


def _cpu() -> Candidate:
    try:
        wheel = f"deepinfer-core {version('deepinfer-core')}"
    except PackageNotFoundError:  # imported from a folder that was never installed
        wheel = "deepinfer-core"
    return Candidate("cpu", wheel, 0, "deepinfer.accelerator.cpu:CpuAccelerator")


def _published(kind: _Kind) -> list[Candidate]:
    candidates = [_inspect(kind, point) for point in entry_points(group=kind.group)]
    counts = Counter(candidate.name for candidate in candidates)
    if kind is _ACCELERATOR:
        counts["cpu"] += 1
    wheels = {name: [c.wheel for c in candidates if c.name == name] for name in counts}
    return [
        c if counts[c.name] == 1 else _broken(c.name, c.wheel, _twice(kind, c.name, wheels[c.name])) for c in candidates
    ]


def _twice(kind: _Kind, name: str, wheels: list[str]) -> str:
    if kind is _ACCELERATOR and name == "cpu":
        return f"the name 'cpu' belongs to the reference in deepinfer-core, {' and '.join(wheels)} must not publish it"
    return f"{' and '.join(wheels)} publish the same name {name!r}: uninstall all but one of them"


def _inspect(kind: _Kind, point: EntryPoint) -> Candidate:
    """Load the light entry behind `point` and judge it; whatever a stranger's wheel does wrong becomes its reason."""
    wheel = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
    distribution = wheel.partition(" ")[0]
    try:
        entry: Entry = point.load()
    except Exception as error:  # noqa: BLE001 - importing a broken wheel may raise anything
        return _broken(point.name, wheel, f"does not import: {_told(error)}; reinstall or uninstall {distribution}")
    if not _has_shape(entry):
        return _broken(
            point.name,
            wheel,
            f"{point.value} is expected to be an entry with contract_version, priority, target ('module:Class') and "
            f"probe(), is {entry!r:.80}; update {distribution}",
        )
    has = entry.contract_version
    if has != kind.version:
        old = distribution if has < kind.version else "deepinfer-core"
        return _broken(
            point.name,
            wheel,
            f"was written for version {has} of the {kind.word} contract, the engine has {kind.version}: update {old}",
        )
    try:
        reason = entry.probe()
    except Exception as error:  # noqa: BLE001 - the probe is the wheel's code
        return _broken(point.name, wheel, f"its probe failed: {_told(error)}; update {distribution}")
    return Candidate(point.name, wheel, entry.priority, entry.target, reason)


def _has_shape(entry: Any) -> bool:
    try:
        numbers = isinstance(entry.contract_version, int) and isinstance(entry.priority, int)
        return numbers and ":" in entry.target and callable(entry.probe)
    except (AttributeError, TypeError):
        return False


def _broken(name: str, wheel: str, reason: str) -> Candidate:
    return Candidate(name, wheel, 0, "", reason, broken=True)


def _sorted(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (c.reason is not None, -c.priority, c.name, c.wheel))


def _automatic(candidates: list[Candidate]) -> Candidate:
    counts = Counter(candidate.name for candidate in candidates)
    twice = {name for name, count in counts.items() if count > 1}
    for candidate in candidates:
        if candidate.broken and candidate.name in twice:
            raise AcceleratorError(f"accelerator {candidate.name!r} cannot be chosen: {candidate.reason}")
        if candidate.broken:
            _log.warning("accelerator %r of %s is passed over: %s", candidate.name, candidate.wheel, candidate.reason)
    usable = [candidate for candidate in candidates if candidate.reason is None]
    best = [candidate for candidate in usable if candidate.priority == usable[0].priority]
    if len(best) > 1:
        names = " and ".join(f"{candidate.name!r} of {candidate.wheel}" for candidate in best)
        raise AcceleratorError(
            f"accelerators {names} are usable with the same priority {best[0].priority}: "
            "choose one with accelerator=NAME, --accelerator NAME or DEEPINFER_ACCELERATOR"
        )
    return best[0]


def _named(kind: _Kind, candidates: list[Candidate], name: str) -> Candidate:
    found = [candidate for candidate in candidates if candidate.name == name]
    # A stranger's "cpu" is listed as broken and does not take the reference away.
    chosen = next((candidate for candidate in found if candidate.reason is None), found[0] if found else None)
    if chosen is None:
        raise AcceleratorError(_unknown(kind, candidates, name))
    if chosen.reason is not None:
        instead = ', or choose accelerator="cpu"' if kind is _ACCELERATOR else ""
        raise AcceleratorError(
            f"{kind.word} {name!r} of {chosen.wheel} cannot be used: {chosen.reason} "
            f"(`deepinfer doctor` looks closer{instead})"
        )
    return chosen


def _unknown(kind: _Kind, candidates: list[Candidate], name: str) -> str:
    installed = ", ".join(f"{candidate.name!r} of {candidate.wheel}" for candidate in candidates) or "none"
    text = f"no {kind.word} is named {name!r}; installed: {installed}"
    if kind is _ACCELERATOR and name in _extras():
        return f'{text}; {name!r} comes with an extra: `uv pip install ".[{name}]"` in a checkout of DeepInfer'
    close = difflib.get_close_matches(name, [AUTO, *(candidate.name for candidate in candidates)], n=1)
    return f"{text}; did you mean {close[0]!r}?" if close else f"{text}; install the wheel that publishes it"


def _extras() -> list[str]:
    """Return the extras of the meta wheel, so that core need not know any device by name."""
    try:
        return metadata("deepinfer").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []


def _load_target(kind: _Kind, candidate: Candidate) -> Any:
    try:
        return _resolve(candidate.target)
    except Exception as error:
        raise AcceleratorError(
            f"{kind.word} {candidate.name!r} of {candidate.wheel}: {candidate.target} does not load: {_told(error)}; "
            f"reinstall {candidate.wheel.partition(' ')[0]}"
        ) from error


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
