"""`LLM`: a model by name, prompts in, completions out, whole or as they grow. The one place where all rooms are joined.

Running requests is the `Engine`'s; reading the environment is `environment.py`'s, for callers who want that.
"""

import importlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, overload

import torch

from deepinfer.accelerator.registry import open_accelerator
from deepinfer.engine.config import DraftChoice, DraftRule
from deepinfer.engine.draft_report import DraftReport, DraftStep
from deepinfer.engine.options import CacheChoice, DtypeChoice, EngineOptions
from deepinfer.engine.pins import Pin
from deepinfer.engine.request import CacheMode, Completion, Increment, Logprobs, Progress, Request, SamplingParams
from deepinfer.errors import RequestError
from deepinfer.installation import check_recipe
from deepinfer.model.weights import Progress as LoadingProgress
from deepinfer.opening import check_early, load_engine, open_model, resolve_options

if TYPE_CHECKING:
    from deepinfer.chat import ChatFormat, ChatStream
    from deepinfer.engine.metrics import Snapshot
    from deepinfer.engine.observer import Observer
    from deepseek_recipe import Message

Prompt = str | Sequence[int] | Mapping[str, object]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, these two with `Request`'s `cache_salt` and
`prefix_cache` where wanted."""

CACHE_KEYS = {"cache_salt", "prefix_cache"}


class LLM:
    """A loaded model that continues prompts. For one thread at a time.

    model             "demo" (embedded), "tiny" (random weights), a checkpoint folder, or a model of the Hub
    accelerator       name of an accelerator, or "auto": the best usable one
    dtype             of activations; "auto" = bfloat16 with inputs rounded to FP8 for quantised checkpoints, as they
                      were trained, else the dtype of the embedding
    kv_cache_dtype    "auto" = the model's quantised records, "model" = unquantised, in `dtype`
    progress          shows how loading advances
    The other arguments are those of `EngineOptions`.

    Raises ConfigError, AcceleratorError or CheckpointError, each saying what to do.
    """

    _format: "ChatFormat | None" = None
    _observer: "Observer | None" = None

    def __init__(  # noqa: PLR0913 - the public constructor: all but the model are keywords
        self,
        model: str | Path = "demo",
        *,
        accelerator: str = "auto",
        dtype: DtypeChoice = "auto",
        kv_cache_dtype: CacheChoice = "auto",
        decoder_replay: int | Literal["auto", "off"] = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_prefill_tokens_per_step: int | None = None,
        overlap: bool = True,
        graphs: bool = True,
        memory_fraction: float | None = None,
        draft: DraftChoice = "off",
        draft_rule: DraftRule = "match",
        seed: int = 0,
        deterministic: bool = False,
        prefix_cache: CacheMode = "exact",
        prefix_cache_host_bytes: int = 0,
        prefix_cache_disk_bytes: int = 1 << 34,
        prefix_cache_dir: str | Path | None = None,
        progress: LoadingProgress | None = None,
    ) -> None:
        options = EngineOptions(**_options(locals()))
        check_early(model, dtype, kv_cache_dtype, options)
        opened = open_accelerator(accelerator)
        checkpoint = open_model(model, options)
        self.model_config, self.tokenizer = checkpoint.config, checkpoint.tokenizer
        self.config = resolve_options(options, checkpoint, opened, dtype, kv_cache_dtype)
        self.engine = load_engine(self.config, checkpoint, opened, options, progress)
        self.drafts = self.engine.drafts
        self._mail: dict[int, list[Progress]] = {}
        weakref.finalize(self, self.engine.close)

    def close(self) -> None:
        """Finish what is being written to `prefix_cache_dir`; the end of the object or the process does the same."""
        self.engine.close()

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        stream: Literal[False] = False,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[Increment]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        stream: bool = False,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Completion] | Iterator[Increment]:
        """Continue one prompt or several, all in one batch.

        prompts          one prompt, or a sequence of them
        sampling_params  one for all, or one for each; None = `SamplingParams()`
        stream           return an iterator of `Increment`s as tokens come; closing it early ends its requests
        priority         class of the requests: a higher one gets a place first and loses it last
        timeout_s        seconds after which a request is aborted with what it has; None = never

        Returns completions in the order of the prompts.  A text that does not begin with the model's
        beginning-of-sequence token gets it; token ids are taken as they are.  A prompt that cannot be served becomes
        a completion with finish_reason "error", and the others go on.  Raises RequestError only when the call itself
        makes no sense.
        """
        inputs = _prompt_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(inputs)
        elif isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            raise RequestError(f"sampling_params must be SamplingParams, one or a list, got {sampling_params!r}")
        for one in params:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams, one or a list, got {one!r}")
        if len(params) != len(inputs):
            raise RequestError(
                f"expected one SamplingParams, or one for each of {len(inputs)} prompts, got {len(params)}"
            )
        increments = self._run(inputs, params, priority, timeout_s)
        if stream:
            return increments
        ended = {step.index: step.completion for step in increments if step.completion is not None}
        return [ended[index] for index in range(len(inputs))]

    @overload
    def chat(
        self,
        messages: Sequence["dict[str, Any] | Message"],
        tools: Sequence[dict[str, Any]] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        priority: int = 0,
        timeout_s: float | None = None,
        constrain: bool | None = None,
        **choices: Any,
    ) -> "Message": ...

    @overload
    def chat(
        self,
        messages: Sequence["dict[str, Any] | Message"],
        tools: Sequence[dict[str, Any]] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        priority: int = 0,
        timeout_s: float | None = None,
        constrain: bool | None = None,
        **choices: Any,
    ) -> "ChatStream": ...

    def chat(  # noqa: PLR0913 - what a request may say, all by keyword
        self,
        messages: Sequence["dict[str, Any] | Message"],
        tools: Sequence[dict[str, Any]] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
        constrain: bool | None = None,
        **choices: Any,
    ) -> "Message | ChatStream":
        """Answer a conversation, with the prompt and the parsing of the DeepSeek API; V4 or V4.1 by the checkpoint.

        messages, tools  as in Chat Completions, or `deepseek_recipe` objects; answers can be appended as they are, and
                         among objects alone their tool calls are repeated byte for byte
        sampling_params  None = `SamplingParams(max_tokens=None)`
        stream           return a `ChatStream` of increments as they come instead of the whole message
        priority, timeout_s  as in `generate`
        constrain        hold the output to tools and response_format: True = always, None = where they force something
                         (a tool_choice that is required or names a function; JSON without tools), False = never;
                         what cannot be held to is refused
        choices          thinking=True, reasoning_effort, tool_choice, response_format, as `deepseek_recipe.encode_chat`

        Raises RequestError for a conversation that the API would refuse or that does not fit, AcceleratorError when
        deepseek-recipe is missing or a stranger's, CheckpointError when the model has no tokenizer.json.
        """
        chat_format = self._chat_format()
        prompt = chat_format.encode(messages, tools, **choices)
        params = SamplingParams(max_tokens=None) if sampling_params is None else sampling_params
        params = chat_format.constrained(params, prompt, tools, constrain=constrain, **choices)
        ids = {"prompt_token_ids": prompt.token_ids}
        steps = self.generate(ids, params, stream=True, priority=priority, timeout_s=timeout_s)
        answer: ChatStream = self._chat_module().ChatStream(steps, chat_format.parser(prompt))
        return answer if stream else answer.read().message

    def pin(self, prompt: Prompt) -> Pin:
        """Keep what the prefix cache has of a prompt on the device until `unpin`, whatever else needs room.

        The prompt runs first, as a request of one token, so that all of it is there.  Later requests with the same
        first tokens and `cache_salt` go on from it.  Raises RequestError for a prompt that cannot run or has no whole
        block of 128 tokens, without a prefix cache, and where too little would be left for the longest sequence.
        """
        if self.engine.pins is None:
            raise RequestError('nothing can be pinned: this engine has prefix_cache="off"')
        done = self.generate([prompt], SamplingParams(max_tokens=1, temperature=0))[0]
        if done.finish_reason in ("error", "abort"):
            raise RequestError(f"the prompt cannot be pinned: {done.error}")
        request = Request(done.prompt_token_ids, SamplingParams(), (), 0, 0, None, *_cache_choice(prompt))
        return self.engine.pins.add(request, done.decoder_replay)

    def unpin(self, pin: Pin) -> None:
        """Let go of a pinned prompt: it stays cached while nothing else needs the room. RequestError for no pin."""
        if self.engine.pins is None or not isinstance(pin, Pin):
            raise RequestError(f"unpin takes what `pin` returned, got {pin!r}")
        self.engine.pins.remove(pin)

    def observe(self, trace: str | Path | None = None) -> "Observer":
        """Count from now on what `metrics` tells; with `trace`, write a timeline in Chrome's format to that file.

        Returns the observer, which ends with its `close` or as a context; an earlier one ends now.  Raises ConfigError
        when the file cannot be written.
        """
        if self._observer is not None:
            self._observer.close()
        observation = importlib.import_module("deepinfer.engine.observer")
        observer: Observer = observation.observe(self.engine, trace)
        self._observer = observer
        return observer

    def metrics(self) -> "Snapshot":
        """Counters, levels and times of the requests since `observe`, or since the first call of this."""
        return (self._observer or self.observe()).metrics.snapshot()

    def _chat_format(self) -> "ChatFormat":
        if self._format is None:
            self._format = self._chat_module().ChatFormat(self.tokenizer, self.model_config)
        return self._format

    def _chat_module(self) -> Any:
        """The module that needs deepseek-recipe, by name: everything else works without that wheel."""
        check_recipe()
        return importlib.import_module("deepinfer.chat")

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], priority: int, timeout_s: float | None
    ) -> Iterator[Increment]:
        """Add all requests, step until they have ended, yield what each gains; on the way out abort what is left."""
        open_calls: dict[int, _Call] = {}
        refused: list[Increment] = []
        try:
            for index, prompt in enumerate(prompts):
                call = _Call(index, self.config.replay_of(params[index]), self.drafts)
                try:
                    call.prompt = self._token_ids(prompt)
                    salt, mode = _cache_choice(prompt)
                    request = Request(call.prompt, params[index], (), index, priority, timeout_s, salt, mode)
                    open_calls[self._add(request)] = call
                except RequestError as error:
                    refused.append(call.refuse(str(error)))
            yield from refused
            while open_calls:
                for progress in self._next(open_calls):
                    increment = open_calls[progress.request_id].take(progress)
                    if increment.completion is not None:
                        del open_calls[progress.request_id], self._mail[progress.request_id]
                    yield increment
        finally:
            for request_id in open_calls:
                self.engine.abort(request_id)
                del self._mail[request_id]

    def _add(self, request: Request) -> int:
        request_id = self.engine.add(request)
        self._mail[request_id] = []
        return request_id

    def _next(self, wanted: Mapping[int, "_Call"]) -> list[Progress]:
        """Return progress of `wanted` requests, after a step if there is none; that of other streams waits for them."""
        if not any(self._mail[request_id] for request_id in wanted):
            for progress in self.engine.step():
                if progress.request_id in self._mail:
                    self._mail[progress.request_id].append(progress)
            if not self.engine.has_work and not any(self._mail[request_id] for request_id in wanted):
                self._give_up(wanted)
        found = [progress for request_id in wanted for progress in self._mail[request_id]]
        for request_id in wanted:
            self._mail[request_id] = []
        return found

    def _give_up(self, lost: Iterable[int]) -> None:
        """End requests that the engine knows nothing of any more: an interrupt took one between its queues."""
        told = "the engine was interrupted and lost this request: send it again"
        for request_id in lost:
            self._mail[request_id].append(Progress(request_id, finish_reason="abort", error=told))

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Turn a prompt of any form into token ids; raises RequestError for what is none."""
        if isinstance(prompt, Mapping):
            keys = set(prompt) - CACHE_KEYS
            if keys == {"prompt"} and isinstance(prompt["prompt"], str):
                prompt = prompt["prompt"]
            elif keys == {"prompt_token_ids"} and _is_list(prompt["prompt_token_ids"]):
                prompt = prompt["prompt_token_ids"]
            else:
                raise RequestError(
                    'a prompt object must be {"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt" and '
                    f'"prefix_cache" where wanted, got the keys {sorted(map(str, prompt))}'
                )
        if not isinstance(prompt, str):
            if not _is_list(prompt):
                raise RequestError(f"a prompt must be a text, token ids or an object, got {type(prompt).__name__}")
            return tuple(prompt)
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer.json: pass token ids instead of a text")
        if not prompt:
            raise RequestError("the prompt is empty: it must have at least one character")
        try:
            ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        except TypeError as error:
            raise RequestError(f"the prompt is no valid Unicode text: {error}; lone surrogates have no token") from None
        first = self.model_config.bos_token_id
        return tuple(ids) if ids[:1] == [first] else (first, *ids)


@dataclass
class _Call:
    """A request of a call to `generate`, and what it has gained so far."""

    index: int
    decoder_replay: int | None
    drafts: bool = False
    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    draft_steps: list[DraftStep | None] = field(default_factory=list)

    def take(self, progress: Progress) -> Increment:
        """Add what a step gave."""
        self.tokens += progress.token_ids
        self.texts.append(progress.text)
        if progress.token_ids and self.drafts:
            self.draft_steps.append(progress.draft_step)
        if progress.logprobs is not None:
            self.logprobs.append(progress.logprobs)
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs.append(progress.prompt_logprobs)
        completion = None
        if progress.finish_reason is not None:
            completion = Completion(
                prompt_token_ids=self.prompt,
                token_ids=tuple(self.tokens),
                text="".join(self.texts),
                finish_reason=progress.finish_reason,
                stop_reason=progress.stop_reason,
                error=progress.error,
                logprobs=_joined(self.logprobs),
                prompt_logprobs=_joined(self.prompt_logprobs),
                decoder_replay=self.decoder_replay,
                drafts=DraftReport.of(self.draft_steps) if self.drafts else None,
                cache=progress.cache,
            )
        gained = progress.text, progress.token_ids, progress.logprobs, progress.finish_reason
        return Increment(self.index, *gained, completion, progress.draft_step)

    def refuse(self, error: str) -> Increment:
        """End a request that could not be added."""
        completion = Completion(self.prompt, (), "", "error", error=error, decoder_replay=self.decoder_replay)
        return Increment(self.index, finish_reason="error", completion=completion)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options among the arguments of `LLM`, which have the same names."""
    return {option.name: given[option.name] for option in fields(EngineOptions)}


def _cache_choice(prompt: Prompt) -> tuple[Any, Any]:
    """What a prompt object says about the prefix cache; `Engine.add` checks it."""
    return (prompt.get("cache_salt"), prompt.get("prefix_cache")) if isinstance(prompt, Mapping) else (None, None)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value may be token ids; texts and bytes are sequences too."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _joined(pieces: list[Logprobs]) -> Logprobs | None:
    tensors = [piece for piece in pieces if isinstance(piece, torch.Tensor)]
    if tensors:
        return torch.cat(tensors)
    return [item for piece in pieces for item in piece] if pieces else None


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: a text, an object, or a sequence of nothing but integers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"prompts must be a text, token ids, an object, or a sequence, got {type(prompts).__name__}")
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)
