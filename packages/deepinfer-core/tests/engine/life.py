"""Any life of an engine, as a state machine: requests come, share, grow, end early, are preempted; steps break.

Every request that ends has what it has alone and cold, the books balance after every step, and in the end no block is
lost.  What the engine runs, and what a request becomes alone, is a `World`'s.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer.engine.block_pool import Hit, Node
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import CacheMode, Progress, Request, SamplingParams

from .checker import tokens_of

LONGEST = 384
"""Tokens of a sequence at most: three blocks, as the smallest pool."""
FAULT = "the device fell off"
Clock = Callable[[], float]


@dataclass(frozen=True)
class Choices:
    """How an engine is opened."""

    config: EngineConfig
    delayed: bool = False
    drafts: bool = False


class World(Protocol):
    """What the engines of a life run, and what a request becomes there when it is alone and cold."""

    letters: tuple[int, int]
    roomy: EngineConfig

    def open(self, choices: Choices, clock: Clock) -> Engine: ...

    def close(self) -> None: ...

    def params(self, flavour: int, max_tokens: int, seed: int) -> SamplingParams: ...

    def alone(self, request: Request, config: EngineConfig) -> list[Progress]: ...

    def told(self, request: Request, alone: list[Progress]) -> None:
        """Called before a request is added, with what it will become."""

    def compare(self, got: list[Progress], alone: list[Progress]) -> None: ...

    def light(self, calls: int, *, interrupt: bool) -> None:
        """Let the device raise so many calls from now."""

    def put_out(self) -> None: ...


SIZES = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(3, 5),
        "max_num_batched_tokens": st.sampled_from([17, 60, 200, 400]),
        "max_prefill_tokens_per_step": st.sampled_from([5, 40, 400]),
        "blocks": st.sampled_from([3, 4, 4, 6]),
        "window_blocks": st.sampled_from([3, 5, 9, 14]),
        "snapshots": st.integers(1, 4),
        "overlap": st.booleans(),
    }
)
TIERS = st.sampled_from(
    [
        {},
        {},
        {"prefix_cache_host_bytes": 1 << 26},
        {"prefix_cache_host_bytes": 1 << 20},
        {"prefix_cache_disk_bytes": 1 << 26, "prefix_cache_host_bytes": 0},
        {"prefix_cache_disk_bytes": 1 << 21, "prefix_cache_host_bytes": 1 << 20},
    ]
)
MODES: st.SearchStrategy[CacheMode | None] = st.sampled_from([None, None, None, None, None, "off", "replay"])
SHARED = st.sampled_from([0, 90, 126, 128, 129, 150, 200, 255, 256, 257, 300])


class Life(RuleBasedStateMachine):
    """One engine from its first request to its last; `seen` counts what happened in all lives of a test."""

    def __init__(self, world: World, seen: Counter[str]) -> None:
        super().__init__()
        self.world = world
        self.seen = seen
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.alone: dict[int, list[Progress]] = {}
        self.gained: dict[int, list[Progress]] = {}
        self.past: list[tuple[Request, list[Progress]]] = []
        self.count = 0
        self.happened: set[str] = set()
        self.lit = False
        self.starts: dict[int, int] = {}
        generator = np.random.default_rng(1)
        self.stems = [generator.integers(*world.letters, LONGEST).tolist() for _ in range(2)]

    @initialize(
        sizes=SIZES,
        tiers=TIERS,
        kind=st.sampled_from(["plain", "plain", "plain", "plain", "drafts", "drafts", "delayed"]),
        lengths=st.lists(st.integers(112, 127), min_size=3, max_size=4),
        breaks=st.none() | st.integers(0, 120),
    )
    def open(
        self, sizes: dict[str, int], tiers: dict[str, int], kind: str, lengths: list[int], breaks: int | None
    ) -> None:
        """An engine, texts that it knows, and requests that outgrow its blocks together where these are few."""
        self.world.put_out()
        self.breaks = breaks is not None
        self.folder = TemporaryDirectory(prefix="deepinfer-life-") if "prefix_cache_disk_bytes" in tiers else None
        place = {} if self.folder is None else {"prefix_cache_dir": Path(self.folder.name)}
        config = replace(self.world.roomy, max_model_len=LONGEST, **sizes, **tiers, **place)  # type: ignore[arg-type]
        self.choices = Choices(config, delayed=kind == "delayed", drafts=kind == "drafts")
        self.start()
        self.send(self.stems[0][:280], 4, 2)
        self.step_long()
        self.send([*self.stems[0][:270], *self.stems[1][:40]], 4, 2)
        self.step_long()
        self.crowd(lengths)
        if breaks is not None:
            self.light_the_fuse(breaks, interrupt=breaks % 3 == 0)
        self.step(25)

    def start(self) -> None:
        self.engine = self.world.open(self.choices, lambda: self.now)
        self.blocks, self.windows = self.engine.scheduler.blocks, self.engine.scheduler.windows
        self.starts.clear()
        table, resume = self.engine.table, self.engine.table.resume

        def noted(row: int, hit: Hit) -> None:
            self.starts.setdefault(table[row].id, hit.start)
            resume(row, hit)

        table.resume = noted  # type: ignore[method-assign]
        tiers = self.engine.scheduler.tiers
        if tiers is not None:
            unpack = tiers._pieces.unpack

            def counted(*given: object) -> None:
                self.happened.add("came back from a tier")
                unpack(*given)  # type: ignore[arg-type]

            tiers._pieces.unpack = counted  # type: ignore[method-assign]

    def send(self, prompt: list[int], flavour: int, max_tokens: int, **fields: object) -> None:
        """Add a request, unless it is too long."""
        if len(prompt) + max_tokens > LONGEST:
            return
        self.count += 1
        request = Request(prompt, self.world.params(flavour, max_tokens, self.count), **fields)  # type: ignore[arg-type]
        if self.choices.drafts and request.prefix_cache == "replay":
            request = replace(request, prefix_cache=None)  # its text is not known before
        alone = self.world.alone(request, self.choices.config)
        self.world.told(request, alone)
        number = self.engine.add(request)
        self.requests[number], self.alone[number], self.gained[number] = request, alone, []

    @rule(
        stem=st.integers(0, 1),
        shared=SHARED,
        own=st.sampled_from([0, 1, 3, 40]),
        flavour=st.integers(0, 63),
        max_tokens=st.sampled_from([1, 2, 6, 20]),
        salt=st.sampled_from([None, None, None, "a", "b"]),
        mode=MODES,
        priority=st.sampled_from([0, 0, 0, 1]),
        timeout=st.sampled_from([None, None, None, 5]),
    )
    def add(self, stem: int, shared: int, own: int, flavour: int, max_tokens: int, **fields: object) -> None:
        """A prompt with a first part that others have too."""
        tail = np.random.default_rng(own).integers(*self.world.letters, own).tolist()
        fields["cache_salt"], fields["prefix_cache"] = fields.pop("salt"), fields.pop("mode")
        fields["timeout_s"] = fields.pop("timeout")
        self.send([*self.stems[stem][:shared], *tail] or [self.world.letters[0]], flavour, max_tokens, **fields)

    @rule(lengths=st.lists(st.integers(112, 127), min_size=2, max_size=4))
    def crowd(self, lengths: list[int]) -> None:
        """Several that grow over a block border together: where blocks are few, some are preempted on the way."""
        for index, length in enumerate(lengths):
            self.send(self.stems[index % 2][index + 1 :][:length], 4, 30)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 1 << 16), own=st.integers(1, 9), same_salt=st.booleans())
    def go_on(self, choice: int, own: int, same_salt: bool) -> None:
        """The next turn of a conversation: an earlier prompt, what was generated so far, and more."""
        number = sorted(self.requests)[choice % len(self.requests)]
        earlier = self.requests[number]
        prompt = [*earlier.prompt_token_ids, *tokens_of(self.gained[number]), *range(self.world.letters[0] + 1, 40)]
        salt = earlier.cache_salt if same_salt else "c"
        self.send(prompt[: len(prompt) - own], choice % 64, 6, cache_salt=salt)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 1 << 16))
    def repeat(self, choice: int) -> None:
        """A prompt that was there before."""
        earlier = self.requests[sorted(self.requests)[choice % len(self.requests)]]
        self.send(list(earlier.prompt_token_ids), choice % 64, 6, cache_salt=earlier.cache_salt)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 1 << 16))
    def abort(self, choice: int) -> None:
        self.engine.abort(sorted(self.requests)[choice % len(self.requests)])

    @precondition(lambda self: self.breaks)
    @rule(calls=st.integers(0, 400), interrupt=st.sampled_from([False, False, True]))
    def light_the_fuse(self, calls: int, interrupt: bool) -> None:
        """Let the device raise in the middle of a step, or the user press Ctrl-C there."""
        self.lit = True
        self.world.light(calls, interrupt=interrupt and not self.choices.delayed)

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    @rule()
    def step_long(self) -> None:
        """Until there is nothing to do, or nearly so."""
        for _ in range(60):
            if self.engine.has_work:
                self.step_once()

    @precondition(lambda self: self.folder is not None)
    @rule()
    def restart(self) -> None:
        """The engine ends and another one has its folder."""
        self.finish()
        self.engine.close()
        self.start()

    @precondition(lambda self: self.folder is not None)
    @rule(choice=st.integers(0, 1 << 16), flip=st.integers(1, 255))
    def damage(self, choice: int, flip: int) -> None:
        """A byte of a file in the folder is another one."""
        tiers = self.engine.scheduler.tiers
        assert tiers is not None
        assert tiers._store.disk is not None
        tiers._store.disk.flush()
        files = sorted(Path(tiers._store.disk.folder).glob("*/*.piece"))
        if files:
            path = files[choice % len(files)]
            file = bytearray(path.read_bytes())
            file[choice % len(file)] ^= flip
            path.write_bytes(bytes(file))
            self.happened.add("damaged a file")

    def step_once(self) -> None:
        seated = [sequence for sequence in self.engine.table.sequences if sequence is not None]
        with suppress(KeyboardInterrupt):
            for progress in self.engine.step():
                self.gained[progress.request_id].append(progress)
        self.engine.scheduler.check()
        if any(not one.finished and one not in self.engine.table.sequences for one in seated):
            self.happened.add("preempted")

    @invariant()
    def nobody_gets_anything_after_the_end(self) -> None:
        for parts in self.gained.values():
            assert all(part.finish_reason is None for part in parts[:-1])

    def finish(self) -> None:
        """Run until nothing is left; every block is back, and every request has what it should."""
        self.world.put_out()
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.step_once()
        assert not self.engine.has_work
        assert self.blocks.free == self.choices.config.blocks
        assert self.windows.free == self.choices.config.window_blocks
        self.note_evictions()
        for number, request in self.requests.items():
            self.past.append((request, self.gained[number]))
            self.compare(request, self.alone[number], self.gained[number])
        for number, request in self.requests.items():
            self.check_use(number, request)
        for kept in (self.requests, self.alone, self.gained):
            kept.clear()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.finish()
            finally:
                self.engine.close()
                self.world.close()
                if self.folder is not None:
                    self.folder.cleanup()
            self.seen.update(["lives", *self.happened])

    def compare(self, request: Request, alone: list[Progress], got: list[Progress]) -> None:
        """Equal to a lone run; what was ended from outside is as far as it came."""
        reason = got[-1].finish_reason
        self.happened.add(f"ended by {reason}")
        early = reason in ("abort", "error")
        if reason == "error":
            assert self.lit
            assert FAULT in str(got[-1].error)
        if request.prefix_cache == "replay":  # approximate: only others must not notice
            return
        tokens, wanted = tokens_of(got), tokens_of(alone)
        assert tokens == (wanted[: len(tokens)] if early else wanted)
        assert early or reason == alone[-1].finish_reason
        self.world.compare(got, alone)

    def check_use(self, number: int, request: Request) -> None:
        """What a request was told fits: where it went on, and that nobody finds more than others of its salt left."""
        use, prompt = self.gained[number][-1].cache, request.prompt_token_ids
        if use is None:
            return
        assert use.hit - use.replayed == self.starts[number]
        assert use.computed == len(prompt) - self.starts[number]
        if self.starts[number]:
            self.happened.add("hit")
        known = [
            _common(prompt, [*other.prompt_token_ids, *tokens_of(parts)])
            for other, parts in self.past
            if other is not request and other.cache_salt == request.cache_salt and other.prefix_cache != "off"
        ]
        assert use.hit <= max(known, default=0), use

    def note_evictions(self) -> None:
        prefixes = self.engine.scheduler._prefixes
        assert prefixes is not None
        roots = prefixes.tree._roots.values()
        if any(node.exact is not None and not node.exact for root in roots for node in _below(root)):
            self.happened.add("evicted")


def _below(node: Node) -> Iterator[Node]:
    for child in node.children.values():
        yield child
        yield from _below(child)


def _common(first: object, second: list[int]) -> int:
    """How many first tokens two texts share."""
    ids, others = np.asarray(first), np.asarray(second)
    count = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:count] != others[:count])
    return int(differs[0]) if len(differs) else count
