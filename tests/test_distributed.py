"""A process for each rank: the bits of one process, and errors that name the rank and op that is to blame."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe.graphs.language.graph import fact_of_tensor
from fpipe.runtimes.processes.message_layout import Layout, header_of_step
from fpipe.runtimes.processes.rank_step import RemoteLoss
from fpipe.tree import leaves, tree_map
from tests.processes import SOON, Processes, beside_each_other, counted, left, result, timed
from tests.test_profile import NAPS, napping

MSE = nn.functional.mse_loss


def blocks(count: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def rows(count: int = 10, width: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, width), torch.randn(count, width)


def chained(model: fpipe.Model | int, schedule: Any, *more: Any, microbatches: int = 4) -> fpipe.Program:
    return fpipe.chain(fpipe.split(microbatches), *more, schedule, fpipe.merge())(fpipe.program(model))


def built(stages: int = 2, schedule: str = "one_f_one_b", **how: Any) -> tuple[fpipe.Program, Any, Any, Any]:
    """A program of as many ranks as stages, its step in one process and as one of their processes, and parameters."""
    model, params, _ = fpipe.from_sequential(blocks(stages), stages=stages, loss=MSE)
    program = chained(model, fpipe.schedules.get(schedule)(stages))
    step = fpipe.build(program, model, runtime="distributed", **{"example": (params, rows())} | how)
    return program, fpipe.build(program, model), step, params


def own(program: fpipe.Program, rank: int, per_stage: Any) -> tuple[Any, ...]:
    """What is this rank's of a tuple over stages."""
    return fpipe.local_params(program, per_stage, rank)


def differs(rank: int, program: fpipe.Program, found: fpipe.Result, whole: fpipe.Result) -> list[str]:
    """The results of a rank that are not bit by bit those of one process; what is another rank's is None."""
    pairs = {"grads": (found.grads, own(program, rank, whole.grads))}
    pairs["state"] = (found.state, None if whole.state is None else own(program, rank, whole.state))
    homes = {end.name.name: rank in end.homes for end in program.outputs}
    homes["loss"] |= rank == 0 and not isinstance(whole.loss, tuple)
    for name in ("loss", "outputs"):
        here = getattr(found, name)
        if name == "loss" and not homes[name]:  # it was None, and the first print failed on one rank alone
            assert isinstance(here, RemoteLoss)
            here = None
        pairs[name] = here, getattr(whole, name) if homes[name] else None
    return [name for name, (one, other) in pairs.items() if not alike(one, other)]


def alike(one: Any, other: Any) -> bool:
    """Whether a result has the bits and strides of the right one; a stage without a trace has zeros for no gradient."""
    a, b = leaves(one), leaves(other)
    if len(a) != len(b):
        return False
    pairs = [(x, torch.zeros_like(x) if y is None and isinstance(x, Tensor) else y) for x, y in zip(a, b, strict=True)]
    return all(torch.equal(x, y) and x.stride() == y.stride() if isinstance(x, Tensor) else x is y for x, y in pairs)


def both(
    rank: int, program: fpipe.Program, model: fpipe.Model, params: Any, batch: Any, *, steps: int = 2, **given: Any
) -> list[str]:
    """What differs after some steps between this rank, with what is its own, and all of them in one process."""
    state, key = given.get("state"), given.get("key")
    example = (params, batch) if state is None else (params, batch, state)
    alone = fpipe.build(program, model)
    step = fpipe.build(program, model, runtime="distributed", example=tree_map(to_meta, example))
    mine = own(program, rank, params)
    for _ in range(steps):
        whole = alone(params, batch, state=state, key=key)
        found = step(mine, batch, state=None if state is None else own(program, rank, state), key=key)
        state = whole.state
    return differs(rank, program, found, whole)


def to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def skipping() -> tuple[fpipe.Model, Any, None]:
    """Skips, a tie, None, an int, a mask, an expanded activation, and a cotangent with strides of 0."""

    def first(p: Any, x: Tensor) -> dict[str, Any]:
        y = x @ p["w"]
        return {"y": y, "none": None, "two": 2, "mask": x > 0, "bias": p["b"].expand(len(x), 8), "t": y.t()[:, ::1]}

    def second(p: Any, x: dict[str, Any]) -> Tensor:
        return torch.where(x["mask"], x["y"] * x["two"], x["t"].t()) @ p["w"] + x["bias"]

    def third(p: Any, x: tuple[dict[str, Any], Tensor]) -> Tensor:
        return (x[0]["y"] + x[1]) @ p["w"]

    model = fpipe.from_functions(
        [first, second, third],
        lambda y, t: (y - t).sum(),
        inputs=["batch", 0, (0, 1)],
        ties=[((0, "w"), (2, "w"))],
        reduction="sum",
    )
    torch.manual_seed(3)
    params = ({"w": torch.randn(8, 8), "b": torch.randn(8)}, {"w": torch.randn(8, 8)}, {})
    return model, params, None


def remembering() -> tuple[fpipe.Model, Any, Any]:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(2)]
    return fpipe.from_sequential(nn.Sequential(*layers), stages=2, loss=MSE)


def of_blocks(stages: int) -> Callable[[], tuple[fpipe.Model, Any, Any]]:
    return lambda: fpipe.from_sequential(blocks(), stages=stages, loss=MSE)


IN_ORDER = fpipe.schedules.from_table(
    "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2 \n 1F0 1F1 1F2 1B0 1B1 1B2",
)
OUT_OF_ORDER = fpipe.schedules.from_table("0F2 0F0 0F1 2F0 2F2 2F1 2B1 2B2 2B0 0B1 0B2 0B0 \n 1F2 1F0 1F1 1B2 1B0 1B1")
PROGRAMS: dict[str, tuple[Any, ...]] = {
    **{name: (of_blocks(2), fpipe.schedules.get(name)(2)) for name in ("gpipe", "one_f_one_b", "dualpipe", "chimera")},
    **{name: (of_blocks(4), fpipe.schedules.get(name)(2)) for name in ("interleaved", "zbv", "dualpipev", "hanayo")},
    "interleaved_zb": (of_blocks(4), fpipe.schedules.interleaved_zb(2)),
    "weights of a host rank": (of_blocks(4), fpipe.schedules.roundpipe(2)),
    "norms and dropout": (remembering, fpipe.schedules.zb_h1(2)),
    "skips, in order": (skipping, IN_ORDER),
    "skips, out of order": (skipping, OUT_OF_ORDER),
    "skips, recomputed": (skipping, fpipe.checkpoint("always"), IN_ORDER),
    "offloaded to the host": (of_blocks(4), fpipe.schedules.zbv(2), fpipe.offload()),
    "offloaded to a rank": (of_blocks(4), fpipe.schedules.zbv(2), fpipe.offload(to=lambda rank: 1 - rank)),
    "split backward": (of_blocks(2), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2)),
    "recomputed": (of_blocks(4), fpipe.checkpoint("always"), fpipe.schedules.interleaved(2)),
}


def program_of(name: str) -> tuple[fpipe.Program, fpipe.Model, Any, Any]:
    make, *transforms = PROGRAMS[name]
    model, params, state = make()
    program = fpipe.chain(fpipe.split(3 if make is skipping else 4), *transforms, fpipe.merge())(fpipe.program(model))
    return program, model, params, state


def compared(rank: int, name: str) -> list[str]:
    program, model, params, state = program_of(name)
    return both(rank, program, model, params, rows(), state=state, key=7 if state else None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_give_the_bits_of_one(request: pytest.FixtureRequest, name: str):
    """Whatever flows arrives as it was, and what waits elsewhere comes back so."""
    processes = request.getfixturevalue("trio" if "host rank" in name else "pair")
    assert not any(processes.each(compared, name))


def recorded(rank: int) -> list[Any]:
    """What each rank measured, on one clock."""
    model, params, _ = fpipe.from_sequential(blocks(4, 64), stages=2, loss=MSE)
    program, batch = chained(model, fpipe.schedules.one_f_one_b(2)), rows(64, 64)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), record=True)
    alone = fpipe.build(program, model, record=True)(params, batch).timeline
    for _ in range(2):
        timeline = step(own(program, rank, params), batch).timeline
    at = {op: (start, end) for op, start, end in timeline.events}
    pairs = [
        (op, program.ops[read])
        for op, reads in zip(program.ops, program.sources, strict=True)
        for read in reads
        if read >= 0
    ]
    late = [str(op) for op, read in pairs if op in at and read in at and at[read][0] > at[op][1]]
    assert "rank 1" in fpipe.plot(timeline)
    return [late, set(at) == {op for op, _, _ in alone.events}, timeline.peak, timeline.makespan]


def test_all_ranks_get_one_timeline(pair: Processes):
    first, second = pair.each(recorded)
    assert first[0] == second[0] == []  # nothing was written after it was read
    assert first[1:] == second[1:]
    assert first[1]
    assert all(peak > 0 for peak in first[2])


def held(rank: int, name: str) -> list[Any]:
    """The most bytes of each rank, told before the step and counted in it."""
    program, model, params, _ = program_of(name)
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(20)), record=True)
    counted = [step(own(program, rank, params), rows(20)).timeline.peak for _ in range(2)]
    told = fpipe.sizes(program, model, params, rows(20), runtime="distributed").peak
    return [*counted, tuple(map(float, told))]


@pytest.mark.parametrize("name", ["one_f_one_b", "zbv", "skips, in order", "split backward", "recomputed"])
def test_each_process_holds_the_bytes_that_sizes_told(pair: Processes, name: str):
    for first, second, told in pair.each(held, name):
        assert first == second == told


def profiled(rank: int) -> list[Any]:
    costs: Any = fpipe.profile(*napping("gpipe", NAPS), repeats=1, runtime="distributed")
    return [costs.forward, costs.backward, costs.backward_weight, costs.transfer]


def test_a_profile_of_all_ranks_is_the_same_on_all(pair: Processes):
    first, second = pair.each(profiled)
    assert first == second
    assert all(least <= found for least, found in zip(NAPS, first[0], strict=True))
    assert first[0][0] < first[0][1]
    assert first[3] >= 0  # of so little two busy cores measure nothing at times


def on_a_mesh(rank: int, names: tuple[str, str]) -> list[Any]:
    """Two pipelines of two ranks each, beside one another: on a dimension "dp" they seem meant as replicas."""
    beside = names[names[0] == "pp"]
    words = "dimension 'dp' of the mesh has 2 processes, and the program no replicas along it: each trains apart."
    told = pytest.warns(UserWarning, match=words) if beside == "dp" else nullcontext()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    place, batch = mesh.get_local_rank("pp"), rows(10 + 2 * mesh.get_local_rank(beside))
    with told:
        program, alone, step, params = built(mesh=mesh)
    found, whole = step(own(program, place, params), batch), alone(params, batch)
    norm, expected = fpipe.global_norm(found.grads, mesh=mesh), fpipe.global_norm(whole.grads)
    with pytest.raises(ValueError, match=f"the gradients of stage {1 - place} are on another rank"):
        fpipe.global_norm(found.grads)
    return [*differs(place, program, found, whole), *(["norm"] * (not torch.equal(norm, expected)))]


def without_pp(rank: int) -> list[str]:
    """A mesh without names is none, rather than one whose first dimension is taken for the ranks; nor is a group."""
    meshes = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), init_device_mesh("cpu", (2, 2)), dist.group.WORLD
    return [timed(lambda mesh=mesh: built(mesh=mesh))[0] for mesh in meshes]


def test_the_dimension_pp_of_a_mesh_has_the_ranks(four: Processes):
    for names in (("dp", "pp"), ("pp", "pairs")):
        assert four.each(on_a_mesh, names) == [[]] * 4
    for said in four.each(without_pp):
        assert "the program has ranks along dimension 'pp' of a mesh, and the mesh has dp. Say mesh=init" in said[0]
        assert "the program has ranks along dimension 'pp' of a mesh, and the mesh has none with a name." in said[1]
        assert "mesh is a DeviceMesh whose dimension 'pp' has a process for each rank; found ProcessGroup." in said[2]


def other_rows(rank: int) -> list[Any]:
    """A step for other rows is lowered again, on all ranks at once."""
    program, alone, step, params = built()
    mine = own(program, rank, params)
    found = [differs(rank, program, step(mine, rows(n)), alone(params, rows(n))) for n in (10, 7, 10)]
    side = (None, rows()[1]) if rank else (rows()[0], None)  # each rank with what it reads
    return [*found, differs(rank, program, step(mine, side), alone(params, rows()))]


def test_a_batch_of_another_size(pair: Processes):
    assert pair.each(other_rows) == [[[]] * 4] * 2


def written(how: str) -> fpipe.Model:
    """A model in which one thing may be another than usual."""
    act, loss = torch.relu if how == "activation" else torch.tanh, nn.functional.l1_loss if how == "loss" else MSE
    held = torch.full((8,), 3.0 if how == "tensor" else 2.0)
    return fpipe.from_functions([lambda p, x: act(x @ p["w"]), lambda p, x: x @ p["w"] + held], loss)


def refused(rank: int, how: str) -> str:
    odd = how if rank else ""
    if how == "untraceable":
        model, params = fpipe.from_functions([lambda p, x: x * (1 / x.sum().item())] * 2, MSE), ({}, {})
    else:
        model, params = written(odd), ({"w": torch.eye(8)},) * 2
    schedule = fpipe.schedules.one_f_one_b(2) if odd == "program" else fpipe.schedules.gpipe(1 if how == "size" else 2)
    program, example = chained(model, schedule), (params, rows(12 if odd == "example" else 10))
    try:
        with pytest.MonkeyPatch.context() as patch:
            if odd == "torch":
                patch.setattr(torch, "__version__", "2.12.9")
            torch.set_default_dtype(torch.float64 if odd == "settings" else torch.float32)
            step = fpipe.build(program, model, runtime="distributed", example=example, record=odd == "options")
        given = rows(12 + rank if how == "rows" else 10)
        step(own(program, rank, params), given, key=rank if how == "key" else None)
    except ValueError as error:
        return str(error)
    finally:
        torch.set_default_dtype(torch.float32)
    return "nothing"


ROWS = "inputs: float32[{}, 8] with strides [8, 1] instead of inputs: float32[{}, 8] with strides [8, 1]"
REFUSED = {
    "size": "the program has 1 rank and the process group 2 processes",
    "program": "program: dx[1,0] g[1,0] = B[1,0] params[1] res[1,0] w[1,0] @ 1 instead of x[0,2] = SPLIT[0,2] inputs",
    "torch": f"torch: 2.12.9 instead of {torch.__version__}",
    "settings": "settings: default dtype torch.float64 instead of default dtype torch.float32",
    "options": "options: trace=True, compile=False, record=True, check_finite=False, loss_scale=1.0, donate=False",
    "example": f"example: {ROWS.format(12, 10)}",
    "activation": "stage 0: op 1: aten.relu.default(%0) instead of op 1: aten.tanh.default(%0)",
    "loss": "loss: op 0: aten.sub.Tensor(x[0], target[0]) instead of op 0: aten.mse_loss.default(x[0], target[0])",
    "tensor": "tensors held by stage 1: float32[8]: 3.0, 3.0, 3.0, 3.0, .. (hash ",
    "key": "key: 1 instead of 0",
    "rows": f"arguments: {ROWS.format(13, 12)}",
    "untraceable": ", in <lambda>: model, params = fpipe.from_functions([lambda p, x: x * (1 / x.sum().item())] * 2",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_ranks_must_agree_on_is_refused_on_all(pair: Processes, how: str):
    among = how not in ("size", "untraceable")
    for rank, said in enumerate(pair.each(refused, how)):
        assert said.startswith("rank 1 differs from rank 0 in its " + REFUSED[how] if among else "")
        assert f". This is rank {rank}; all ranks come to " in said if among else REFUSED[how] in said


def keyed(rank: int) -> list[str]:
    """Three steps; in the last one the ranks have other keys."""
    model, params, _ = fpipe.from_sequential(nn.Sequential(nn.Dropout(), nn.Linear(8, 8)), stages=2, loss=MSE)
    program = chained(model, fpipe.schedules.gpipe(2))
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    keys = 1, 10**400, 253 * rank
    return [timed(lambda key=key: step(own(program, rank, params), rows(), key=key))[0] for key in keys]


def test_other_keys_in_a_later_step_are_refused_on_all(pair: Processes):
    """The loss was neither that of one key nor that of the other, and nobody said so."""
    for told in pair.each(keyed):
        assert told[:2] == ["worked"] * 2
        assert re.match(r"RankError: rank . has key (0|253) in this step and rank . has key (0|253)\. All", told[2])


def test_without_a_process_group_it_says_so():
    with pytest.raises(ValueError, match="init_process_group"):
        built()
    model = written("")
    with pytest.raises(ValueError, match="are of runtime='distributed'"):
        fpipe.build(fpipe.program(model), model, timeout=3)


def infinite(rank: int) -> tuple[str, bool]:
    """NaN in one microbatch: both ranks end with the op that wrote it."""
    program, alone, step, params = built(check_finite=True)
    mine, whole, (x, target) = own(program, rank, params), alone(params, rows()), rows()
    assert not differs(rank, program, step(mine, rows()), whole)
    target[5] = torch.nan
    said, took = timed(lambda: step(mine, (x, target)))
    return said, took < SOON


def test_nan_in_one_microbatch_ends_all_ranks(pair: Processes):
    first, second = pair.each(infinite)
    said = "SPLIT(t[1,1]) wrote t[1,1] with NaN or infinite numbers."
    where = "in SPLIT(t[1,1]): stage 1 (1), microbatch 1, rank 1"
    assert second == (f"FloatingPointError: {said}", True)
    assert first == (f"RankError: rank 1 failed {where}: FloatingPointError: {said}", True)


TROUBLE: dict[str, Any] = {"what": None}


@torch.library.custom_op("fpipe_tests::trouble", mutates_args=())
def trouble(x: Tensor) -> Tensor:
    """What a trace keeps as one op, and is called in each step."""
    if TROUBLE["what"] is not None and x[0, 0] > 100:
        what, TROUBLE["what"] = TROUBLE["what"], None
        what()
    return x.clone()


trouble.register_fake(lambda x: torch.empty_like(x))
trouble.register_autograd(lambda ctx, dy: dy)


def troubled(ranks: int = 0, *more: Any) -> tuple[fpipe.Program, fpipe.Model, Any, Any]:
    def stage(p: Any, x: Tensor) -> Tensor:
        return trouble(x @ p["w"])

    ranks = ranks or dist.get_world_size()
    model = fpipe.from_functions([stage] * ranks, MSE)
    params = tuple({"w": torch.eye(4)} for _ in range(ranks))
    program = fpipe.chain(*more)(chained(model, fpipe.schedules.one_f_one_b(ranks), microbatches=6))
    return program, model, params, (torch.arange(24.0).reshape(6, 4) * 10, torch.zeros(6, 4))


def kill() -> None:
    os.kill(os.getpid(), 9)


def hang() -> None:
    time.sleep(60)


def hang_in_c() -> None:
    """With the lock that Python holds, so that no other thread of the process runs either."""
    ctypes.PyDLL(None).sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raising(words: str = "out of memory") -> None:
    raise MemoryError(words)


def one_in_trouble(
    rank: int, who: int, what: Any, timeout: float | None, replicas: tuple[int, int] | None = None
) -> list[Any]:
    """What a step of each rank ends in, and how soon, and the next step."""
    mesh = replicas and init_device_mesh("cpu", replicas, mesh_dim_names=("dp", "pp"))
    program, model, params, batch = troubled(replicas[1], fpipe.data_parallel()) if replicas else troubled()
    mine = own(program, mesh.get_local_rank("pp") if mesh else rank, params)
    for limit in (None, timeout) if timeout else (None,):  # what is traced already takes no time of the others
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch), timeout=limit)
        step(mine, batch)
    TROUBLE["what"] = what if rank == who else None
    return [*timed(lambda: step(mine, batch)), *timed(lambda: step(mine, batch))]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_what_an_op_raises_is_told_on_every_rank_and_ends_the_run(trio: Processes, who: int):
    for rank, told in enumerate(trio.each(one_in_trouble, who, raising, None)):
        over = "RankError: the run is over, start all ranks again from a checkpoint"
        assert told[2].startswith(f"{over}: rank {who} failed in {who}F3: stage {who} (stage), microbatch 3")
        assert told[1] < SOON
        if rank == who:
            assert told[0] == "MemoryError: out of memory"
        else:
            assert told[0].startswith(f"RankError: rank {who} failed in {who}F3: stage {who} (stage), microbatch 3")


def kill_late() -> None:
    """When all others could see where this rank is."""
    time.sleep(1)
    kill()


def test_a_rank_that_is_killed_is_named_by_all_others_with_its_op():
    hows = (kill, kill_late, kill)
    with beside_each_other(3, 3) as groups:
        for who, (three, how) in enumerate(zip(groups, hows, strict=True)):
            three.start(one_in_trouble, who, how, None)
        for who, (three, how) in enumerate(zip(groups, hows, strict=True)):
            results = three.results()
            assert results.pop(who) is None
            for told in results:
                assert told[0].startswith(f"RankError: rank {who} is gone")
                assert how is kill or told[0].endswith(f"; it was last seen in its {who}F3 of step 2")
                assert told[1] < SOON + (how is kill_late)
                assert "start all ranks again" in told[2]
            three.all[who].join(SOON)  # the others may know of it first
            assert three.all[who].exitcode == -9
    assert not any(one.is_alive() for three in groups for one in three.all)


def test_a_rank_that_hangs_is_named_by_all_others_in_time_with_its_op():
    hows = (hang, hang_in_c, stop)
    with beside_each_other(3, 3) as groups:
        for who, (three, how) in enumerate(zip(groups, hows, strict=True)):
            three.start(one_in_trouble, who, how, 2.0)
        for who, (three, how) in enumerate(zip(groups, hows, strict=True)):
            for told in [result(pipe) for rank, pipe in enumerate(three.pipes) if rank != who]:
                assert told[0].startswith(f"RankError: rank {who} did not send what its {who}")
                assert how is not hang or told[0].endswith(f"; it was last seen in its {who}F3 of step 2")
                assert told[1] < 2 + SOON
            three.all[who].kill()


def two_hundred(rank: int) -> list[int]:
    """How many more tensors, threads and files there are after so many steps; threads and files without the step."""
    program, model, params, batch = troubled()
    fpipe.build(program, model, runtime="distributed", example=(params, batch))  # a group keeps its connections
    without = counted()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch))
    for number in range(200):
        if number == 100:
            before = counted()
        step(own(program, rank, params), batch)
    more = left(counted, before)
    del step
    return more + left(lambda: counted()[1:], without[1:])


def test_two_hundred_steps_leave_nothing_behind(pair: Processes):
    assert pair.each(two_hundred) == [[0] * 5] * 2


LEAVES = {
    "dense": torch.arange(6.0).reshape(2, 3),
    "other order": torch.arange(6.0).reshape(2, 3).t(),
    "behind another": torch.arange(9.0)[5:],
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "bool": torch.tensor([True, False, True]),
    "half": torch.arange(5.0).bfloat16(),
    "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "expanded": torch.arange(3.0).expand(2, 3),
    "a column": torch.arange(8.0).reshape(4, 2)[:, 1],
    "real part": torch.tensor([1 + 2j, 3 - 1j]).real,
    "with gaps": torch.arange(12.0).reshape(3, 4)[:, :2],
    "one": torch.ones(1, 8).as_strided((1, 8), (3, 1)),
}


@pytest.mark.parametrize("room", [0, 64])
def test_what_is_packed_is_unpacked_with_its_strides(room: int):
    """One after the other, each of another dtype and size, and in a message with more room than it needs."""
    known = [fact_of_tensor(leaf, {}) for leaf in LEAVES.values()]
    layout = Layout([None, *known, 7], torch.device("cpu"))
    message = layout.pack([None, *LEAVES.values(), 7], header_of_step(1, 1, None), layout.size + room)
    assert message.numel() == layout.size + room
    found = layout.unpack(message)
    assert [found[0], found[-1]] == [None, 7]
    for leaf, one in zip(LEAVES.values(), found[1:-1], strict=True):
        assert torch.equal(one, leaf)
        assert one.stride() == leaf.stride()
        assert one.data_ptr() % 64 == 0
