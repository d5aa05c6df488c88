"""Replicas along two axes (HSDP): shards within a group, whose gradients add up before the groups' do."""

import os
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fpipe
from tests.processes import SOON, Processes, processes, receive_answer, several_groups, time_call
from tests.test_distributed import MSE, local_part, rows
from tests.test_shard import odd_net

SHARD_OPTIONS: dict[str, dict[str, Any]] = {
    "once a step": {},
    "each use": {"gather": "use"},
    "each microbatch": {"scatter": "microbatch"},
}


def hybrid_program(model: Any, variant: str, ranks: int, shard_first: bool = False) -> fpipe.Program:
    pipeline = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(ranks), fpipe.merge(outputs=False))
    replications = [fpipe.data_parallel("replicate"), fpipe.shard("shard", **SHARD_OPTIONS[variant])]
    return fpipe.chain(pipeline, *(replications[::-1] if shard_first else replications))(fpipe.program(model))


def test_a_gradient_is_scattered_within_and_added_up_across():
    program = hybrid_program(2, "once a step", 2)
    (scatter_op,) = [op for op in program.ops if op.kind == "SCATTER" and op.stage == 1]
    (reduce_op,) = [op for op in program.ops if op.kind == "REDUCE" and op.reads == scatter_op.writes]
    assert str(scatter_op) == "cut[1] = SCATTER[1] sum[1,1] {axis='shard'} @ 1"
    assert str(reduce_op) == "all[1] = REDUCE[1] cut[1] {axis='replicate'} @ 1"
    assert str(program.outputs[-1]) == "grads[1] = all[1] @ 1"
    timeline = fpipe.simulate(program, fpipe.Costs(scatter=2.0, reduce=[3.0, 0.0]))
    assert timeline.delivered == timeline.makespan + 2 + 3  # of stage 0, one after another


def test_a_wrong_number_of_replicas_is_refused():
    model, params, _ = fpipe.from_sequential(odd_net(), stages=2, loss=MSE)
    with pytest.raises(ValueError, match=r"replicas is a pair such as \(2, 2\); found 4"):
        fpipe.verify(hybrid_program(model, "once a step", 2), model, params, rows(16), replicas=4)
    with pytest.raises(ValueError, match=r"replicas is a whole number or a pair; found a tuple\."):
        fpipe.reference(model, params, rows(16), replicas=(2, 2, 2))  # pyright: ignore[reportArgumentType]


def grads_added_by_group(net: nn.Module, batches: list[Any], variant: str) -> dict[str, Tensor]:
    """Return gradients of plain autograd for two groups of two replicas, added within each group and then over both."""
    grads_by_replica = list[list[dict[str, Tensor]]]()  # by replica, then by microbatch
    for batch in batches:
        grads_by_replica.append([])
        for x, target in zip(*(half.chunk(2) for half in batch), strict=True):
            loss = MSE(net(x), target) * (1 / 8)
            grads = torch.autograd.grad(loss, [*net.parameters()])
            grads_by_replica[-1].append(dict(zip((name for name, _ in net.named_parameters()), grads, strict=True)))

    def added(summands: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: reduce(torch.add, [summand[name] for summand in summands]) for name in summands[0]}

    if variant == "each microbatch":
        groups = [
            added(
                [added([parts[microbatch] for parts in grads_by_replica[start : start + 2]]) for microbatch in range(2)]
            )
            for start in (0, 2)
        ]
    else:
        groups = [added([added(parts) for parts in grads_by_replica[start : start + 2]]) for start in (0, 2)]
    return added(groups)


def replica_mesh(ranks: int, is_transposed: bool) -> DeviceMesh:
    """Return a mesh whose groups of replicas lie along its first or its second dimension."""
    names = ("shard", "replicate", "pp") if is_transposed else ("replicate", "shard", "pp")
    return init_device_mesh("cpu", (2, 2, ranks), mesh_dim_names=names)


def wrong_leaves(rank: int, variant: str, ranks: int, is_transposed: bool) -> list[str]:
    """Name the leaves that differ after two steps of replicas in groups."""
    mesh = replica_mesh(ranks, is_transposed)
    net, batches = odd_net(), [tuple(half.chunk(4)[index] for half in rows(16)) for index in range(4)]
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    program, pp_rank = hybrid_program(model, variant, ranks), mesh.get_local_rank("pp")
    shards = fpipe.shard_params(local_part(program, pp_rank, params), mesh["shard"])
    replica = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batches[replica]))
    for _ in range(2):
        result = step(shards, batches[replica])
    expected = grads_added_by_group(net, batches, variant)
    actual_grads = {name: grad for stage in result.grads if stage is not None for name, grad in stage.items()}
    wrong = [name for name, grad in actual_grads.items() if not torch.equal(grad.full_tensor(), expected[name])]
    clipped, norm = fpipe.clip_grads(result.grads, 1e-3, mesh=mesh)
    wrong += ["norm"] * (not torch.allclose(norm, nn.utils.get_total_norm(list(expected.values()))))
    wrong += ["clipped"] * (not torch.allclose(fpipe.global_norm(clipped, mesh=mesh), torch.tensor(1e-3)))
    return wrong + ["missing"] * (len(actual_grads) != len(params[0]) * (3 - ranks))


@pytest.mark.crossed
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("variant", SHARD_OPTIONS)
def test_groups_give_the_bits_of_autograd_added_by_group(four: Processes, variant: str, is_transposed: bool):
    assert four.run(wrong_leaves, variant, 1, is_transposed) == [[]] * 4


eight = processes(8)


@pytest.mark.deep
@pytest.mark.parametrize("variant", SHARD_OPTIONS)
def test_two_by_two_by_two_processes_give_the_bits_of_autograd(eight: Processes, variant: str):
    assert eight.run(wrong_leaves, variant, 2, False) == [[]] * 8


def lose_process(rank: int, culprit: int, variant: str) -> Any:
    """Return the error and seconds of each process after one exits."""
    mesh = replica_mesh(1, False)
    model = fpipe.from_functions([lambda p, x: torch.tanh(x @ p["w"])] * 2, MSE)
    shards = fpipe.shard_params(tuple({"w": torch.full((8, 8), 0.1)} for _ in range(2)), mesh["shard"])
    program = hybrid_program(model, variant, 1)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, rows(8)))
    batch = tuple(half + rank for half in rows(8))
    step(shards, batch)
    if rank == culprit:
        os._exit(1)
    return time_call(lambda: step(shards, batch))


def test_a_lost_process_is_named_in_both_groups():
    """One process is lost in a sum, one among shards that are sent."""
    cases = [(1, "once a step"), (2, "each use")]
    with several_groups(len(cases), 4) as groups:
        for workers, case in zip(groups, cases, strict=True):
            workers.start(lose_process, *case)
        for workers, (culprit, _) in zip(groups, cases, strict=True):
            for text, seconds in [receive_answer(pipe) for rank, pipe in enumerate(workers.pipes) if rank != culprit]:
                assert text.startswith(f"RankError: replica {culprit}: rank 0 is gone")
                assert seconds < SOON


def fail_in_backward(rank: int, culprit: int) -> Any:
    """Return the error and seconds of each process when one fails in a backward."""
    mesh = replica_mesh(1, False)
    model = fpipe.from_functions([lambda p, x: torch.tanh(x @ p["w"])] * 2, MSE)
    shards = fpipe.shard_params(tuple({"w": torch.full((8, 8), 0.1)} for _ in range(2)), mesh["shard"])
    batch = tuple(half + rank for half in rows(8))
    program = hybrid_program(model, "each use", 1)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batch), check_finite=True)
    local_batch = (torch.full_like(batch[0], float("nan")), batch[1]) if rank == culprit else batch
    return time_call(lambda: step(shards, local_batch))


@pytest.mark.parametrize("culprit", [0, 3])
def test_one_failure_ends_both_groups_with_its_message(four: Processes, culprit: int):
    for message, seconds in four.run(fail_in_backward, culprit):
        assert "NaN or infinite numbers" in message
        assert seconds < SOON
