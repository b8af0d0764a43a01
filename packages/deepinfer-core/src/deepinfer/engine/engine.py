"""The loop: `Engine.add`, `Engine.abort` and `Engine.step`.

Each line of `step` is a room of its own; text in and text out of a whole call are `llm.py`'s.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from tokenizers import Tokenizer

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.sampling import derive_seed
from deepinfer.engine.batch_builder import Ahead, BatchBuilder
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.constraint import Grammars, Matching
from deepinfer.engine.detokenizer import Detokenizer, TextStream
from deepinfer.engine.graph_runner import record_graphs
from deepinfer.engine.memory import reserve
from deepinfer.engine.model_runner import Model, ModelRunner, Transfer
from deepinfer.engine.plan import Plan
from deepinfer.engine.request import Progress, Request, SamplingParams
from deepinfer.engine.sampler import Flight, Sampler
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.sequence import Integers, Sequence
from deepinfer.engine.speculation import Drafting, Parts, Speculation
from deepinfer.engine.token_rules import make_rules
from deepinfer.errors import RequestError
from deepinfer.model.config import ModelConfig

_log = logging.getLogger(__name__)
_NO_MEMORY = "a step found no memory on the device, steps have at most %d rows now; lower max_num_batched_tokens"


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that could not be launched; its requests end when its turn comes."""

    plan: Plan
    error: Exception


class Engine:
    """Runs requests over one model. One thread calls `step`; `add` and `abort` may come from any.

    Reserves all cache memory when it is made.  `tokenizer` None = no texts and no stop strings.  `clock` returns the
    seconds that timeouts are measured in.  With `drafting` a step may give a sequence several tokens; such an engine
    overlaps only while drafting rests, a step's drafts need the tokens before them.
    """

    _grammars: Grammars | None = None
    _ahead: Flight | _Failed | None = None

    def __init__(  # noqa: PLR0913 - the constructor of the room, called in one place
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Model,
        ops: Ops,
        accelerator: Accelerator,
        tokenizer: Tokenizer | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        drafting: Drafting | None = None,
    ) -> None:
        self.config, self.model_config = config, model_config
        self._parts = (model, ops, accelerator, tokenizer)
        drafts = 0 if drafting is None else drafting.stages.draft.block_size
        memory = reserve(config, model_config, ops, drafts)
        self.table, self.pins = memory.table, memory.pins
        cache, table = memory.cache, memory.table
        self.scheduler = Scheduler(config, model_config.window, table, memory.prefixes)
        self.scheduler.tiers = memory.tiers
        transfer = Transfer(accelerator)
        self.builder = BatchBuilder(model_config, table, transfer)
        self.sampler: Sampler | Speculation = Sampler(ops, table, transfer)
        model = record_graphs(model, model_config, config, cache, accelerator, drafts)
        if drafting is not None:
            parts = Parts(model, model_config, config, table, cache, transfer, self.sampler)
            model, self.sampler = drafting.join(parts)
        self.runner = ModelRunner(model, cache)
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._ids = count()
        self._clock = clock
        self.drafts = drafting is not None
        self._overlap = config.overlap
        self._settled = True

    def sibling(self, config: EngineConfig) -> "Engine":
        """Return a fresh engine over the same model, without drafts, with cache memory of its own and other sizes.

        It keeps nothing on disk: a folder has one owner.
        """
        return Engine(replace(config, prefix_cache_dir=None), self.model_config, *self._parts)

    @property
    def settled(self) -> bool:
        """Whether the books are whole; False after an interrupt in the middle of scheduling or committing."""
        return self._settled

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting, running or owed a last message."""
        return not self._settled or self._ahead is not None or self.scheduler.has_work

    def add(self, request: Request) -> int:
        """Queue a request and return its id; raises RequestError when it can never be served."""
        prompt = self._checked_prompt(request)
        params = request.params
        params.check(self.model_config.vocab_size)
        request.check()
        if params.stop_strings and self._detokenizer is None:
            raise RequestError("stop strings need a tokenizer.json, the model has none: use stop_token_ids")
        room = self.config.max_model_len - len(prompt)
        if room < (params.max_tokens or 1):
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {params.max_tokens or 'at least 1'} generated do not fit into "
                f"max_model_len={self.config.max_model_len} (the cache holds {self.config.blocks} blocks of 128 "
                "tokens): shorten the prompt or lower max_tokens"
            )
        if request.prefix_cache not in (None, "off") and self.config.prefix_cache == "off":
            asked = request.prefix_cache
            raise RequestError(f'prefix_cache="{asked}" needs an engine with a prefix cache, this one has it off')
        replay = self.config.replay_of(params)
        vocab_size, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
        stop_ids = frozenset(params.stop_token_ids or ()).union(() if params.ignore_eos else eos)
        sequence = Sequence(
            id=next(self._ids),
            request=request,
            seed=derive_seed(self.config.seed, request.index) if params.seed is None else params.seed,
            tokens=prompt,
            decoder_start=0 if replay is None else max(0, len(prompt) - replay),
            limit=room if params.max_tokens is None else params.max_tokens,
            stop_ids=stop_ids,
            text=None if self._detokenizer is None else TextStream(self._detokenizer, params.stop_strings),
            prompt_rows=None if params.prompt_logprobs is None else 0,
            deadline=None if request.timeout_s is None else self._clock() + request.timeout_s,
            matching=None if params.structured is None else self._begin_matching(params),
            rules=make_rules(params, prompt.tolist(), stop_ids, vocab_size, self._tokenizer)
            if params.has_rules
            else None,
        )
        self.scheduler.submit(sequence)
        return sequence.id

    def _begin_matching(self, params: SamplingParams) -> Matching:
        """Start to compile what the output must match; raises RequestError when it cannot be enforced."""
        if self._tokenizer is None:
            raise RequestError("structured output needs a tokenizer.json, the model has none")
        if params.ignore_eos:
            raise RequestError("structured output ends with end-of-sequence: leave ignore_eos out")
        if self._grammars is None:
            config = self.model_config
            rows = self.config.max_num_seqs
            self._grammars = Grammars(self._tokenizer, config.vocab_size, config.eos_token_ids, rows)
        return self._grammars.begin(params.structured)

    def close(self) -> None:
        """Finish what is being written to `prefix_cache_dir` and leave the folder to others."""
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.close()
            self.scheduler.tiers = None

    def abort(self, request_id: int) -> None:
        """End a request at the start of the next step, which reports it; one that has ended is left alone."""
        self.scheduler.abort(request_id)

    def step(self) -> list[Progress]:
        """Run one step for every sequence that fits; return what each gained: tokens, log-probs, why it ended.

        An exception of the model ends the requests of this step; an interrupt of it leaves them to be recomputed.
        After an interrupt of the rest the books cannot be trusted: the next step ends all requests, with clean ones.
        With `overlap` the next step is launched before this one is waited for, and reported by the next call.
        """
        if not self._settled:
            self._ahead = None
            progress = self.scheduler.reset()
            self._settled = True
            return progress
        self._settled = False
        progress = self._overlapped() if self._overlap else self._plain()
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.end_step(busy=self.scheduler.has_work)
        self._settled = True
        return progress

    def _plain(self) -> list[Progress]:
        """One step after the other."""
        plan = self.scheduler.schedule(self._clock())
        return self._land(self._launch(plan))

    def _overlapped(self) -> list[Progress]:
        """The device has the next step before this one is waited for."""
        flight = self._ahead or self._launch(self.scheduler.schedule(self._clock()))
        self._ahead = None
        if isinstance(flight, Flight) and self.sampler.may_run_ahead:
            plan = self.scheduler.schedule_ahead(self._clock())
            if plan is not None:
                self._ahead = self._launch(plan, Ahead(flight.plan, flight.batch, flight.token_ids))
        return self._land(flight)

    def _launch(self, plan: Plan, ahead: Ahead | None = None) -> Flight | _Failed:
        """Give the device a step, behind the one that is `ahead`."""
        try:
            batch = self.builder.build(plan, ahead)
            output = self.runner.run(batch)
            flight = self.sampler.draw(output, batch, plan)
        except Exception as error:  # noqa: BLE001 - whatever a device raises ends this step's requests, never the engine
            return _Failed(plan, error)
        except BaseException:
            self._retract()
            raise
        self.scheduler.advance(plan)
        return flight

    def _land(self, flight: Flight | _Failed) -> list[Progress]:
        """Wait for a step and hand out what it brought."""
        try:
            if isinstance(flight, _Failed):
                raise flight.error
            tokens = self.sampler.read(flight, ahead=self._ahead is not None)
        except torch.OutOfMemoryError as error:
            if not (rows := self.scheduler.narrow()):
                return self.scheduler.fail(flight.plan, error)
            self._ahead = None
            _log.warning(_NO_MEMORY, rows)
            return []
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("a step of %d sequences failed", len(flight.plan.rows))
            return self.scheduler.fail(flight.plan, error)
        except BaseException:
            self._retract()
            raise
        return self.scheduler.commit(flight.plan, tokens)

    def _retract(self) -> None:
        """Forget the steps in flight; their sequences are recomputed."""
        self._ahead = None
        self.scheduler.retract()
        self._settled = True

    def _checked_prompt(self, request: Request) -> Integers:
        """Return the prompt as an array; raises RequestError for one that the model cannot read."""
        if request.images:
            raise RequestError(f"images are not supported yet, got {len(request.images)}: send text only")
        if len(request.prompt_token_ids) == 0:
            raise RequestError("the prompt is empty: it must have at least one token")
        try:
            prompt = np.asarray(request.prompt_token_ids)
        except ValueError as error:
            raise RequestError(f"prompt_token_ids must be a flat list of integers: {error}") from error
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise RequestError(
                f"prompt_token_ids must be a flat list of integers, got {prompt.dtype} of shape {prompt.shape}"
            )
        size, image = self.model_config.vocab_size, self.model_config.image_token_id
        outside = np.flatnonzero((prompt < 0) | (prompt >= size))
        if len(outside):
            place = int(outside[0])
            raise RequestError(f"token ids must be 0 to {size - 1}, got {prompt[place]} at position {place}")
        images = [] if image is None else np.flatnonzero(prompt == image).tolist()
        if images:
            raise RequestError(
                f"token {image} at position {images[0]} stands for an image, and images are not supported yet: "
                "send text only"
            )
        return prompt.astype(np.int64)
