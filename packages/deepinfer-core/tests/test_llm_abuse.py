"""What a careless caller or a Ctrl-C may do to `LLM`: a clear error, nothing lost, everything goes on."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer import LLM, DeepInferError, RequestError, SamplingParams
from deepinfer.engine.block_pool import BlockPool
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import SequenceTable

SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", accelerator="cpu", dtype="float64", kv_cache_dtype="model", max_num_seqs=2, max_model_len=512)


def works(llm: LLM) -> bool:
    """Two requests run, all rows and blocks are free again."""
    done = llm.generate([[5, 6], [7]], SHORT)
    llm.engine.step()
    llm.engine.scheduler.check()
    free = llm.engine.scheduler.blocks.free == llm.engine.config.blocks
    return free and all(len(one.token_ids) == 4 for one in done)


def test_huge_top_k(llm: LLM) -> None:
    done = llm.generate([[5, 6], [5, 6]], [SamplingParams(top_k=2**63, max_tokens=2), SHORT])
    assert "top_k" in (done[0].error or "")
    assert done[1].finish_reason == "length"
    assert len(llm.generate([5, 6], SamplingParams(top_k=2**63 - 1, max_tokens=2))[0].token_ids) == 2
    assert works(llm)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_huge_numbers(llm: LLM, name: str) -> None:
    assert name in (llm.generate([5], SamplingParams(**{name: 10**400}))[0].error or "")


def test_one_bad_text_leaves_the_others(llm: LLM) -> None:
    bad, good = llm.generate(["\ud800", "fine"], SHORT)
    assert "Unicode" in (bad.error or "")
    assert good.finish_reason == "length"


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": "abc"}, {"prompt_token_ids": b"abc"}, [b"abc"], {"prompt": 3}, [None], [3.5]]
)
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    assert llm.generate([prompt, [5]], SHORT)[0].finish_reason == "error"


def test_numbers_of_numpy_are_ids(llm: LLM) -> None:
    assert llm.generate([np.int64(5), np.int64(6)], SHORT)[0].token_ids == llm.generate([5, 6], SHORT)[0].token_ids  # type: ignore[list-item]


@pytest.mark.parametrize("params", [5, 0, True, "x", SamplingParams, {"max_tokens": 3}])
def test_what_are_no_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate([5], params)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.chat([{"role": "user", "content": "x"}], None, params)


@pytest.mark.parametrize(
    "choice",
    [
        {"model": 5},
        {"model": None},
        {"model": b"tiny"},
        {"accelerator": 5},
        {"accelerator": None},
        {"max_num_seqs": None},
        {"max_num_batched_tokens": None},
        {"seed": None},
        {"memory_fraction": "x"},
        {"memory_fraction": []},
        {"memory_fraction": True},
    ],
    ids=str,
)
def test_what_are_no_arguments(choice: dict[str, Any]) -> None:
    with pytest.raises(DeepInferError):
        LLM(**choice)


def test_a_forgotten_chat_ends(llm: LLM) -> None:
    gc.disable()
    try:
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
        for _ in llm.chat([{"role": "user", "content": "x"}], None, params, stream=True, thinking=False):
            break
        assert works(llm)
    finally:
        gc.enable()


def test_answers_go_on_among_dicts(llm: LLM) -> None:
    history: list[Any] = [{"role": "user", "content": "x"}]
    history.append(llm.chat(history, None, SHORT, thinking=False))
    history.append({"role": "user", "content": "y"})
    assert llm.chat(history, None, SHORT, thinking=False).role == "assistant"
    assert llm.chat(iter(history), None, SHORT, thinking=False).role == "assistant"  # type: ignore[call-overload]


INTERRUPTED: list[tuple[type, str]] = [
    (Scheduler, "_receive"),
    (Scheduler, "_admit"),
    (Scheduler, "_release_windows"),
    (SequenceTable, "seat"),
    (SequenceTable, "append"),
    (SequenceTable, "add_blocks"),
    (SequenceTable, "add_windows"),
    (BlockPool, "take"),
    (BlockPool, "give"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "method"), INTERRUPTED, ids=lambda value: getattr(value, "__name__", value))
def test_an_interrupt_anywhere(
    llm: LLM, owner: type, method: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside the books: the other stream ends with the reason or goes on right; no row, no block is lost."""
    expected = llm.generate([5, 6], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0].token_ids
    stream = llm.generate([5, 6], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), stream=True)
    got = [next(stream) for _ in range(3)]
    original: Callable[..., Any] = getattr(owner, method)
    hits = iter([True])

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        now = next(hits, False)
        if now and not after:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if now:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[9] * 130, [8]], SHORT)
    got += stream
    ended = got[-1].completion
    assert ended is not None
    assert ended.token_ids == expected[: len(ended.token_ids)]
    assert ended.finish_reason == "length" or "interrupted" in (ended.error or "")
    assert works(llm)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.5, seed=3, logprobs=1)])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_that_are_no_numbers_end_their_request_alone(params: SamplingParams, errors_page: Any) -> None:
    """Also where the blocks that held them are used again."""
    llm = LLM(accelerator="cpu", dtype="float64", max_model_len=256, max_num_seqs=3)
    poisoned, clean = [5, 6, 7, 8] * 8, [9, 10, 11, 12] * 40
    (alone,) = llm.generate([clean], params)
    network: Any = llm.engine.runner._model
    network.embedding[8] = float("nan")
    for _ in range(2):
        lost, kept = llm.generate([poisoned, clean], params)
        assert kept.token_ids == alone.token_ids
        assert lost.finish_reason == "error"
        assert lost.token_ids == ()
        assert lost.error is not None
        errors_page.check("While a request runs", "a model whose numbers are broken", lost.error)
        (again,) = llm.generate([clean], params)
        assert again.token_ids == alone.token_ids
    llm.engine.scheduler.check()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "model"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_of_an_early_chunk_that_is_no_number_ends_its_request(kv_cache_dtype: Any) -> None:
    """Chunks and windows before the row that is drawn, through records and without: whoever attends to it is lost."""
    llm = LLM(
        accelerator="cpu", max_model_len=1024, max_num_seqs=3, max_num_batched_tokens=64, kv_cache_dtype=kv_cache_dtype
    )
    poisoned, clean = [5, 6, 8, 7, *(20 + place % 60 for place in range(600))], [9, 10, 11]
    (alone,) = llm.generate([clean], SHORT)
    network: Any = llm.engine.runner._model
    network.embedding[8] = float("nan")
    lost, kept = llm.generate([poisoned, clean], SHORT)
    assert (lost.finish_reason, lost.token_ids) == ("error", ())
    assert "not finite" in str(lost.error)
    assert kept.token_ids == alone.token_ids
    llm.engine.scheduler.check()


def test_a_timeout_ends_with_what_there_is(llm: LLM) -> None:
    late = llm.generate([[5, 6], [7]], SamplingParams(max_tokens=400, ignore_eos=True), timeout_s=0.0)
    assert [one.finish_reason for one in late] == ["abort", "abort"]
    assert all("timeout_s" in (one.error or "") for one in late)
    assert llm.generate([5, 6], SHORT, timeout_s=1e6, priority=3)[0].finish_reason == "length"
    assert "timeout_s must be a number" in (llm.generate([5], SHORT, timeout_s=-1)[0].error or "")
    assert "priority must be an integer" in (llm.generate([5], SHORT, priority=0.5)[0].error or "")  # type: ignore[call-overload]
    assert works(llm)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_a_broken_step_wrote_is_found_by_nobody() -> None:
    llm = LLM(accelerator="cpu", dtype="float64", max_model_len=512, max_num_seqs=2)
    prompt, params = [30 + i % 7 for i in range(300)], SamplingParams(temperature=0, max_tokens=4)
    network: Any = llm.engine.runner._model
    sound = network.embedding[30].clone()
    network.embedding[30] = float("nan")
    (lost,) = llm.generate([prompt], params)
    assert lost.finish_reason == "error"
    network.embedding[30] = sound
    (again,) = llm.generate([prompt], params)
    (alone,) = LLM(accelerator="cpu", dtype="float64", max_model_len=512).generate([prompt], params)
    assert again.num_cached_tokens == 0
    assert again.token_ids == alone.token_ids
