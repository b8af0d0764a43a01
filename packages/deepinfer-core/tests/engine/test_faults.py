"""What breaks around a running engine costs hits and nothing else: with the prefix cache, its folder and overlap on."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request, SamplingParams

from .checker import drain, tokens_of
from .full_disk import full_disk
from .loaded import Loaded, text

FAMILIES = ["deepseek_v41", "deepseek_v4"]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SIZES = {"blocks": 5, "window_blocks": 8, "snapshots": 2, "max_model_len": 600}
"""Room for one text of 420 tokens and little more: each takes the place of the last."""


def open_engine(tiny: Loaded, folder: Path) -> Engine:
    kept = {"prefix_cache_dir": folder, "prefix_cache_disk_bytes": 1 << 28}
    return tiny.engine(tiny.config(overlap=True, **SIZES, **kept))


def serve(engine: Engine, tiny: Loaded, seeds: list[int]) -> list[int]:
    """Serve texts together, check them against cold runs, and return how many tokens of each were found."""
    requests = [Request(text(seed, 420), PARAMS) for seed in seeds]
    ids = [engine.add(request) for request in requests]
    gained: dict[int, list[Progress]] = drain(engine)
    cold = [tiny.run(tiny.config(prefix_cache="off", **SIZES), [request])[0] for request in requests]
    assert [tokens_of(gained[number]) for number in ids] == [tokens_of(parts) for parts in cold]
    assert engine.scheduler.blocks.free == SIZES["blocks"]
    assert engine.scheduler.windows.free == SIZES["window_blocks"]
    uses = [gained[number][-1].cache for number in ids]
    return [0 if use is None else use.hit - use.replayed for use in uses]


def flush(engine: Engine) -> None:
    assert engine.scheduler.tiers is not None
    assert engine.scheduler.tiers._store.disk is not None
    engine.scheduler.tiers._store.disk.flush()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_disk(
    family: str, loaded: Callable[[str], Loaded], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = loaded(family)
    engine = open_engine(tiny, tmp_path)
    serve(engine, tiny, [0])
    flush(engine)
    with full_disk(), caplog.at_level(logging.WARNING):
        serve(engine, tiny, [1, 2])
        flush(engine)
        assert serve(engine, tiny, [0])[0] >= 256, "what was kept before is found"
    assert [record.message for record in caplog.records if "cannot keep cached pieces on disk" in record.message]
    assert len(caplog.records) == 1
    serve(engine, tiny, [3])
    flush(engine)
    serve(engine, tiny, [1])
    assert serve(engine, tiny, [3])[0] >= 256, "there is room again, for what is new"
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_blocks(
    family: str, loaded: Callable[[str], Loaded], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of a text are damaged, each in a way of its own: they are never served, and what they held is kept anew."""
    tiny = loaded(family)
    engine = open_engine(tiny, tmp_path)
    serve(engine, tiny, [0])
    flush(engine)
    files = sorted(tmp_path.glob("*/*.piece"))
    with caplog.at_level(logging.WARNING):
        for part in range(3):
            serve(engine, tiny, [1])
            for number, path in enumerate(files[part::3]):
                damaged = bytearray(path.read_bytes())
                damaged[(number * 997) % len(damaged)] ^= 1 << number % 8
                path.write_bytes(bytes(damaged))
            serve(engine, tiny, [0])
            flush(engine)
    assert "cannot be used and is removed" in caplog.text
    serve(engine, tiny, [1])
    assert serve(engine, tiny, [0])[0] >= 256
    engine.close()
