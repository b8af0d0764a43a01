"""Warnings of what is switched on and does nothing; each is logged once.

The numbers come from `observer.py`.
"""

import logging

_log = logging.getLogger(__name__)

REPEATS, DRAFTED, MASKS = 8, 512, 16
"""How many repeated prompts, how many verified drafts, and how many masks of one request make an alarm."""


class Alarms:
    """Watches for features without effect."""

    def __init__(self) -> None:
        self._raised: set[str] = set()

    def prefix_cache(self, *, repeats: int, hits: int) -> None:
        """Prompts that began with the first block of one that had ended, and tokens that were found for any."""
        if repeats >= REPEATS and not hits:
            self._raise(
                "prefix cache",
                f"the prefix cache is on, {repeats} prompts began as an earlier one, and nothing was found for any: "
                "it is too small for what runs beside; give it more memory (memory_fraction), or a host or disk tier",
            )

    def drafts(self, *, verified: int, accepted: int) -> None:
        """Draft tokens that the model judged, and those that were right."""
        if verified >= DRAFTED and accepted in (0, verified):
            told = (
                f"none of {verified} draft tokens was accepted: the drafter does not fit the model; run without drafts"
                if not accepted
                else f"all of {verified} draft tokens were accepted, which no drafter does on text that is worth "
                "generating: compare with a run without drafts"
            )
            self._raise("drafts", told)

    def constraint(self, *, masks: int, forbade: bool) -> None:
        """Masks that a constrained request had when it ended, and whether any of them forbade a text."""
        if masks >= MASKS and not forbade:
            self._raise(
                "constraint",
                f"a request was constrained, and none of its {masks} masks forbade anything: what it must match admits "
                "every text (a pattern such as [^]* or the like); leave it out or write what is meant",
            )

    def unconstrained(self) -> None:
        """A request asked for a constraint, and runs without."""
        self._raise(
            "unconstrained", "a request that must match a constraint runs without one: this is a bug, report it"
        )

    def _raise(self, what: str, text: str) -> None:
        if what not in self._raised:
            self._raised.add(what)
            _log.warning("%s", text)
