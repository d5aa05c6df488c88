"""Replicas of a pipeline sum their gradients over different rows, and an error in one ends all."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DistributedSampler

import fpipe
from fpipe.tree import leaves
from tests.processes import SOON, Processes, count_resources, receive_answer, settled_growth, time_call
from tests.test_distributed import (
    MSE,
    blocks,
    cut_blocks,
    fail_on_one_rank,
    hang,
    is_equal_tree,
    kill,
    local_part,
    raise_memory_error,
    rows,
    to_meta,
    trouble_program,
)


def replicated(
    model: fpipe.Model | int, schedule: Any = None, *transforms: Any, microbatches: int = 2, axis: str = "dp"
) -> fpipe.Program:
    schedule = schedule or fpipe.schedules.one_f_one_b(2)
    return fpipe.chain(fpipe.split(microbatches), schedule, fpipe.merge(), fpipe.data_parallel(axis), *transforms)(
        fpipe.program(model)
    )


def test_sums_overlap_with_remaining_work():
    program = replicated(2)
    cells = program.table(comms=True)
    assert cells[0].index("REDUCE(all[0])") == len(cells[0]) - 1
    assert fpipe.simulate(program, fpipe.Costs(reduce=[3, 1])).makespan == fpipe.simulate(program).makespan
    assert fpipe.simulate(program, fpipe.Costs(reduce=[3, 1])).delivered == fpipe.simulate(program).delivered + 3
    assert fpipe.simulate(program, fpipe.Costs(reduce=[0, 1])).delivered == fpipe.simulate(program).delivered
    assert fpipe.Costs(reduce=2).seconds(program.ops[-1]) == 2


def test_a_missing_mesh_is_refused_with_the_call_to_make_it(four: Processes):
    assert all(four.run(refuse_missing_mesh))


def refuse_missing_mesh(rank: int) -> bool:
    model, params, _ = cut_blocks(2, 2)
    program = replicated(model, fpipe.schedules.gpipe(2))
    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pp"))):
        with pytest.raises(ValueError, match=r"Say mesh=init_device_mesh\(device, \(replicas, 2\), mesh_dim_names="):
            fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, rows()))
    return True


def meshed(names: tuple[str, str] = ("dp", "pp"), shape: tuple[int, int] = (2, 2)) -> tuple[DeviceMesh, int, int]:
    """Return a mesh of these processes with the replica and pipeline rank of this one."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh, *(mesh.get_local_rank(name) for name in ("dp", "pp"))


def started(
    model: fpipe.Model, params: Any, program: fpipe.Program, batch: Any, mesh: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Build a step of all processes; return it with the parameters or shards that this one passes."""
    mesh = mesh or meshed()[0]
    local_params, meta_params = (
        local_part(program, mesh.get_local_rank("pp"), params),
        fpipe.tree.tree_map(to_meta, params),
    )
    if any(op.kind == "GATHER" for op in program.ops):
        local_params = fpipe.shard_params(local_params, mesh["dp"])
    example = (
        tuple(meta if local is None else local for local, meta in zip(local_params, meta_params, strict=True)),
        batch,
    )
    return fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, **options), local_params


def by_hand(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]], microbatches: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum loss and gradients of plain autograd over the microbatches of each replica, then over replicas."""
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


def differing_results(result: fpipe.Result, loss: Tensor, grads: dict[str, Tensor]) -> list[str]:
    """List the results that differ in any bit."""
    local_grads = {name: grad for stage in result.grads if stage is not None for name, grad in stage.items()}
    names = [name for name, grad in local_grads.items() if not torch.equal(grad, grads[name])]
    names += ["loss"] * (isinstance(result.loss, Tensor) and not torch.equal(result.loss, loss))
    return names + ["no gradients"] * (not local_grads)


def compare_bits(rank: int, names: tuple[str, str], schedule: str) -> list[str]:
    mesh, replica, _ = meshed(names)
    net, full_batch = blocks(4), rows(19)  # odd, so that the sampler pads to equal numbers
    sampled_rows = [[*DistributedSampler(range(19), num_replicas=2, rank=replica_index)] for replica_index in range(2)]  # type: ignore[arg-type]
    batches = [(full_batch[0][rows_of_replica], full_batch[1][rows_of_replica]) for rows_of_replica in sampled_rows]
    model, params, _ = fpipe.from_sequential(net, stages=4 if schedule == "interleaved" else 2, loss=MSE)
    program = replicated(model, fpipe.schedules.get(schedule)(2), microbatches=4)
    step, local_params = started(model, params, program, batches[0], mesh, broadcast=True)
    for _ in range(2):
        result = step(local_params, batches[replica])
    loss, grads = by_hand(net, batches, 4)
    norm = fpipe.global_norm(result.grads, model=model, mesh=mesh)  # each stage once, though two replicas have it
    expected = fpipe.global_norm([grads[name] for stage in params for name in stage])
    return differing_results(result, loss, grads) + ["norm"] * (not torch.allclose(norm, expected, rtol=1e-6))


@pytest.mark.parametrize(
    ("names", "schedule"), [(("dp", "pp"), "one_f_one_b"), (("pp", "dp"), "interleaved"), (("dp", "pp"), "dualpipe")]
)
def test_two_by_two_processes_give_the_bits_of_autograd_added_by_replica(
    four: Processes, names: tuple[str, str], schedule: str
):
    assert four.run(compare_bits, names, schedule) == [[]] * 4


def compare_with_one_device(rank: int) -> list[str]:
    """Compare replicas of one microbatch with one device of two, with random numbers and microbatch indices."""
    _, replica, stage = meshed()

    def last_stage(p: Any, x: Tensor, *, microbatch: int) -> Tensor:
        return nn.functional.dropout(x @ p["w"], 0.5) * (microbatch + 1)

    def first_stage(p: Any, x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ p["w"] + p["b"], 0.5)

    torch.manual_seed(3)
    params = ({"w": torch.randn(8, 8), "b": torch.randn(8)}, {"w": torch.randn(8, 8)})
    model = fpipe.from_functions([first_stage, last_stage], MSE)
    program, batch = replicated(model, microbatches=1), tuple(half.chunk(2)[replica] for half in rows(12))
    one_device_program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    expected = fpipe.build(one_device_program, model)(params, rows(12), key=5)
    step, local_params = started(model, params, program, batch, broadcast=True)
    result = step(local_params, batch, key=5)
    is_equal = is_equal_tree(result.grads[stage], expected.grads[stage]) and torch.equal(result.loss, expected.loss)
    return [] if is_equal else ["compare_bits"]


def test_replicas_of_one_microbatch_equal_one_device(four: Processes):
    assert four.run(compare_with_one_device) == [[]] * 4


def keep_state_local(rank: int) -> list[bool]:
    """Compare outputs and batch norms with a single replica, and look for sums in the record."""
    mesh, replica, stage = meshed()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
    model, params, state = fpipe.from_sequential(net, stages=2, loss=MSE)
    program, batch = replicated(model), tuple(half + replica for half in rows(8))
    example = (params, batch, state)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=example, record=True)
    result = step(local_part(program, stage, params), batch, state=local_part(program, stage, state))
    replica_result = fpipe.build(program, model)(params, batch, state=state)
    kinds = {op.kind for op, start, end in result.timeline.events if op.rank == stage}
    checks = (
        is_equal_tree(result.state, local_part(program, stage, replica_result.state)),
        stage == 0 or torch.equal(result.outputs, replica_result.outputs),
    )
    return [*checks, "REDUCE" in kinds]


def test_state_and_outputs_stay_local_to_a_replica(four: Processes):
    assert four.run(keep_state_local) == [[True] * 3] * 4


def compare_shapes(rank: int, shape: tuple[int, int]) -> bool:
    """Compare four replicas of one rank, or one replica of four, with one device to rounding."""
    mesh, replica, pipeline_rank = meshed(("dp", "pp"), shape)
    model, params, _ = fpipe.from_sequential(blocks(4).double(), stages=4, loss=MSE)
    params = tuple({name: leaf.double() for name, leaf in stage.items()} for stage in params)
    full_batch = tuple(half.double() for half in rows(16))
    program = replicated(model, fpipe.schedules.one_f_one_b(shape[1]))
    batch = tuple(half.chunk(shape[0])[replica] for half in full_batch)
    step, local_params = started(model, params, program, batch, mesh)
    result = step(local_params, batch)
    expected = local_part(program, pipeline_rank, fpipe.reference(model, params, full_batch).grads)
    pairs = zip(leaves(result.grads), leaves(expected), strict=True)
    return all(a is b or torch.allclose(a, b, rtol=1e-10, atol=1e-14) for a, b in pairs)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_a_mesh_may_have_one_rank_or_one_replica(four: Processes, shape: tuple[int, int]):
    assert four.run(compare_shapes, shape) == [True] * 4


def change_row_counts(rank: int, count: int) -> list[str]:
    """Run steps with another number of rows, first in all replicas and then in one."""
    _, replica, _ = meshed()
    model, params, _ = cut_blocks(2, 2)
    step, local_params = started(model, params, replicated(model), rows(6))
    return [time_call(lambda n=n: step(local_params, rows(n[replica])))[0] for n in ([8, 8], [6, count])]


OTHER_ROWS = {
    8: "the batches of the replicas have 6, 8 rows; their losses are means, so all have equally many. Distributed",
    1: "1 rows cannot fill 2 microbatches",
}


@pytest.mark.parametrize("count", OTHER_ROWS)
def test_unequal_rows_are_refused_on_all_replicas(four: Processes, count: int):
    """One row does not even fill the microbatches of its replica."""
    for outcomes in four.run(change_row_counts, count):
        assert outcomes[0] == "worked"
        assert outcomes[1].startswith(("ValueError: ", "RankError: replica "))
        assert OTHER_ROWS[count] in outcomes[1]


def build_disagreeing(rank: int, difference: str) -> str:
    _, replica, _ = meshed()
    model, params, _ = fpipe.from_sequential(
        blocks(4 if difference == "parameters" and rank == 3 else 2), stages=2, loss=MSE
    )
    schedule = fpipe.schedules.gpipe(2) if difference == "program" and rank == 3 else None
    try:
        step, local_params = started(model, params, replicated(model, schedule, microbatches=3), rows())
        step(local_params, rows(), key=replica)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("difference", ["program", "parameters", "key"])
def test_all_replicas_name_the_rank_that_differs(four: Processes, difference: str):
    rank_name = "replica 1: rank 0" if difference == "key" else "replica 1: rank 1"
    assert all(
        f"{rank_name} differs from replica 0: rank 0 in its {difference}" in message
        for message in four.run(build_disagreeing, difference)
    )


def change_keys(rank: int) -> list[str]:
    _, replica, _ = meshed()
    model, params, _ = cut_blocks(2, 2)
    step, local_params = started(model, params, replicated(model, microbatches=3), rows())
    return [time_call(lambda key=key: step(local_params, rows(), key=key))[0] for key in (7, 8 + replica)]


def test_unequal_keys_in_a_later_step_are_refused_on_all_replicas(four: Processes):
    for first_outcome, second_outcome in four.run(change_keys):
        assert first_outcome == "worked"
        assert second_outcome.endswith("ValueError: the replicas have keys 8, 9 in this step; all need one key.")


def refuse_on_one_rank(rank: int) -> str:
    model, params, _ = cut_blocks(2, 2)
    with pytest.raises((ValueError, RuntimeError)) as error_info:
        started(model, params, replicated(model), rows(), loss_scale=-1 if rank == 2 else 1)
    return str(error_info.value)


def test_build_errors_of_one_process_reach_all_replicas(four: Processes):
    message = "loss_scale is a finite number above 0"
    for rank, received in enumerate(four.run(refuse_on_one_rank)):
        prefix = "" if rank == 2 else "replica 1: rank 0 failed outside of its ops: ValueError: "
        assert received.startswith(prefix + message)


@pytest.mark.parametrize("failing_rank", [0, 3])
def test_errors_of_an_op_reach_all_replicas_and_end_the_run(four: Processes, failing_rank: int):
    for rank, outcome in enumerate(four.run(fail_on_one_rank, failing_rank, raise_memory_error, None, (2, 2))):
        assert "the run is over" in outcome[2]
        assert outcome[1] < SOON
        if rank == failing_rank:
            assert outcome[0] == "MemoryError: out of memory"
        else:
            replica, stage = divmod(failing_rank, 2)
            message = f"replica {replica}: rank {stage} failed in {stage}F3: stage {stage} (stage), microbatch 3"
            assert outcome[0].startswith(f"RankError: {message}")


def count_leaks(rank: int) -> list[int]:
    """Count the tensors, threads and files that 20 steps leave, and the tensors that still hold a sum."""
    program, model, params, batch = trouble_program(2, fpipe.data_parallel())
    step, local_params = started(model, params, program, batch)
    for number in range(40):
        if number == 20:
            baseline = count_resources()
        step(local_params, batch)
    growth = settled_growth(count_resources, baseline)
    result = step(local_params, batch)
    memory = result.grads[rank % 2]["w"].untyped_storage().data_ptr()
    del result

    def count_memory_holders() -> list[int]:
        tensors = (tensor for tensor in gc.get_objects() if type(tensor) is Tensor)
        return [sum(tensor.untyped_storage().data_ptr() == memory for tensor in tensors)]

    return [*growth, *settled_growth(count_memory_holders, [0])]


def test_forty_steps_leak_nothing(four: Processes):
    assert four.run(count_leaks) == [[0, 0, 0, 0]] * 4


@pytest.mark.parametrize(
    ("fail", "shape"),
    [
        (kill, (3, 1)),
        (hang, (2, 2)),
        pytest.param(kill, (2, 2), marks=pytest.mark.deep),
        pytest.param(hang, (3, 1), marks=pytest.mark.deep),
    ],
)
def test_all_replicas_name_a_dead_process(fail: Any, shape: tuple[int, int]):
    failing_rank, timeout = 1, 2.0 if fail is hang else None
    name = "replica 0: rank 1" if shape == (2, 2) else "replica 1: rank 0"
    with Processes(shape[0] * shape[1]) as processes:
        processes.start(fail_on_one_rank, failing_rank, fail, timeout, shape)
        for outcome in [receive_answer(pipe) for rank, pipe in enumerate(processes.pipes) if rank != failing_rank]:
            assert outcome[0].startswith(f"RankError: {name} {'did not' if fail is hang else 'is gone'}")
            assert outcome[1] < (timeout or 0) + SOON
            assert "start all ranks again" in outcome[2]
        processes.all[failing_rank].kill()
