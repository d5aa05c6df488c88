"""Replicas along two axes: those within a group share parameters out, and add up before the groups do (HSDP)."""

from __future__ import annotations

import os
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from tests.processes import SOON, Processes, beside_each_other, processes, result, timed
from tests.test_distributed import MSE, own, rows
from tests.test_shard import odd_net

WAYS: dict[str, dict[str, Any]] = {
    "once a step": {},
    "each use": {"gather": "use"},
    "each microbatch": {"scatter": "microbatch"},
}


def hybrid(model: Any, way: str, ranks: int, shard_first: bool = False) -> fpipe.Program:
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(ranks), fpipe.merge(outputs=False))
    both = [fpipe.data_parallel("replicate"), fpipe.shard("shard", **WAYS[way])]
    return fpipe.chain(merged, *(both[::-1] if shard_first else both))(fpipe.program(model))


def test_a_gradient_is_scattered_within_and_added_up_across():
    program = hybrid(2, "once a step", 2)
    (cut,) = [op for op in program.ops if op.kind == "SCATTER" and op.stage == 1]
    (made,) = [op for op in program.ops if op.kind == "REDUCE" and op.reads == cut.writes]
    assert str(cut) == "cut[1] = SCATTER[1] sum[1,1] {axis='shard'} @ 1"
    assert str(made) == "all[1] = REDUCE[1] cut[1] {axis='replicate'} @ 1"
    assert str(program.outputs[-1]) == "grads[1] = all[1] @ 1"
    timeline = fpipe.simulate(program, fpipe.Costs(scatter=2.0, reduce=[3.0, 0.0]))
    assert timeline.delivered == timeline.makespan + 2 + 3  # of stage 0, one behind the other


def test_how_many_there_are_along_each_axis_is_said():
    model, params, _ = fpipe.from_sequential(odd_net(), stages=2, loss=MSE)
    with pytest.raises(ValueError, match=r"replicas is a pair such as \(2, 2\); found 4"):
        fpipe.verify(hybrid(model, "once a step", 2), model, params, rows(16), replicas=4)
    with pytest.raises(ValueError, match=r"a pair of which the second add up first; found \(2, 2, 2\)"):
        fpipe.reference(model, params, rows(16), replicas=(2, 2, 2))  # pyright: ignore[reportArgumentType]


def by_group(net: nn.Module, batches: list[Any], way: str) -> dict[str, Tensor]:
    """Gradients by plain autograd, of two groups of two replicas: added up within each, and then over both."""
    each = list[list[dict[str, Tensor]]]()  # of each replica, each of its two microbatches
    for batch in batches:
        each.append([])
        for x, target in zip(*(half.chunk(2) for half in batch), strict=True):
            loss = MSE(net(x), target) * (1 / 8)
            found = torch.autograd.grad(loss, [*net.parameters()])
            each[-1].append(dict(zip((name for name, _ in net.named_parameters()), found, strict=True)))

    def added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: reduce(torch.add, [part[name] for part in parts]) for name in parts[0]}

    if way == "each microbatch":
        groups = [added([added([one[n] for one in each[at : at + 2]]) for n in range(2)]) for at in (0, 2)]
    else:
        groups = [added([added(one) for one in each[at : at + 2]]) for at in (0, 2)]
    return added(groups)


def meshed(ranks: int, turned: bool) -> DeviceMesh:
    """Groups of replicas along the first dimension, or along the second."""
    names = ("shard", "replicate", "pp") if turned else ("replicate", "shard", "pp")
    return init_device_mesh("cpu", (2, 2, ranks), mesh_dim_names=names)


def bits(rank: int, way: str, ranks: int, turned: bool) -> list[str]:
    """What is odd after two steps of replicas in groups."""
    mesh = meshed(ranks, turned)
    net, batches = odd_net(), [tuple(half.chunk(4)[one] for half in rows(16)) for one in range(4)]
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    program, place = hybrid(model, way, ranks), mesh.get_local_rank("pp")
    shards = fpipe.shard_params(own(program, place, params), mesh["shard"])
    replica = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batches[replica]))
    for _ in range(2):
        found = step(shards, batches[replica])
    expected = by_group(net, batches, way)
    made = {name: grad for stage in found.grads if stage is not None for name, grad in stage.items()}
    wrong = [name for name, grad in made.items() if not torch.equal(grad.full_tensor(), expected[name])]
    clipped, norm = fpipe.clip_grads(found.grads, 1e-3, mesh=mesh)
    wrong += ["norm"] * (not torch.allclose(norm, nn.utils.get_total_norm(list(expected.values()))))
    wrong += ["clipped"] * (not torch.allclose(fpipe.global_norm(clipped, mesh=mesh), torch.tensor(1e-3)))
    return wrong + ["missing"] * (len(made) != len(params[0]) * (3 - ranks))


@pytest.mark.crossed
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_groups_of_processes_give_the_bits_of_autograd_added_by_group(four: Processes, way: str, turned: bool):
    assert four.each(bits, way, 1, turned) == [[]] * 4


eight = processes(8)


@pytest.mark.deep
@pytest.mark.parametrize("way", WAYS)
def test_two_by_two_by_two_processes_do_too(eight: Processes, way: str):
    assert eight.each(bits, way, 2, False) == [[]] * 8


def lost(rank: int, who: int, way: str) -> Any:
    """What each process hears of one that is gone, and how soon."""
    mesh = meshed(1, False)
    model = fpipe.from_functions([lambda p, x: torch.tanh(x @ p["w"])] * 2, MSE)
    shards = fpipe.shard_params(tuple({"w": torch.full((8, 8), 0.1)} for _ in range(2)), mesh["shard"])
    program = hybrid(model, way, 1)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, rows(8)))
    batch = tuple(half + rank for half in rows(8))
    step(shards, batch)
    if rank == who:
        os._exit(1)
    return timed(lambda: step(shards, batch))


def test_a_process_that_is_lost_is_named_in_both_groups():
    """In a sum, and among shards that are sent."""
    cases = [(1, "once a step"), (2, "each use")]
    with beside_each_other(len(cases), 4) as groups:
        for several, case in zip(groups, cases, strict=True):
            several.start(lost, *case)
        for several, (who, _) in zip(groups, cases, strict=True):
            for words, seconds in [result(pipe) for rank, pipe in enumerate(several.pipes) if rank != who]:
                assert words.startswith(f"RankError: replica {who}: rank 0 is gone")
                assert seconds < SOON


def failing(rank: int, lost: int) -> Any:
    """What each process hears when one fails in a backward."""
    mesh = meshed(1, False)
    model = fpipe.from_functions([lambda p, x: torch.tanh(x @ p["w"])] * 2, MSE)
    shards = fpipe.shard_params(tuple({"w": torch.full((8, 8), 0.1)} for _ in range(2)), mesh["shard"])
    batch = tuple(half + rank for half in rows(8))
    program = hybrid(model, "each use", 1)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batch), check_finite=True)
    broken = (torch.full_like(batch[0], float("nan")), batch[1]) if rank == lost else batch
    return timed(lambda: step(shards, broken))


@pytest.mark.parametrize("lost", [0, 3])
def test_one_failure_ends_both_groups_with_its_words(four: Processes, lost: int):
    for words, seconds in four.each(failing, lost):
        assert "NaN or infinite numbers" in words
        assert seconds < SOON
