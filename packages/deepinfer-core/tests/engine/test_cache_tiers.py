"""What leaves the device comes back from host memory as it was: a hit from there is a cold run, and nothing leaks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.cpu import CpuAccelerator
from deepinfer.accelerator.parameters import Precision
from deepinfer.engine import cache_tiers
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import Progress, Request, SamplingParams
from deepinfer.model.cache_pieces import CachePieces, Part
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.deepseek import DeepSeek
from deepinfer.model.kv_cache import KVCache
from deepinfer.model.tiny import write_tiny
from deepinfer.model.weights import Weights

from .checker import drain, engine_config, small_config, tokens_of

PRECISION = Precision(torch.float64, round_inputs=False, cache="model")
RECORDS = Precision(torch.float32, round_inputs=False, cache="records")
PARTS: list[Part] = ["entries", "encoder windows", "decoder windows", "tails"]


@pytest.mark.parametrize("precision", [PRECISION, RECORDS])
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


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    models: dict[str, tuple[Checkpoint, DeepSeek]] = {}

    def engine(family: str, **changes: object) -> Engine:
        accelerator = CpuAccelerator()
        ops = accelerator.ops(PRECISION)
        if family not in models:
            folder: Path = tmp_path_factory.mktemp("tiny") / family
            write_tiny(folder, family=family)  # type: ignore[arg-type]
            checkpoint = Checkpoint(folder)
            models[family] = checkpoint, DeepSeek(checkpoint.config, Weights(checkpoint, ops, accelerator), ops)
        checkpoint, model = models[family]
        replay = checkpoint.config.window + 12 if checkpoint.config.first_decoder_layer is not None else None
        config = engine_config(precision=PRECISION, decoder_replay=replay, **changes)
        return Engine(config, checkpoint.config, model, ops, accelerator, None)

    return engine


def rows(gained: list[Progress]) -> Tensor:
    return torch.cat([part.logprobs for part in gained if isinstance(part.logprobs, Tensor)])


@pytest.mark.parametrize("family", ["deepseek_v41", "deepseek_v4"])
def test_a_hit_from_host_memory_is_a_cold_run(family: str, make: Callable[..., Engine]) -> None:
    """A pool of five blocks for three texts of four: each one takes the place of the last."""
    sizes = {"blocks": 5, "window_blocks": 8, "snapshots": 2, "max_model_len": 600}
    engine = make(family, prefix_cache_host_bytes=1 << 28, **sizes)
    cold = make(family, prefix_cache="off", **sizes)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1)
    texts = [np.random.default_rng(seed).integers(30, 255, 420).tolist() for seed in range(3)]
    for turn in range(2):
        for text in texts:
            request = Request(text, params)
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
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_tiers, "MOVES_A_STEP", 6)
    engine = make("deepseek_v41", prefix_cache_host_bytes=1 << 28, blocks=40, window_blocks=32, max_model_len=4000)
    text = np.random.default_rng(9).integers(30, 255, 3000).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    first = engine.add(Request(text, params))
    drain(engine)
    other = engine.add(Request(np.random.default_rng(8).integers(30, 255, 3900).tolist(), params))
    drain(engine)
    busy = engine.add(Request([5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
    engine.step()
    again = engine.add(Request(text, params))
    told = [progress.request_id for progress in engine.step()]
    assert told == [busy], "a token while blocks are on their way"
    gained = drain(engine)
    assert gained[again][-1].cache is not None
    assert gained[again][-1].cache.hit == 2944
    assert first < other
