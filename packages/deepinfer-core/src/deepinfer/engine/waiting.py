"""Who waits: classes of priority, first come first served inside each, and whose time is up; owns that order.

When the next one gets a place is the `Scheduler`'s.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from deepinfer.engine.sequence import Sequence


class WaitingQueue:
    """Sequences without a place: the highest class first, inside a class the one that came first."""

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[int, Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._classes)

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._classes, reverse=True):
            yield from self._classes[priority].values()

    @property
    def first(self) -> Sequence:
        """Whose turn it is; there must be one."""
        return next(iter(self._classes[max(self._classes)].values()))

    def push(self, sequence: Sequence) -> None:
        """Queue behind all of its class."""
        self._classes.setdefault(sequence.priority, OrderedDict())[sequence.id] = sequence

    def push_first(self, sequence: Sequence) -> None:
        """Queue before all of its class: it had a place and lost it."""
        self.push(sequence)
        self._classes[sequence.priority].move_to_end(sequence.id, last=False)

    def remove(self, sequence_id: int) -> Sequence | None:
        """Take out a sequence, wherever it stands; None when it does not wait."""
        for priority, members in self._classes.items():
            sequence = members.pop(sequence_id, None)
            if sequence is not None:
                if not members:
                    del self._classes[priority]
                return sequence
        return None

    def clear(self) -> None:
        """Forget all."""
        self._classes.clear()


class Deadlines:
    """When sequences run out of time; one that ended before drops out when its time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, deadline: float, sequence_id: int) -> None:
        """Note the time, in the seconds of the engine's clock, at which a sequence must have ended."""
        heapq.heappush(self._heap, (deadline, sequence_id))

    def passed(self, now: float) -> list[int]:
        """Return, once, the ids of those whose time is up."""
        late: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            late.append(heapq.heappop(self._heap)[1])
        return late
