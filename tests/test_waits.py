"""Who waits for whom, over sums of replicas, shards and exchanges: the rank that did not come is named by all."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from tests.processes import SOON, beside_each_other, result, timed
from tests.test_distributed import MSE, own

LIMIT = 2.0


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def waiting(rank: int, who: int, way: str, how: str) -> list[Any]:
    """What a step of each process ends in where one does not come to it, hangs in an op of it, or is killed there."""
    names = ("ep", "pp") if way == "exchange" else ("dp", "pp")
    mesh, trouble = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), False

    def last(p: Any, x: Tensor) -> Tensor:
        if trouble and how == "hangs":
            time.sleep(30)
        if trouble and how == "killed":
            os._exit(1)
        return layer(p, x) * (2 if x.sum().item() > 0 else 3)  # it looks at data, so its Python runs in each step

    params: Any = ({"w": torch.eye(8)}, {"w": torch.eye(8)})
    stages, more = [layer, last], []
    if way == "exchange":
        stages = [layer, fpipe.exchange("all_to_all", axis="ep"), last]
        params = (params[0], {}, params[1])
    if way in ("sums", "shards"):
        more = [fpipe.data_parallel(), *([fpipe.shard(gather="use")] if way == "shards" else [])]
    model = fpipe.from_functions(stages, MSE)
    placed = fpipe.place([0, 0, 1]) if way == "exchange" else fpipe.schedules.one_f_one_b(2)
    program = fpipe.chain(fpipe.split(2), placed, fpipe.merge(), *more)(fpipe.program(model))
    mine, batch = own(program, mesh.get_local_rank("pp"), params), (torch.ones(8, 8), torch.ones(8, 8) + rank // 2)
    if way == "shards":
        mine = fpipe.shard_params(mine, mesh["dp"])
    example = tuple(own_stage or other for own_stage, other in zip(mine, params, strict=True)), batch
    for limit in (None, LIMIT):
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, timeout=limit)
        step(mine, batch)
    trouble = rank == who
    if trouble and how == "absent":
        time.sleep(30)
    return [*timed(lambda: step(mine, batch))]


NAMES = {"exchange": "ep {}: rank {}", "sums": "replica {}: rank {}", "shards": "replica {}: rank {}"}


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
@pytest.mark.parametrize("way", NAMES)
@pytest.mark.parametrize("how", ["absent", "hangs", "killed"])
def test_the_process_that_others_wait_for_is_named_and_not_its_neighbour(way: str, how: str):
    """Over a chain of waits: of rank 0 for its rank 1, of that for its replica, and so on."""
    whos = (3,) if how != "absent" else (2, 3)
    with beside_each_other(len(whos), 4) as groups:
        for who, four in zip(whos, groups, strict=True):
            four.start(waiting, who, way, how)
        for who, four in zip(whos, groups, strict=True):
            name = NAMES[way].format(who // 2, who % 2)
            for rank, pipe in enumerate(four.pipes):
                if rank != who:
                    said, took = result(pipe)
                    assert said.startswith(f"RankError: {name} {'is gone' if how == 'killed' else 'did not'}"), (
                        rank,
                        said,
                    )
                    assert took < SOON + (0 if how == "killed" else LIMIT)
            four.all[who].kill()
