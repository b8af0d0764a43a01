"""Warnings of what is switched on and does nothing; each is logged once.

The numbers come from `observer.py`.
"""

import logging

_log = logging.getLogger(__name__)

DRAFTED = 512
"""How many verified drafts make an alarm."""


class Alarms:
    """Watches for features without effect."""

    def __init__(self) -> None:
        self._raised: set[str] = set()

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

    def _raise(self, what: str, text: str) -> None:
        if what not in self._raised:
            self._raised.add(what)
            _log.warning("%s", text)
