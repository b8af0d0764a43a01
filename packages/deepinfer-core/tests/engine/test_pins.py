"""A pinned prompt stays cached, whatever pressure there is, and takes nothing that the longest sequence needs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import LLM, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.engine.pins import Pin
from deepinfer.engine.request import CacheUse, Request
from deepinfer.errors import RequestError

from .checker import EXAMPLES, checked_engine, drain, engine_config, greedy, lone_run, small_config, tokens_of

V41 = replace(small_config(), image_token_id=None)
V4 = replace(small_config("deepseek_v4"), image_token_id=None)
MODELS = {"v41": V41, "v41, window of two": replace(V41, window=200), "v4": V4}
TEXTS = np.random.default_rng(3).integers(3, V41.vocab_size, (12, 700))


def run(engine: Engine, request: Request) -> tuple[tuple[int, ...], CacheUse]:
    number = engine.add(request)
    gained = drain(engine)[number]
    assert gained[-1].error is None
    assert gained[-1].cache is not None
    return tokens_of(gained), gained[-1].cache


def pin(engine: Engine, request: Request) -> Pin:
    assert engine.pins is not None
    run(engine, request)
    made = engine.pins.add(request, engine.config.replay_of(request.params))
    engine.scheduler.check()
    return made


def asked(prompt: list[int], **changes: object) -> Request:
    return Request(prompt, greedy(max_tokens=1, ignore_eos=True), **changes)  # type: ignore[arg-type]


def press(engine: Engine, count: int = 4) -> None:
    """Other prompts, one after the other, that need far more blocks than there are."""
    for text in TEXTS[1 : 1 + count]:
        run(engine, asked(text[:590].tolist()))
        engine.scheduler.check()


@pytest.mark.parametrize("replay", [None, "window"])
@pytest.mark.parametrize("name", MODELS)
@given(length=st.integers(128, 560), more=st.integers(0, 40))
@settings(max_examples=EXAMPLES // 12)
def test_what_is_pinned_is_found_after_any_pressure(name: str, replay: str | None, length: int, more: int) -> None:
    model = MODELS[name]
    keep = model.window + 12 if replay and model.first_decoder_layer else None
    config = engine_config(decoder_replay=keep, blocks=11, window_blocks=24, max_model_len=600, snapshots=6)
    engine = checked_engine(config, model)
    prompt = TEXTS[0][:length].tolist()
    pinned = pin(engine, asked(prompt))
    assert pinned.tokens == length // 128 * 128
    free = engine.scheduler.blocks.free, engine.scheduler.windows.free
    press(engine)
    assert (engine.scheduler.blocks.free, engine.scheduler.windows.free) == free
    longer = asked([*prompt, *TEXTS[2][:more].tolist()])
    tokens, use = run(engine, longer)
    assert tokens == lone_run(model, config, longer).token_ids
    whole = (length + more - 1) // 128 * 128
    assert use.hit == min(pinned.tokens, whole)
    if more >= (keep or 1):
        assert use.computed == length + more - pinned.tokens  # it goes on behind all that is pinned
    else:
        assert use.computed <= 2 * 128 + (keep or 0) + more  # behind one of the last borders
    assert engine.pins is not None
    engine.pins.remove(pinned)
    engine.scheduler.check()
    assert engine.scheduler.blocks.free == config.blocks
    press(engine)
    assert run(engine, longer)[1].hit == 0


def test_pins_leave_room_for_the_longest_sequence() -> None:
    config = engine_config(blocks=9, window_blocks=24, max_model_len=640)
    engine = checked_engine(config, V41)
    assert engine.pins is not None
    first = pin(engine, asked(TEXTS[0][:300].tolist()))
    again = pin(engine, asked(TEXTS[0][:350].tolist()))  # the same blocks twice need no more room
    pin(engine, asked(TEXTS[1][:260].tolist()))
    with pytest.raises(RequestError, match=r"5 blocks of 128 tokens.* at most 4 and"):
        pin(engine, asked(TEXTS[2][:130].tolist()))
    engine.scheduler.check()
    longest = asked(TEXTS[3][:639].tolist())
    assert run(engine, longest)[0] == lone_run(V41, config, longest).token_ids
    engine.pins.remove(first)
    with pytest.raises(RequestError, match="is not pinned: it was unpinned before"):
        engine.pins.remove(first)
    with pytest.raises(RequestError, match="5 blocks"):  # the second pin still holds them
        pin(engine, asked(TEXTS[2][:130].tolist()))
    engine.pins.remove(again)
    pin(engine, asked(TEXTS[2][:130].tolist()))
    engine.scheduler.check()


def test_a_pin_is_of_one_salt() -> None:
    engine = checked_engine(engine_config(blocks=11, window_blocks=24, max_model_len=600), V41)
    prompt = TEXTS[0][:300].tolist()
    pin(engine, asked(prompt, cache_salt="a"))
    press(engine)
    assert run(engine, asked(prompt, cache_salt="a"))[1].hit == 256
    assert run(engine, asked(prompt))[1].hit == 0


def test_pins_that_hold_all_snapshots_are_told_apart() -> None:
    """V4 keeps copies of its compressors' memory, of which there are few."""
    engine = checked_engine(engine_config(blocks=20, window_blocks=32, max_model_len=600, snapshots=1), V4)
    assert engine.pins is not None
    first = pin(engine, asked(TEXTS[0][:300].tolist()))
    with pytest.raises(RequestError, match="no snapshot of this prompt could be kept"):
        pin(engine, asked(TEXTS[1][:300].tolist()))
    engine.scheduler.check()
    engine.pins.remove(first)
    pin(engine, asked(TEXTS[1][:300].tolist()))
    engine.scheduler.check()


def test_an_interrupt_that_empties_the_cache_ends_its_pins() -> None:
    engine = checked_engine(engine_config(blocks=11, window_blocks=24, max_model_len=600), V41)
    made = pin(engine, asked(TEXTS[0][:300].tolist()))
    engine.scheduler.reset()
    engine.scheduler.check()
    assert engine.pins is not None
    with pytest.raises(RequestError, match="an interrupt emptied the cache"):
        engine.pins.remove(made)
    assert engine.scheduler.blocks.free == 11


def test_a_fault_of_a_pin_says_what_to_do(errors_page: Any) -> None:
    llm = LLM("tiny", accelerator="cpu", max_num_seqs=2, max_model_len=512)
    off = LLM("tiny", accelerator="cpu", max_num_seqs=2, prefix_cache="off")

    def check(fault: str, call: Callable[[], object]) -> None:
        with pytest.raises(RequestError) as caught:
            call()
        errors_page.check("Pinned prompts", fault, str(caught.value))

    made = llm.pin([5] * 200)
    assert made.tokens == 128
    assert llm.generate({"prompt_token_ids": [5] * 300}, SamplingParams(max_tokens=2))[0].num_cached_tokens >= 128
    llm.unpin(made)
    check("a short prompt", lambda: llm.pin([5, 6, 7]))
    check(
        "a prompt that does not use the cache", lambda: llm.pin({"prompt_token_ids": [5] * 200, "prefix_cache": "off"})
    )
    check("a prompt that cannot run", lambda: llm.pin([5] * 512))
    check("an engine without a cache", lambda: off.pin([5] * 200))
    check("unpinning twice", lambda: llm.unpin(made))
    check("unpinning a prompt", lambda: llm.unpin("prompt"))  # type: ignore[arg-type]
