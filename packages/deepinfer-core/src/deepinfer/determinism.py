"""The proof behind `deepinfer verify-determinism`: ops and whole requests give the same bits however they are run.

Requests of a fixed seed run alone, among others, in another order, in chunks, and after being preempted; every way has
a hash of all tokens and of whole rows of log-probabilities.  The ops' cases are the conformance suite's; printing is
`cli.py`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.base import Accelerator
from deepinfer.accelerator.conformance import ALL_SHAPES, TINY, InvarianceCase, Proof, digest_of, invariance_cases
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import DtypeChoice
from deepinfer.engine.request import Logprobs, Progress, Request, SamplingParams
from deepinfer.llm import LLM

LENGTHS = (1, 2, 37, 125, 16, 126, 33, 5, 70, 127, 261)
"""Tokens of the prompts: within a tile, across tiles, some that grow into a second block while others hold it, and one
with whole blocks that the prefix cache keeps."""

GENERATED = 6
LONGEST = 384
OTHERS = 52
"""Requests that fill up a batch of 64; they have no hash of their own."""

MODEL = "model"
"""Begins the names of cases of whole requests; other names begin with an op."""

DTYPES: tuple[DtypeChoice, ...] = ("auto", "float32")


@dataclass(frozen=True)
class Way:
    """One way to run the same requests.

    rows, sequences  of a step at most
    order            in which they arrive, from their number
    each             one request at a time
    others           more requests beside them
    blocks           of entries; None = as many as the requests need
    overlap          prepare a step while the device runs the one before
    again            the requests run for the second time, and go on from what the prefix cache kept
    """

    name: str
    rows: int
    sequences: int
    order: Callable[[int], Sequence[int]] = range
    each: bool = False
    others: int = 0
    blocks: int | None = None
    overlap: bool = True
    again: bool = False

    def config(self, config: EngineConfig) -> EngineConfig:
        """The engine's sizes for this way."""
        sized = replace(config, max_num_batched_tokens=self.rows, max_num_seqs=self.sequences)
        sized = replace(sized, overlap=self.overlap)
        return sized if self.blocks is None else replace(sized, blocks=self.blocks, window_blocks=2 * self.blocks)


def _shuffled(count: int) -> Sequence[int]:
    order: list[int] = np.random.default_rng(1).permutation(count).tolist()
    return order


def _longest_first(count: int) -> Sequence[int]:
    return sorted(range(count), key=lambda place: -LENGTHS[place])


WAYS = (
    Way("each alone", 512, 8, each=True),
    Way("batch of 8", 512, 8),
    Way("batch of 64", 2048, 64, others=OTHERS),
    Way("another order", 512, 8, order=_shuffled),
    Way("chunks of 1 token", 1, 1),
    Way("chunks of 7 tokens", 7, 4),
    Way("chunks of 100 tokens", 100, 8),
    Way("one step at a time", 512, 8, overlap=False),
    Way("preempted", 300, 8, order=_longest_first, blocks=4),
    Way("from the cache", 512, 8, again=True),
)
"""The first is what the others are compared with."""


def describe(accelerator: Accelerator) -> str:
    """Return in one line what the hashes depend on beside the model."""
    return f"{accelerator.name}: {accelerator.description()}"


def ops_cases(accelerator: Accelerator) -> list[InvarianceCase]:
    """Return the cases of ops: small shapes on a CPU, those of the released models too on a device."""
    return invariance_cases([TINY] if accelerator.device.type == "cpu" else ALL_SHAPES)


def count_proofs(accelerator: Accelerator) -> int:
    """Return how many proofs `verify` gives."""
    return len(ops_cases(accelerator)) + len(DTYPES) * len(WAYS)


def verify(model: str | Path, accelerator: Accelerator) -> Iterator[Proof]:
    """Prove every op, then the model in checkpoint formats and in float32; yields each proof as it is done.

    Raises AcceleratorError where the accelerator has no deterministic ops, and what `LLM` raises.
    """
    for case in ops_cases(accelerator):
        yield case.judge(accelerator)
    for dtype in DTYPES:
        llm = LLM(
            model,
            accelerator=accelerator.name,
            dtype=dtype,
            max_model_len=LONGEST,
            max_num_seqs=64,
            deterministic=True,
        )
        wanted: list[str] = []
        for way in WAYS:
            found = run_way(llm, way)
            wanted = wanted or found
            wrong = sum(one != other for one, other in zip(wanted, found, strict=True))
            fault = f"{wrong} of {len(found)} requests differ from those run alone" if wrong else None
            yield Proof(f"{MODEL}-{dtype}-{way.name}", _joined(found), fault)


def render(proofs: Sequence[Proof]) -> str:
    """Return a table: a line for each op, whose hash covers its cases, and one for each way to run the model."""
    of_ops: dict[str, list[Proof]] = {}
    of_model = []
    for proof in proofs:
        op, _, way = proof.case.partition("-")
        if op == MODEL:
            dtype, _, way = way.partition("-")
            of_model.append(_line(f"model, dtype {dtype}", way, proof.digest, same=proof.fault is None))
        else:
            of_ops.setdefault(op, []).append(proof)
    tables = []
    for op, own in of_ops.items():
        digest, same = _joined(proof.digest for proof in own), all(proof.fault is None for proof in own)
        tables.append(_line(op, f"{len(own)} cases", digest, same=same))
    faults = [f"  {proof.case}: {proof.fault}" for proof in proofs if proof.fault is not None]
    return "\n".join([*tables, *of_model, *faults])


def _line(subject: str, what: str, digest: str, *, same: bool) -> str:
    return f"{'same' if same else 'DIFFERS':<8}{digest}  {subject:<22}{what}"


def run_way(llm: LLM, way: Way) -> list[str]:
    """Return a hash of each request: its tokens, and rows of log-probabilities of completion and prompt."""
    engine = llm.engine.sibling(way.config(llm.config))
    requests = _requests(llm, len(LENGTHS) + way.others)
    gained = _run(engine, requests, way)
    if way.again:
        gained = _run(engine, requests, way)
        uses = [progress[-1].cache for progress in gained.values()]
        assert any(use is not None and use.hit > use.replayed for use in uses), "the prefix cache kept nothing"
    return [_hash(gained[place]) for place in range(len(LENGTHS))]


def _run(engine: Engine, requests: Sequence[Request], way: Way) -> dict[int, list[Progress]]:
    """What each request gained, by its place."""
    places: dict[int, int] = {}
    gained: dict[int, list[Progress]] = {}
    for place in way.order(len(requests)):
        number = engine.add(requests[place])
        places[number], gained[number] = place, []
        if way.each:
            _drain(engine, gained)
    _drain(engine, gained)
    return {places[number]: progress for number, progress in gained.items()}


def _requests(llm: LLM, count: int) -> list[Request]:
    """Random prompts; a third greedy, a third sampled, a third with the rows of the prompt."""
    generator = np.random.default_rng(0)
    limit = llm.model_config.vocab_size
    requests = []
    for index in range(count):
        length = LENGTHS[index] if index < len(LENGTHS) else 3 + index
        params = SamplingParams(
            temperature=0.9 if index % 3 == 1 else 0.0,
            top_p=0.9 if index % 2 else 1.0,
            max_tokens=GENERATED,
            ignore_eos=True,
            logprobs=-1,
            prompt_logprobs=-1 if index % 3 == 2 else None,
        )
        ids = generator.integers(0, limit, length)
        ids[ids == llm.model_config.image_token_id] = llm.model_config.bos_token_id
        requests.append(Request(ids.tolist(), params, index=index))
    return requests


def _drain(engine: Engine, gained: dict[int, list[Progress]]) -> None:
    while engine.has_work:
        for progress in engine.step():
            gained[progress.request_id].append(progress)


def _hash(progress: Sequence[Progress]) -> str:
    """One hash of what a request gained; how it was divided over steps does not count."""
    tokens = torch.tensor([token for part in progress for token in part.token_ids])
    reasons = "".join(f"{part.finish_reason}{part.error}" for part in progress if part.finish_reason)
    ended = torch.frombuffer(bytearray(reasons.encode()), dtype=torch.uint8)
    rows = [_rows(part.logprobs) for part in progress] + [_rows(part.prompt_logprobs) for part in progress]
    return digest_of([tokens, ended, *(row for row in rows if row is not None)])


def _joined(digests: Iterable[str]) -> str:
    return digest_of([torch.frombuffer(bytearray("".join(digests).encode()), dtype=torch.uint8)])


def _rows(logprobs: Logprobs | None) -> Tensor | None:
    return logprobs if isinstance(logprobs, Tensor) else None
