"""Replicas of a pipeline: each has rows of its own, and all get the sums of all; what goes wrong in one ends all."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DistributedSampler

import fpipe
from fpipe.tree import leaves
from tests.processes import SOON, Processes, counted, left, result, timed
from tests.test_distributed import MSE, alike, blocks, hang, kill, one_in_trouble, own, raising, rows, to_meta, troubled


def replicated(
    model: fpipe.Model | int, schedule: Any = None, *more: Any, microbatches: int = 2, axis: str = "dp"
) -> fpipe.Program:
    schedule = schedule or fpipe.schedules.one_f_one_b(2)
    return fpipe.chain(fpipe.split(microbatches), schedule, fpipe.merge(), fpipe.data_parallel(axis), *more)(
        fpipe.program(model)
    )


def test_a_sum_runs_beside_what_is_left():
    program = replicated(2)
    cells = program.table(comms=True)
    assert cells[0].index("REDUCE(all[0])") == len(cells[0]) - 1
    assert fpipe.simulate(program, fpipe.Costs(reduce=[3, 1])).makespan == fpipe.simulate(program).makespan
    assert fpipe.simulate(program, fpipe.Costs(reduce=[3, 1])).delivered == fpipe.simulate(program).delivered + 3
    assert fpipe.simulate(program, fpipe.Costs(reduce=[0, 1])).delivered == fpipe.simulate(program).delivered
    assert fpipe.Costs(reduce=2).seconds(program.ops[-1]) == 2


def test_without_a_mesh_of_replicas_it_says_how_to_make_one(four: Processes):
    assert all(four.each(unmeshed))


def unmeshed(rank: int) -> bool:
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    program = replicated(model, fpipe.schedules.gpipe(2))
    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pp"))):
        with pytest.raises(ValueError, match=r"Say mesh=init_device_mesh\(device, \(replicas, 2\), mesh_dim_names="):
            fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rows()))
    return True


def meshed(names: tuple[str, str] = ("dp", "pp"), shape: tuple[int, int] = (2, 2)) -> tuple[DeviceMesh, int, int]:
    """The mesh of these processes, and which replica and rank this one is."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh, *(mesh.get_local_rank(name) for name in ("dp", "pp"))


def started(
    model: fpipe.Model, params: Any, program: fpipe.Program, batch: Any, mesh: Any = None, **more: Any
) -> tuple[Any, Any]:
    """A step of all processes, and what this one hands in: parameters of its stages, or shards of them."""
    mesh = mesh or meshed()[0]
    mine, others = own(program, mesh.get_local_rank("pp"), params), fpipe.tree.tree_map(to_meta, params)
    if any(op.kind == "GATHER" for op in program.ops):
        mine = fpipe.shard_params(mine, mesh["dp"])
    example = tuple(other if one is None else one for one, other in zip(mine, others, strict=True)), batch
    return fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, **more), mine


def by_hand(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]], microbatches: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by plain autograd: of each replica over its microbatches, and then of one after the other."""
    loss, grads = torch.zeros(()), dict[str, Tensor]()
    for number, batch in enumerate(batches):
        net.zero_grad()
        losses = []
        for x, target in zip(*(part.tensor_split(microbatches) for part in batch), strict=True):
            losses.append(MSE(net(x), target) * (len(x) / (len(batch[0]) * len(batches))))
            losses[-1].backward()
        total = sum(losses[1:], losses[0]).detach()
        loss = loss + total if number else total
        for name, leaf in net.named_parameters():
            grads[name] = grads[name] + leaf.grad if number else leaf.grad  # type: ignore[operator]
    return loss, grads


def odd(found: fpipe.Result, loss: Tensor, grads: dict[str, Tensor]) -> list[str]:
    """The results that differ in a bit."""
    mine = {name: grad for stage in found.grads if stage is not None for name, grad in stage.items()}
    wrong = [name for name, grad in mine.items() if not torch.equal(grad, grads[name])]
    wrong += ["loss"] * (isinstance(found.loss, Tensor) and not torch.equal(found.loss, loss))
    return wrong + ["no gradients"] * (not mine)


def bits(rank: int, names: tuple[str, str], schedule: str) -> list[str]:
    mesh, replica, _ = meshed(names)
    net, whole = blocks(4), rows(19)  # a sampler pads to as many for each
    drawn = [[*DistributedSampler(range(19), num_replicas=2, rank=one)] for one in range(2)]  # type: ignore[arg-type]
    batches = [(whole[0][at], whole[1][at]) for at in drawn]
    model, params, _ = fpipe.from_sequential(net, stages=4 if schedule == "interleaved" else 2, loss=MSE)
    program = replicated(model, fpipe.schedules.get(schedule)(2), microbatches=4)
    step, mine = started(model, params, program, batches[0], mesh, broadcast=True)
    for _ in range(2):
        found = step(mine, batches[replica])
    loss, grads = by_hand(net, batches, 4)
    norm = fpipe.global_norm(found.grads, model=model, mesh=mesh)  # each stage once, though two replicas have it
    expected = fpipe.global_norm([grads[name] for stage in params for name in stage])
    return odd(found, loss, grads) + ["norm"] * (not torch.allclose(norm, expected, rtol=1e-6))


@pytest.mark.parametrize(
    ("names", "schedule"), [(("dp", "pp"), "one_f_one_b"), (("pp", "dp"), "interleaved"), (("dp", "pp"), "dualpipe")]
)
def test_two_by_two_processes_give_the_bits_of_autograd_added_by_replica(
    four: Processes, names: tuple[str, str], schedule: str
):
    assert four.each(bits, names, schedule) == [[]] * 4


def as_one(rank: int) -> list[str]:
    """One microbatch a replica: the bits of one device with two, what it draws and which microbatch it is included."""
    _, replica, place = meshed()

    def last(p: Any, x: Tensor, *, microbatch: int) -> Tensor:
        return nn.functional.dropout(x @ p["w"], 0.5) * (microbatch + 1)

    def first(p: Any, x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ p["w"] + p["b"], 0.5)

    torch.manual_seed(3)
    params = ({"w": torch.randn(8, 8), "b": torch.randn(8)}, {"w": torch.randn(8, 8)})
    model = fpipe.from_functions([first, last], MSE)
    program, batch = replicated(model, microbatches=1), tuple(half.chunk(2)[replica] for half in rows(12))
    whole = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    expected = fpipe.build(whole, model)(params, rows(12), key=5)
    step, mine = started(model, params, program, batch, broadcast=True)
    found = step(mine, batch, key=5)
    same = alike(found.grads[place], expected.grads[place]) and torch.equal(found.loss, expected.loss)
    return [] if same else ["bits"]


def test_one_microbatch_a_replica_is_one_device_with_as_many_microbatches(four: Processes):
    assert four.each(as_one) == [[]] * 4


def remembering(rank: int) -> list[bool]:
    """Outputs and batch norms are those of a replica alone; what is measured has the sums too."""
    mesh, replica, place = meshed()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
    model, params, state = fpipe.from_sequential(net, stages=2, loss=MSE)
    program, batch = replicated(model), tuple(half + replica for half in rows(8))
    example = (params, batch, state)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, record=True)
    found = step(own(program, place, params), batch, state=own(program, place, state))
    alone = fpipe.build(program, model)(params, batch, state=state)
    kinds = {op.kind for op, start, end in found.timeline.events if op.rank == place}
    same = alike(found.state, own(program, place, alone.state)), place == 0 or torch.equal(found.outputs, alone.outputs)
    return [*same, "REDUCE" in kinds]


def test_state_and_outputs_stay_those_of_a_replica(four: Processes):
    assert four.each(remembering) == [[True] * 3] * 4


def one_rank_each(rank: int, shape: tuple[int, int]) -> bool:
    """Four replicas of one rank, and one replica of four: one device, but for rounding."""
    mesh, replica, place = meshed(("dp", "pp"), shape)
    model, params, _ = fpipe.from_sequential(blocks(4).double(), stages=4, loss=MSE)
    params = tuple({name: leaf.double() for name, leaf in stage.items()} for stage in params)
    whole = tuple(half.double() for half in rows(16))
    program = replicated(model, fpipe.schedules.one_f_one_b(shape[1]))
    batch = tuple(half.chunk(shape[0])[replica] for half in whole)
    step, mine = started(model, params, program, batch, mesh)
    found = step(mine, batch)
    expected = own(program, place, fpipe.reference(model, params, whole).grads)
    pairs = zip(leaves(found.grads), leaves(expected), strict=True)
    return all(a is b or torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in pairs)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_a_mesh_may_have_only_replicas_or_one_of_them(four: Processes, shape: tuple[int, int]):
    assert four.each(one_rank_each, shape) == [True] * 4


def other_rows(rank: int, count: int) -> list[str]:
    """Replicas with as many rows as before, and one with another number."""
    _, replica, _ = meshed()
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    step, mine = started(model, params, replicated(model), rows(6))
    return [timed(lambda n=n: step(mine, rows(n[replica])))[0] for n in ([8, 8], [6, count])]


OTHER_ROWS = {
    8: "the batches of the replicas have 6, 8 rows; their losses are means, so all have equally many. Distributed",
    1: "1 rows cannot fill 2 microbatches",
}


@pytest.mark.parametrize("count", OTHER_ROWS)
def test_means_over_other_numbers_of_rows_are_refused_on_all_replicas(four: Processes, count: int):
    """They may not fill the microbatches of one."""
    for told in four.each(other_rows, count):
        assert told[0] == "worked"
        assert told[1].startswith(("ValueError: ", "RankError: replica "))
        assert OTHER_ROWS[count] in told[1]


def disagreeing(rank: int, how: str) -> str:
    _, replica, _ = meshed()
    model, params, _ = fpipe.from_sequential(blocks(4 if how == "parameters" and rank == 3 else 2), stages=2, loss=MSE)
    schedule = fpipe.schedules.gpipe(2) if how == "program" and rank == 3 else None
    try:
        step, mine = started(model, params, replicated(model, schedule, microbatches=3), rows())
        step(mine, rows(), key=replica)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("how", ["program", "parameters", "key"])
def test_who_of_all_replicas_differs_is_named_on_all(four: Processes, how: str):
    who = "replica 1: rank 0" if how == "key" else "replica 1: rank 1"
    assert all(f"{who} differs from replica 0: rank 0 in its {how}" in said for said in four.each(disagreeing, how))


def keyed_apart(rank: int) -> list[str]:
    _, replica, _ = meshed()
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    step, mine = started(model, params, replicated(model, microbatches=3), rows())
    return [timed(lambda key=key: step(mine, rows(), key=key))[0] for key in (7, 8 + replica)]


def test_replicas_with_other_keys_in_a_later_step_are_refused_on_all(four: Processes):
    for first, second in four.each(keyed_apart):
        assert first == "worked"
        assert second.endswith("ValueError: the replicas have keys 8, 9 in this step; all need one key.")


def refusing(rank: int) -> str:
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    with pytest.raises((ValueError, RuntimeError)) as found:
        started(model, params, replicated(model), rows(), loss_scale=-1 if rank == 2 else 1)
    return str(found.value)


def test_what_one_process_refuses_to_build_is_told_in_every_replica(four: Processes):
    words = "loss_scale is a finite number above 0"
    for rank, said in enumerate(four.each(refusing)):
        who = "" if rank == 2 else "replica 1: rank 0 failed outside of its ops: ValueError: "
        assert said.startswith(who + words)


@pytest.mark.parametrize("who", [0, 3])
def test_what_an_op_raises_is_told_in_every_replica_and_ends_the_run(four: Processes, who: int):
    for rank, told in enumerate(four.each(one_in_trouble, who, raising, None, (2, 2))):
        assert "the run is over" in told[2]
        assert told[1] < SOON
        if rank == who:
            assert told[0] == "MemoryError: out of memory"
        else:
            words = f"replica {who // 2}: rank {who % 2} failed in {who % 2}F3: stage {who % 2} (stage), microbatch 3"
            assert told[0].startswith(f"RankError: {words}")


def forty(rank: int) -> list[int]:
    """How many more tensors, threads and files there are after so many steps; and sums that a step keeps."""
    program, model, params, batch = troubled(2, fpipe.data_parallel())
    step, mine = started(model, params, program, batch)
    for number in range(40):
        if number == 20:
            before = counted()
        step(mine, batch)
    more = left(counted, before)
    found = step(mine, batch)
    memory = found.grads[rank % 2]["w"].untyped_storage().data_ptr()
    del found

    def kept() -> list[int]:
        tensors = (one for one in gc.get_objects() if type(one) is Tensor)
        return [sum(one.untyped_storage().data_ptr() == memory for one in tensors)]

    return [*more, *left(kept, [0])]


def test_forty_steps_leave_nothing_behind(four: Processes):
    assert four.each(forty) == [[0, 0, 0, 0]] * 4


@pytest.mark.parametrize(
    ("what", "shape"),
    [
        (kill, (3, 1)),
        (hang, (2, 2)),
        pytest.param(kill, (2, 2), marks=pytest.mark.deep),
        pytest.param(hang, (3, 1), marks=pytest.mark.deep),
    ],
)
def test_a_process_that_is_lost_is_named_in_every_replica(what: Any, shape: tuple[int, int]):
    who, timeout = 1, 2.0 if what is hang else None
    name = "replica 0: rank 1" if shape == (2, 2) else "replica 1: rank 0"
    with Processes(shape[0] * shape[1]) as several:
        several.start(one_in_trouble, who, what, timeout, shape)
        for told in [result(pipe) for rank, pipe in enumerate(several.pipes) if rank != who]:
            assert told[0].startswith(f"RankError: {name} {'did not' if what is hang else 'is gone'}")
            assert told[1] < (timeout or 0) + SOON
            assert "start all ranks again" in told[2]
        several.all[who].kill()
