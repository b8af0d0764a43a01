"""Who has come and has no place: the inbox of other threads, the queue and its order, grammars, and whose time is up.

When the next one gets a place is the `Scheduler`'s.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from deepinfer.engine.request import Progress
from deepinfer.engine.sequence import Sequence, ending_of

GRAMMAR_WAIT_S = 0.02
"""How long a step waits for a grammar when nothing else is to be done; what comes from other threads waits as long."""

LATE = "the request took longer than its timeout_s and ends with what it has"
"""What a request is told whose time is up."""


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


class Arrivals:
    """Requests from the moment they come until they have a place: an inbox, those without grammar, then `queue`."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self._inbox: deque[Sequence | int] = deque()
        self._unready: dict[int, Sequence] = {}
        self._deadlines = Deadlines()

    def __bool__(self) -> bool:
        return bool(self._inbox or self._unready or self.queue)

    def submit(self, message: Sequence | int) -> None:
        """Take in a sequence, or end the one of this id, at the next `receive`; from any thread."""
        self._inbox.append(message)

    def receive(self, now: float, *, idle: bool) -> tuple[list[Progress], list[tuple[int, str | None]]]:
        """Queue who came; return who ended here, and the ids (and why) of those to end that are not here any more.

        Waits a little for a grammar where there is nothing else to do: the engine is `idle`, and nobody is queued.
        """
        told: list[Progress] = []
        gone: list[tuple[int, str | None]] = []
        leaving: list[tuple[int, str | None]] = []
        while self._inbox:
            message = self._inbox.popleft()
            if not isinstance(message, Sequence):
                leaving.append((message, None))
                continue
            self._unready[message.id] = message
            if message.deadline is not None:
                self._deadlines.add(message.deadline, message.id)
        leaving += [(late, LATE) for late in self._deadlines.passed(now)]
        for sequence_id, error in leaving:
            waiting = self._unready.pop(sequence_id, None) or self.queue.remove(sequence_id)
            if waiting is None:
                gone.append((sequence_id, error))
            else:
                told.append(ending_of(waiting, "abort", error))
        if self._unready:
            self._take_ready(told, wait=idle and not (leaving or self.queue))
        return told, gone

    def clear(self) -> list[Sequence]:
        """Forget all that had been received, and return them."""
        left = [*self.queue, *self._unready.values()]
        self.queue.clear()
        self._unready.clear()
        self._deadlines = Deadlines()
        return left

    def _take_ready(self, told: list[Progress], *, wait: bool) -> None:
        """Queue those whose grammar has come, and end those whose grammar has failed."""
        first = next(iter(self._unready.values())).matching
        if wait and first is not None:
            first.wait(GRAMMAR_WAIT_S)
        for sequence in [one for one in self._unready.values() if one.matching is None or one.matching.ready]:
            del self._unready[sequence.id]
            error = None if sequence.matching is None else sequence.matching.error
            if error is None:
                self.queue.push(sequence)
            else:
                told.append(ending_of(sequence, "error", error))
