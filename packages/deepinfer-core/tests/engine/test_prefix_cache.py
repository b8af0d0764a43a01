"""A prefix hit = a cold run, over the checking model: any sharing, any pressure, any mode that promises it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine import prefix_cache
from deepinfer.engine.block_pool import PrefixTree
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.request import CacheUse, Progress, Request, SamplingParams
from deepinfer.errors import RequestError
from deepinfer.model.config import ModelConfig

from .checker import EXAMPLES, checked_engine, drain, engine_config, greedy, lone_run, small_config, tokens_of

V41 = replace(small_config(), image_token_id=None)
WIDE = replace(V41, window=128)
WIDER = replace(V41, window=200)
V4 = replace(small_config("deepseek_v4"), image_token_id=None)
MODELS = {"v41": V41, "v41, window of a block": WIDE, "v41, window of two": WIDER, "v4": V4}

TEXTS = np.random.default_rng(3).integers(3, V41.vocab_size, (3, 700))


@pytest.fixture
def _close_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts short enough for a test still have snapshots far before their end."""
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_SPACING", 256)


def use(gained: list[Progress]) -> CacheUse:
    found = gained[-1].cache
    assert found is not None
    return found


def run(engine: Engine, prompt: list[int], **changes: object) -> tuple[tuple[int, ...], CacheUse]:
    """Tokens of one request that runs alone, and what the cache did for it."""
    fields = {name: changes.pop(name) for name in ("cache_salt", "prefix_cache") if name in changes}
    params = greedy(**{"max_tokens": 3, "ignore_eos": True, **changes})
    number = engine.add(Request(prompt, params, **fields))  # type: ignore[arg-type]
    gained = drain(engine)[number]
    assert gained[-1].error is None
    return tokens_of(gained), use(gained)


@st.composite
def shared_requests(draw: st.DrawFn) -> Request:
    """Prompts that share a first part of any length with others, and a salt with some."""
    text = draw(st.integers(0, 2))
    shared = draw(st.one_of(st.integers(0, 420), st.sampled_from([127, 128, 129, 256, 384])))
    tail = np.random.default_rng(draw(st.integers(0, 5))).integers(3, V41.vocab_size, draw(st.integers(0, 60)))
    prompt = [*TEXTS[text][:shared].tolist(), *tail.tolist()] or [5]
    rows = draw(st.sampled_from([None, None, None, None, -1]))
    params = greedy(max_tokens=draw(st.integers(1, 25)), prompt_logprobs=rows, ignore_eos=True)
    salt, mode = draw(st.sampled_from([None, None, "a", "b"])), draw(st.sampled_from([None, None, None, "off"]))
    return Request(prompt, params, cache_salt=salt, prefix_cache=mode)


@st.composite
def configs(draw: st.DrawFn, model: ModelConfig) -> EngineConfig:
    """From roomy to starved; the longest sequence always fits alone."""
    seqs = draw(st.integers(1, 5))
    blocks = draw(st.integers(5, 24))
    replay = draw(st.sampled_from([None, model.window, model.window + 12])) if model.first_decoder_layer else None
    return engine_config(
        decoder_replay=replay,
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.integers(max(seqs, 2), 500)),
        blocks=blocks,
        window_blocks=draw(st.integers(6, 24)),
        max_model_len=min(600, blocks * 128),
        snapshots=draw(st.integers(1, 6)),
    )


@pytest.mark.usefixtures("_close_snapshots")
@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=EXAMPLES // 4)
def test_any_sharing_gives_what_a_lone_cold_run_gives(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    config = data.draw(configs(model))
    arrivals = data.draw(st.lists(st.tuples(st.integers(0, 30), shared_requests()), min_size=2, max_size=8))
    engine = checked_engine(config, model)
    requests: dict[int, Request] = {}
    gained: dict[int, list[Progress]] = {}
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    for step in range(5000):
        while left and left[0][0] <= step:
            request = left.pop(0)[1]
            if len(request.prompt_token_ids) + 25 <= config.max_model_len:
                requests[engine.add(request)] = request
        for progress in engine.step():
            gained.setdefault(progress.request_id, []).append(progress)
        engine.scheduler.check()
        if not left and not engine.has_work:
            break
    for number, request in requests.items():
        assert tokens_of(gained[number]) == lone_run(model, config, request).token_ids
        told = use(gained[number])
        assert told.hit - told.replayed + told.computed == len(request.prompt_token_ids)
    assert engine.scheduler.blocks.free == config.blocks
    assert engine.scheduler.windows.free == config.window_blocks


@pytest.mark.parametrize("name", MODELS)
def test_a_second_turn_runs_only_what_is_new(name: str) -> None:
    model = MODELS[name]
    config = engine_config(decoder_replay=model.window + 12 if model.first_decoder_layer else None)
    engine = checked_engine(config, model)
    prompt = TEXTS[0][:300].tolist()
    answer, first = run(engine, prompt, max_tokens=60)
    assert first == CacheUse("exact", 0, 0, 300, 0, "never seen")
    turn = [*prompt, *answer, *TEXTS[1][:40].tolist()]
    tokens, second = run(engine, turn)
    assert tokens == lone_run(model, config, Request(turn, greedy(max_tokens=3, ignore_eos=True))).token_ids
    assert second.hit == 256
    assert second.why == "never seen"
    replay = config.replay_of(SamplingParams())
    assert second.hit - second.replayed == 256 if replay is None else (len(turn) - replay) // 128 * 128
    _, again = run(engine, turn)
    assert (again.hit, again.replayed, again.miss_at, again.why) == (384, 0, None, "")


@pytest.mark.parametrize(
    ("second", "salt", "told"),
    [
        (TEXTS[0][:300], None, CacheUse("exact", 256, 0, 44, None, "")),
        ([*TEXTS[0][:200], *TEXTS[1][:80]], None, CacheUse("exact", 128, 0, 152, 200, "token 200 differs")),
        ([*TEXTS[0][:130], 3, *TEXTS[1][:149]], None, CacheUse("exact", 128, 0, 152, None, "token 130 differs")),
        ([*TEXTS[0][:290], *TEXTS[1][:140]], None, CacheUse("exact", 256, 0, 174, 256, "never seen")),
        (TEXTS[0][:300], "tenant", CacheUse("exact", 0, 0, 300, 0, "other salt")),
        (TEXTS[0][:100], None, CacheUse("exact", 0, 0, 100, 0, "shorter than a block of 128 tokens")),
    ],
)
def test_the_request_is_told_what_was_found_and_why_no_more(second: object, salt: str | None, told: CacheUse) -> None:
    engine = checked_engine(engine_config(), V4)
    run(engine, TEXTS[0][:300].tolist())
    prompt = np.asarray(second).tolist()
    differs = next((i for i, token in enumerate(prompt) if i >= 300 or token != TEXTS[0][i]), len(prompt))
    if "differs" in told.why:
        told = replace(told, miss_at=differs, why=f"token {differs} differs")
    assert run(engine, prompt, cache_salt=salt)[1] == told


def test_evicted_blocks_are_told_as_such() -> None:
    engine = checked_engine(engine_config(blocks=4, max_model_len=512), V41)
    run(engine, TEXTS[0][:300].tolist())
    run(engine, TEXTS[1][:500].tolist())
    assert run(engine, TEXTS[0][:300].tolist())[1] == CacheUse("exact", 0, 0, 300, 0, "evicted")


def test_running_requests_share_blocks() -> None:
    config = engine_config(max_num_batched_tokens=128)
    engine = checked_engine(config, V41)
    first = engine.add(Request(TEXTS[0][:300].tolist(), greedy(max_tokens=40, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    second = engine.add(Request([*TEXTS[0][:280].tolist(), 7], greedy(max_tokens=5, ignore_eos=True)))
    engine.step()
    assert config.blocks - engine.scheduler.blocks.free == 4
    gained = drain(engine)
    assert use(gained[second]).hit == 256
    assert gained[first][-1].finish_reason == "length"


def test_cached_blocks_go_before_anybody_is_preempted() -> None:
    config = engine_config(blocks=8, max_model_len=512, max_num_seqs=2)
    engine = checked_engine(config, V41)
    for text in TEXTS:
        run(engine, text[:260].tolist())
    assert engine.scheduler.blocks.idle > 2
    longs = [engine.add(Request(TEXTS[i][300:660].tolist(), greedy(max_tokens=120, ignore_eos=True))) for i in range(2)]
    running = 0
    while engine.has_work:
        ended = any(progress.finish_reason for progress in engine.step())
        engine.scheduler.check()
        seated = sum(sequence is not None for sequence in engine.scheduler._table.sequences)
        assert seated >= running or ended, "a sequence was preempted though cached blocks were left"
        running = seated
    assert len(longs) == 2


def test_a_preempted_sequence_resumes_by_a_hit() -> None:
    """Two sequences that do not fit together: whoever is preempted runs its last blocks again, not all."""
    config = engine_config(decoder_replay=V41.window, blocks=7, max_model_len=640, max_num_seqs=2)
    engine = checked_engine(config, V41)
    requests = [Request(TEXTS[i][:250].tolist(), greedy(max_tokens=300, ignore_eos=True)) for i in range(2)]
    ids = [engine.add(request) for request in requests]
    gained: dict[int, list[Progress]] = {number: [] for number in ids}
    starts: list[int] = []
    seat = engine.scheduler._table.resume

    def note(row: int, hit: prefix_cache.Hit) -> None:
        starts.append(hit.start)
        seat(row, hit)

    engine.scheduler._table.resume = note  # type: ignore[method-assign]
    while engine.has_work:
        for progress in engine.step():
            gained[progress.request_id].append(progress)
        engine.scheduler.check()
    assert starts[:2] == [0, 0]
    assert len(starts) > 2
    assert min(starts[2:]) >= 128
    for number, request in zip(ids, requests, strict=True):
        assert tokens_of(gained[number]) == lone_run(V41, config, request).token_ids


def test_a_prompt_that_leaves_a_known_text_early_leaves_a_snapshot_there() -> None:
    """The first one goes back to an earlier snapshot; from then on the place where it left is one."""
    config = engine_config(decoder_replay=V41.window, max_model_len=900, max_num_batched_tokens=1024)
    engine = checked_engine(config, V41)
    run(engine, TEXTS[0].tolist())
    uses = [run(engine, [*TEXTS[0][:400].tolist(), *TEXTS[1][at : at + 300].tolist()])[1] for at in (0, 100)]
    assert [(told.hit, told.replayed) for told in uses] == [(384, 384), (384, 0)]


def test_snapshots_of_generated_text_do_not_pile_up() -> None:
    config = engine_config(decoder_replay=V41.window, max_model_len=2000, blocks=32)
    engine = checked_engine(config, V41)
    run(engine, TEXTS[0][:200].tolist(), max_tokens=900)
    assert engine.scheduler.windows.idle <= 5


def test_a_request_may_leave_the_cache_out() -> None:
    engine = checked_engine(engine_config(), V41)
    prompt = TEXTS[0][:300].tolist()
    assert run(engine, prompt, prefix_cache="off")[1] == CacheUse("off", 0, 0, 300, None, "prefix_cache is off")
    assert engine.scheduler.blocks.idle == 0
    run(engine, prompt)
    assert run(engine, prompt, prefix_cache="off")[1].hit == 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prefix_cache": "on"}, 'prefix_cache must be "exact", "replay" or "off", got \'on\''),
        ({"cache_salt": 5}, "cache_salt must be a text, got 5"),
    ],
)
def test_uses_that_make_no_sense_are_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        checked_engine(engine_config(), V41).add(Request([3], greedy(), **fields))  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_an_engine_without_a_cache_says_so() -> None:
    engine = checked_engine(engine_config(prefix_cache="off"), V41)
    with pytest.raises(RequestError, match="needs an engine with a prefix cache"):
        engine.add(Request([3], greedy(), prefix_cache="exact"))
    assert EngineOptions().prefix_cache == "exact"


def test_the_tree_forgets_the_oldest_texts() -> None:
    config = engine_config(blocks=8, max_model_len=300)
    engine = checked_engine(config, V41)
    prefixes = engine.scheduler._prefixes
    assert prefixes is not None
    prefixes.tree._most = 60
    generator = np.random.default_rng(1)
    for number in range(60):
        run(engine, generator.integers(3, 40, 270).tolist(), max_tokens=1, cache_salt=str(number % 3))
        assert len(prefixes.tree) <= 61


def test_prompts_of_many_lengths_leave_nothing_behind_their_first_part() -> None:
    engine = checked_engine(engine_config(blocks=6, window_blocks=9, max_num_seqs=2, decoder_replay=100), V41)
    for length in range(140, 230):
        run(engine, TEXTS[0][:length].tolist())
    prefixes = engine.scheduler._prefixes
    assert prefixes is not None
    (node,) = prefixes.tree.root(None).children.values()
    assert len(node.windows) <= prefixes.windows.size + 1


def test_salts_whose_texts_are_forgotten_take_no_memory() -> None:
    tree = PrefixTree(b"seed", 10)
    key = tree.root("0").key
    for salt in range(100):
        tree.root(str(salt))
    assert len(tree._roots) <= 21
    assert tree.root("0").key == key
