"""DSpark speculative decoding for any engine; this module owns the entry by which an engine finds it.

Importing it loads neither torch nor an engine; the algorithm is loaded by the name in `entry.target`.
"""

from dataclasses import dataclass

__all__ = ["DrafterEntry", "entry"]


@dataclass(frozen=True)
class DrafterEntry:
    """What the entry point group `deepinfer.drafters` hands to an engine: plain values, no loaded class."""

    contract_version: int
    priority: int
    target: str

    def probe(self) -> str | None:
        """Return why this drafter cannot run here, in one line, or None when it can."""
        return None


entry = DrafterEntry(contract_version=1, priority=0, target="deepspark.serving:ServingDrafter")
