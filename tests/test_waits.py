"""Watchdogs over replicas, shards and exchanges: every rank names the rank that did not come."""

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from tests.processes import SOON, receive_answer, several_groups, time_call
from tests.test_distributed import MSE, local_part

LIMIT = 2.0


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def step_with_trouble(rank: int, bad_rank: int, case: str, trouble_kind: str) -> list[Any]:
    """Return how a step ends on each process if one is absent, hangs in an op, or is killed there."""
    names = ("ep", "pp") if case == "exchange" else ("dp", "pp")
    mesh, is_bad = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), False

    def last_stage(p: Any, x: Tensor) -> Tensor:
        if is_bad and trouble_kind == "hangs":
            time.sleep(30)
        if is_bad and trouble_kind == "killed":
            os._exit(1)
        return layer(p, x) * (2 if x.sum().item() > 0 else 3)  # it looks at data, so its Python runs in each step

    params: Any = ({"w": torch.eye(8)}, {"w": torch.eye(8)})
    stages, transforms = [layer, last_stage], []
    if case == "exchange":
        stages = [layer, fpipe.exchange("all_to_all", axis="ep"), last_stage]
        params = (params[0], {}, params[1])
    if case in ("sums", "shards"):
        transforms = [fpipe.data_parallel(), *([fpipe.shard(gather="use")] if case == "shards" else [])]
    model = fpipe.from_functions(stages, MSE)
    placed = fpipe.place([0, 0, 1]) if case == "exchange" else fpipe.schedules.one_f_one_b(2)
    program = fpipe.chain(fpipe.split(2), placed, fpipe.merge(), *transforms)(fpipe.program(model))
    local_params, batch = (
        local_part(program, mesh.get_local_rank("pp"), params),
        (torch.ones(8, 8), torch.ones(8, 8) + rank // 2),
    )
    if case == "shards":
        local_params = fpipe.shard_params(local_params, mesh["dp"])
    example = tuple(local_stage or stage for local_stage, stage in zip(local_params, params, strict=True)), batch
    for limit in (None, LIMIT):
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, timeout=limit)
        step(local_params, batch)
    is_bad = rank == bad_rank
    if is_bad and trouble_kind == "absent":
        time.sleep(30)
    return [*time_call(lambda: step(local_params, batch))]


NAME_BY_CASE = {"exchange": "ep {}: rank {}", "sums": "replica {}: rank {}", "shards": "replica {}: rank {}"}


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
@pytest.mark.crossed
@pytest.mark.parametrize("case", NAME_BY_CASE)
@pytest.mark.parametrize("trouble_kind", ["absent", "hangs", "killed"])
def test_every_rank_names_the_rank_that_is_missing(case: str, trouble_kind: str):
    """Waits form a chain: rank 0 waits for rank 1, which waits for its replica."""
    bad_ranks = (3,) if trouble_kind != "absent" else (2, 3)
    with several_groups(len(bad_ranks), 4) as groups:
        for bad_rank, four in zip(bad_ranks, groups, strict=True):
            four.start(step_with_trouble, bad_rank, case, trouble_kind)
        for bad_rank, four in zip(bad_ranks, groups, strict=True):
            name = NAME_BY_CASE[case].format(bad_rank // 2, bad_rank % 2)
            for rank, pipe in enumerate(four.pipes):
                if rank != bad_rank:
                    answer, seconds = receive_answer(pipe)
                    assert answer.startswith(
                        f"RankError: {name} {'is gone' if trouble_kind == 'killed' else 'did not'}"
                    ), (
                        rank,
                        answer,
                    )
                    assert seconds < SOON + (0 if trouble_kind == "killed" else LIMIT)
            four.all[bad_rank].kill()
