"""Several ranks: the mixture of experts gives the same numbers on two processes as on one."""

import json
import socket
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.conformance.inputs import Draw
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.expert_routing import RouteSettings
from deepinfer.accelerator.parallel import Gloo, Parallel
from deepinfer.accelerator.parameters import Precision, StoredExpert
from deepinfer.errors import ConfigError

FLOAT64 = Precision(torch.float64, round_inputs=False, cache="model")
EXPERTS, HIDDEN, WIDTH, ROWS = 8, 64, 32, 13


def mixture(parallel: Parallel) -> Tensor:
    """Route, run the experts of this rank, join, combine."""
    ops = Ops(torch.device("cpu"), FLOAT64)
    draw = Draw(1)
    stored = [
        StoredExpert(
            draw.weight("fp4", WIDTH, HIDDEN, 32),
            draw.weight("fp4", HIDDEN, WIDTH, 32),
            draw.weight("fp4", WIDTH, HIDDEN, 32),
        )
        for _ in range(EXPERTS + 1)
    ]
    x = ops.tensor(draw.plain(ROWS, HIDDEN))
    gate = ops.tensor(draw.wide(EXPERTS, HIDDEN))
    held = parallel.experts(EXPERTS)
    picks, weights = ops.route(x, gate, None, None, RouteSettings(top_k=3, normalise=True, scale=1.5))
    packed = ops.pack_experts([stored[expert] for expert in held])
    routed = parallel.sum(ops.experts(x, parallel.local(picks, EXPERTS), weights, packed, 10.0))
    return ops.combine(routed, ops.shared_expert(x, ops.pack_experts(stored[EXPERTS:]), 10.0))


def run_rank(rank: int, size: int, port: int) -> None:
    """What one process does: print the largest number and its mixture as JSON."""
    torch.set_num_threads(1)
    parallel = Parallel(rank, size, Gloo(rank, size, ("localhost", port)))
    largest, output = parallel.max(100 + rank), mixture(parallel)
    parallel.max(0)  # nobody leaves before all have spoken
    sys.stdout.write(json.dumps([largest, output.tolist()]) + "\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_ranks_give_what_one_gives() -> None:
    port = str(free_port())
    commands = [[sys.executable, __file__, str(rank), "2", port] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    alone = mixture(Parallel())
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        largest, numbers = json.loads(output.splitlines()[-1])
        assert largest == 101
        torch.testing.assert_close(torch.tensor(numbers, dtype=torch.float64), alone, rtol=1e-12, atol=1e-12)


def test_one_rank_joins_nothing() -> None:
    alone = Parallel()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.max(7) == 7
    assert alone.sum(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert alone.local(torch.tensor([0, 5]), 8).tolist() == [0, 5]


class Silent:
    """Collectives that are never called."""

    def sum(self, tensor: Tensor) -> Tensor:
        raise AssertionError

    def max(self, tensor: Tensor) -> Tensor:
        raise AssertionError


def test_experts_are_split_evenly_and_every_pick_is_local_to_one_rank() -> None:
    ranks = [Parallel(rank, 4, Silent()) for rank in range(4)]
    assert [expert for rank in ranks for expert in rank.experts(8)] == list(range(8))
    picks = torch.tensor([[0, 3], [7, 4]])
    local = torch.stack([rank.local(picks, 8) for rank in ranks])
    assert ((local >= 0).sum(0) == 1).all()
    assert ranks[3].local(picks, 8).tolist() == [[-1, -1], [1, -1]]
    with pytest.raises(ConfigError, match="6 experts cannot be split evenly over 4 ranks"):
        ranks[0].experts(6)


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="got rank 2 of 2"):
        Parallel(2, 2, Silent())
    with pytest.raises(ConfigError, match="2 ranks need collectives to join their results, got none"):
        Parallel(0, 2)


if __name__ == "__main__":
    run_rank(*map(int, sys.argv[1:]))
