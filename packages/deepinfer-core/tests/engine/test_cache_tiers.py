"""What leaves the device comes back from host memory as it was: a hit from there is a cold run, and nothing leaks."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine import cache_tiers
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.model.cache_pieces import CachePieces, Part
from deepinfer.model.kv_cache import KVCache

from .checker import drain, small_config, tokens_of
from .loaded import FLOAT64, Loaded, rows, text

RECORDS = Precision(torch.float32, round_inputs=False, cache="records")
PARTS: list[Part] = ["entries", "encoder windows", "decoder windows", "tails"]


@pytest.mark.parametrize("precision", [FLOAT64, RECORDS])
@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_a_piece_that_is_unpacked_is_what_was_packed(family: str, precision: Precision) -> None:
    ops = CpuAccelerator().ops(precision)
    config = small_config(family)
    caches = [KVCache(config, ops, precision, blocks=3, window_blocks=3, states=2, snapshots=3) for _ in range(2)]
    first, second = (CachePieces(cache, ops) for cache in caches)
    for part in PARTS:
        size = first.size(part)
        data = torch.from_numpy(np.random.default_rng(len(part)).integers(0, 100, size, dtype=np.uint8))
        if not size:
            continue
        first.unpack(part, 1, data)
        packed = first.pack(part, 1)
        assert torch.equal(packed, data)
        second.unpack(part, 2, packed)
        assert torch.equal(second.pack(part, 2), data)
        assert not second.pack(part, 1).any()


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_a_hit_from_host_memory_is_a_cold_run(family: str, loaded: Callable[[str], Loaded]) -> None:
    """A pool of five blocks for three texts of four: each one takes the place of the last."""
    sizes = {"blocks": 5, "window_blocks": 8, "snapshots": 2, "max_model_len": 600}
    tiny = loaded(family)
    engine = tiny.engine(tiny.config(prefix_cache_host_bytes=1 << 28, **sizes))
    cold = tiny.engine(tiny.config(prefix_cache="off", **sizes))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1)
    for turn in range(2):
        for seed in range(3):
            request = Request(text(seed, 420), params)
            number, plain = engine.add(request), cold.add(request)
            warm, wanted = drain(engine)[number], drain(cold)[plain]
            assert tokens_of(warm) == tokens_of(wanted)
            assert float((rows(warm) - rows(wanted)).abs().max()) < 1e-9
            told = warm[-1].cache
            assert told is not None
            assert told.hit == (384 if turn else 0)
            assert told.hit - told.replayed >= (256 if turn else 0)
    assert engine.scheduler.blocks.free == 5
    assert engine.scheduler.windows.free == 8


def test_requests_that_decode_go_on_while_another_is_loaded(
    loaded: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_tiers, "MOVES_A_STEP", 6)
    tiny = loaded("deepseek_v41")
    sizes = {"blocks": 40, "window_blocks": 32, "max_model_len": 4000}
    engine = tiny.engine(tiny.config(prefix_cache_host_bytes=1 << 28, **sizes))
    long = text(9, 3000)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    first = engine.add(Request(long, params))
    drain(engine)
    other = engine.add(Request(text(8, 3900), params))
    drain(engine)
    busy = engine.add(Request([5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    engine.step()
    again = engine.add(Request(long, params))
    told = [progress.request_id for progress in engine.step()]
    assert told == [busy], "a token while blocks are on their way"
    gained = drain(engine)
    assert gained[again][-1].cache is not None
    assert gained[again][-1].cache.hit == 2944
    assert first < other


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_a_tier_that_raises_ends_no_request(
    family: str, loaded: Callable[[str], Loaded], caplog: pytest.LogCaptureFixture
) -> None:
    """At any call of any kind: every request has the tokens of a cold run, no block is lost, one warning says why."""
    sizes = {"blocks": 5, "window_blocks": 8, "snapshots": 2, "max_model_len": 600}
    tiny = loaded(family)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    requests = [Request(text(seed, 420), params) for seed in (0, 1, 0)]
    wanted = tiny.run(tiny.config(prefix_cache="off", **sizes), requests)
    for fails, after in itertools.product(("pack", "put", "unpack", "get", "has"), (0, 3)):
        engine = tiny.engine(tiny.config(prefix_cache_host_bytes=1 << 28, **sizes))
        tiers, calls = engine.scheduler.tiers, itertools.count()
        assert tiers is not None
        owner: Any = tiers._pieces if fails in ("pack", "unpack") else tiers._store
        works = getattr(owner, fails)

        def raises(*arguments: Any, works: Any = works, calls: Any = calls, after: int = after) -> Any:
            if next(calls) >= after:
                raise RuntimeError("the device says no")
            return works(*arguments)

        setattr(owner, fails, raises)
        caplog.clear()
        for request, cold in zip(requests, wanted, strict=True):
            number = engine.add(request)
            gained = drain(engine)[number]
            assert tokens_of(gained) == tokens_of(cold)
            assert gained[-1].finish_reason == "length"
            engine.scheduler.check()
        assert (engine.scheduler.blocks.free, engine.scheduler.windows.free) == (5, 8)
        told = [record.getMessage() for record in caplog.records if "are off from here on" in record.getMessage()]
        assert len(told) == (next(calls) > after), (fails, after)
        assert all("RuntimeError: the device says no" in message for message in told)
        engine.close()
