"""One process for each rank gives the bits of a single process, and errors name the rank and op to blame."""

import ctypes
import os
import re
import signal
import time
import warnings
from functools import cache, partial
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
from tests.processes import SOON, Processes, count_resources, receive_answer, settled_growth, several_groups, time_call
from tests.test_profile import NAPS, napping

MSE = nn.functional.mse_loss


def blocks(count: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def rows(count: int = 10, width: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, width), torch.randn(count, width)


def pipeline_program(model: fpipe.Model | int, schedule: Any, *transforms: Any, microbatches: int = 4) -> fpipe.Program:
    return fpipe.chain(fpipe.split(microbatches), *transforms, schedule, fpipe.merge())(fpipe.program(model))


@cache
def cut_blocks(count: int, stages: int) -> tuple[fpipe.Model, Any, Any]:
    """Cut a net of blocks, whose traces all tests of a process share."""
    return fpipe.from_sequential(blocks(count), stages=stages, loss=MSE)


def build_blocks(stages: int = 2, schedule: str = "one_f_one_b", **options: Any) -> tuple[fpipe.Program, Any, Any, Any]:
    """Return a program with one rank a stage, its step in one process, its distributed step, and the parameters."""
    model, params, _ = cut_blocks(stages, stages)
    program = pipeline_program(model, fpipe.schedules.get(schedule)(stages))
    step = fpipe.build(program, model, runtime="distributed", **{"example": (params, rows())} | options)
    return program, fpipe.build(program, model), step, params


def local_part(program: fpipe.Program, rank: int, per_stage: Any) -> tuple[Any, ...]:
    """Return the entries of a tuple over stages that belong to this rank."""
    return fpipe.local_params(program, per_stage, rank)


def differing_fields(rank: int, program: fpipe.Program, result: fpipe.Result, reference: fpipe.Result) -> list[str]:
    """Name the results of a rank that differ from those of one process; results owned by another rank are None."""
    pairs = {"grads": (result.grads, local_part(program, rank, reference.grads))}
    pairs["state"] = (result.state, None if reference.state is None else local_part(program, rank, reference.state))
    homes = {end.name.name: rank in end.homes for end in program.outputs}
    homes["loss"] |= rank == 0 and not isinstance(reference.loss, tuple)
    for name in ("loss", "outputs"):
        actual_value = getattr(result, name)
        if name == "loss" and not homes[name]:  # it was None, and the first print failed on one rank alone
            assert isinstance(actual_value, RemoteLoss)
            actual_value = None
        pairs[name] = actual_value, getattr(reference, name) if homes[name] else None
    return [name for name, (actual, expected) in pairs.items() if not is_equal_tree(actual, expected)]


def is_equal_tree(actual: Any, expected: Any) -> bool:
    """Whether all leaves have the expected bits and strides; a stage without a trace has zeros for no gradient."""
    actual_leaves, expected_leaves = leaves(actual), leaves(expected)
    if len(actual_leaves) != len(expected_leaves):
        return False
    pairs = [
        (x, torch.zeros_like(x) if y is None and isinstance(x, Tensor) else y)
        for x, y in zip(actual_leaves, expected_leaves, strict=True)
    ]
    return all(torch.equal(x, y) and x.stride() == y.stride() if isinstance(x, Tensor) else x is y for x, y in pairs)


def compare_with_one_process(
    rank: int, program: fpipe.Program, model: fpipe.Model, params: Any, batch: Any, *, steps: int = 2, **options: Any
) -> list[str]:
    """Name what differs after some steps between this rank and one process that runs all ranks."""
    state, key = options.get("state"), options.get("key")
    example = (params, batch) if state is None else (params, batch, state)
    plain_step = fpipe.build(program, model)
    step = fpipe.build(program, model, runtime="distributed", example=tree_map(to_meta, example))
    local_params = local_part(program, rank, params)
    for _ in range(steps):
        reference = plain_step(params, batch, state=state, key=key)
        result = step(local_params, batch, state=None if state is None else local_part(program, rank, state), key=key)
        state = reference.state
    return differing_fields(rank, program, result, reference)


def to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def skip_model() -> tuple[fpipe.Model, Any, None]:
    """Return a model with skips, a tie, None, an int, a mask, an expanded activation and a cotangent of stride 0."""

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


def norm_model() -> tuple[fpipe.Model, Any, Any]:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(2)]
    return fpipe.from_sequential(nn.Sequential(*layers), stages=2, loss=MSE)


def vocabulary_model() -> tuple[fpipe.Model, Any, None]:
    """Return a model of 11 words in shards of 6 and 5 rows; the label of a row is how many of its entries are large."""
    body = fpipe.from_functions([lambda p, x: torch.tanh(x @ p["w"])], MSE)
    model = fpipe.spread_vocabulary(body, 2, vocabulary=11, labels=lambda x: (x > 0).sum(-1))
    torch.manual_seed(4)
    return model, ({"w": torch.randn(8, 8)}, *({"weight": torch.randn(size, 8)} for size in (6, 5)), {}), None


in_two, in_four = (partial(cut_blocks, 4, stages) for stages in (2, 4))
IN_ORDER = fpipe.schedules.from_table("0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2 \n 1F0 1F1 1F2 1B0 1B1 1B2")
OUT_OF_ORDER = fpipe.schedules.from_table("0F2 0F0 0F1 2F0 2F2 2F1 2B1 2B2 2B0 0B1 0B2 0B0 \n 1F2 1F0 1F1 1B2 1B0 1B1")
SPREAD = [0, 0, 1, 1]
PROGRAMS: dict[str, tuple[Any, ...]] = {
    **{name: (in_two, fpipe.schedules.get(name)(2)) for name in ("gpipe", "one_f_one_b", "dualpipe", "chimera")},
    **{name: (in_four, fpipe.schedules.get(name)(2)) for name in ("interleaved", "zbv", "dualpipev", "hanayo")},
    "interleaved_zb": (in_four, fpipe.schedules.interleaved_zb(2)),
    "weights of a host rank": (in_four, fpipe.schedules.roundpipe(2)),
    "norms and dropout": (norm_model, fpipe.schedules.zb_h1(2)),
    "skips, in order": (skip_model, IN_ORDER),
    "skips, out of order": (skip_model, OUT_OF_ORDER),
    "skips, recomputed": (skip_model, fpipe.checkpoint("always"), IN_ORDER),
    "offloaded to the host": (in_four, fpipe.schedules.zbv(2), fpipe.offload()),
    "offloaded to a rank": (in_four, fpipe.schedules.zbv(2), fpipe.offload(destination=lambda rank: 1 - rank)),
    "spread vocabulary": (
        vocabulary_model,
        fpipe.schedules.from_priority(lambda op, now: op.kind, 2, placement=SPREAD),
    ),
    "split backward": (in_two, fpipe.split_backward(), fpipe.schedules.one_f_one_b(2)),
    "recomputed": (in_four, fpipe.checkpoint("always"), fpipe.schedules.interleaved(2)),
}


def named_program(name: str) -> tuple[fpipe.Program, fpipe.Model, Any, Any]:
    make, *transforms = PROGRAMS[name]
    model, params, state = make()
    program = fpipe.chain(fpipe.split(3 if make is skip_model else 4), *transforms, fpipe.merge())(fpipe.program(model))
    return program, model, params, state


def compare_named_program(rank: int, name: str) -> list[str]:
    program, model, params, state = named_program(name)
    return compare_with_one_process(rank, program, model, params, rows(), state=state, key=7 if state else None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_give_the_bits_of_one_process(request: pytest.FixtureRequest, name: str):
    """Values of every kind arrive unchanged, also after a wait on a host."""
    processes = request.getfixturevalue("trio" if "host rank" in name else "pair")
    assert not any(processes.run(compare_named_program, name))


def record_timeline(rank: int) -> list[Any]:
    """Record a timeline on all ranks: late reads, equal ops, peaks and makespan."""
    model, params, _ = fpipe.from_sequential(blocks(4, 64), stages=2, loss=MSE)
    program, batch = pipeline_program(model, fpipe.schedules.one_f_one_b(2)), rows(64, 64)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), record=True)
    plain_timeline = fpipe.build(program, model, record=True)(params, batch).timeline
    for _ in range(2):
        timeline = step(local_part(program, rank, params), batch).timeline
    times = {op: (start, end) for op, start, end in timeline.events}
    sources = zip(program.ops, program.sources, strict=True)
    pairs = [(op, program.ops[source]) for op, reads in sources for source in reads if source >= 0]
    late_ops = [str(op) for op, writer in pairs if {op, writer} <= times.keys() and times[writer][0] > times[op][1]]
    assert "rank 1" in fpipe.plot(timeline)
    return [late_ops, set(times) == {op for op, _, _ in plain_timeline.events}, timeline.peak, timeline.makespan]


def test_all_ranks_get_one_timeline(pair: Processes):
    rank_0, rank_1 = pair.run(record_timeline)
    assert rank_0[0] == rank_1[0] == []  # no value is read before it is written
    assert rank_0[1:] == rank_1[1:]
    assert rank_0[1]
    assert all(peak > 0 for peak in rank_0[2])


def peak_bytes(rank: int, name: str) -> list[Any]:
    """Return the peak bytes of each rank, recorded in two steps and predicted before them."""
    program, model, params, _ = named_program(name)
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(20)), record=True)
    recorded_peaks = [step(local_part(program, rank, params), rows(20)).timeline.peak for _ in range(2)]
    predicted_peak = fpipe.sizes(program, model, params, rows(20), runtime="distributed").peak
    return [*recorded_peaks, tuple(map(float, predicted_peak))]


@pytest.mark.parametrize("name", ["one_f_one_b", "zbv", "skips, in order", "split backward", "recomputed"])
def test_each_process_holds_the_bytes_that_sizes_predicts(pair: Processes, name: str):
    for first_peak, second_peak, predicted in pair.run(peak_bytes, name):
        assert first_peak == second_peak == predicted


def profile_costs(rank: int) -> list[Any]:
    costs: Any = fpipe.profile(*napping("gpipe", NAPS), repeats=1, runtime="distributed")
    return [costs.forward, costs.backward, costs.backward_weight, costs.transfer]


def test_all_ranks_get_the_same_profile(pair: Processes):
    costs, other_costs = pair.run(profile_costs)
    assert costs == other_costs
    assert all(least_seconds <= seconds for least_seconds, seconds in zip(NAPS, costs[0], strict=True))
    assert costs[0][0] < costs[0][1]
    assert costs[3] >= 0  # of so little two busy cores measure nothing at times


def step_on_mesh(rank: int, names: tuple[str, str]) -> tuple[list[Any], list[str]]:
    """Run two pipelines of two ranks next to each other; return what differs, and warnings."""
    other_dim = names[names[0] == "pp"]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    pp_rank, batch = mesh.get_local_rank("pp"), rows(10 + 2 * mesh.get_local_rank(other_dim))
    with warnings.catch_warnings(record=True, action="always") as caught:
        program, plain_step, step, params = build_blocks(mesh=mesh)
    result, reference = step(local_part(program, pp_rank, params), batch), plain_step(params, batch)
    norm, expected = fpipe.global_norm(result.grads, mesh=mesh), fpipe.global_norm(reference.grads)
    with pytest.raises(ValueError, match=f"the gradients of stage {1 - pp_rank} are on another rank"):
        fpipe.global_norm(result.grads)
    differences = differing_fields(pp_rank, program, result, reference)
    return differences + ["norm"] * (not torch.equal(norm, expected)), [str(warning.message) for warning in caught]


def refusals_without_pp(rank: int) -> list[str]:
    """Return why two meshes and a group are refused: without a dimension "pp" nothing says which ranks are stages."""
    meshes = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), init_device_mesh("cpu", (2, 2)), dist.group.WORLD
    return [time_call(lambda mesh=mesh: build_blocks(mesh=mesh))[0] for mesh in meshes]


def test_the_dimension_pp_of_a_mesh_has_the_ranks(four: Processes):
    for names in (("dp", "pp"), ("pp", "pairs")):
        results = four.run(step_on_mesh, names)
        assert [differences for differences, _ in results] == [[]] * 4
        # A dimension "dp" looks like one of replicas. Of four ranks one says so.
        messages = [message for _, messages in results for message in messages]
        assert len(messages) == ("dp" in names)
        assert all(
            "'dp' of the mesh has 2 processes, and the program no replicas along it" in text for text in messages
        )
    for errors in four.run(refusals_without_pp):
        assert "the program has ranks along dimension 'pp' of a mesh, and the mesh has dp. Say mesh=init" in errors[0]
        assert "the program has ranks along dimension 'pp' of a mesh, and the mesh has none with a name." in errors[1]
        assert "mesh is a DeviceMesh whose dimension 'pp' has a process for each rank; found ProcessGroup." in errors[2]


def steps_of_other_sizes(rank: int) -> list[Any]:
    """Run batches of other sizes, for which all ranks lower the step again at once."""
    program, plain_step, step, params = build_blocks()
    local_params = local_part(program, rank, params)
    batches = [(rows(count), rows(count)) for count in (10, 7, 10)]
    batches += [((None, rows()[1]) if rank else (rows()[0], None), rows())]  # each rank is handed only what it reads
    return [
        differing_fields(rank, program, step(local_params, local_batch), plain_step(params, batch))
        for local_batch, batch in batches
    ]


def test_a_batch_of_another_size_gives_the_bits_of_one_process(pair: Processes):
    assert pair.run(steps_of_other_sizes) == [[[]] * 4] * 2


def model_with(difference: str) -> fpipe.Model:
    """Return a model that differs in one respect from the usual one."""
    act, loss = (
        torch.relu if difference == "activation" else torch.tanh,
        nn.functional.l1_loss if difference == "loss" else MSE,
    )
    offset = torch.full((8,), 3.0 if difference == "tensor" else 2.0)
    return fpipe.from_functions([lambda p, x: act(x @ p["w"]), lambda p, x: x @ p["w"] + offset], loss)


def refusal_of(rank: int, difference: str) -> str:
    changed = difference if rank else ""
    if difference == "untraceable":
        model, params = fpipe.from_functions([lambda p, x: x * (1 / x.sum().item())] * 2, MSE), ({}, {})
    else:
        model, params = model_with(changed), ({"w": torch.eye(8)},) * 2
    ranks = 1 if difference == "size" else 2
    schedule = fpipe.schedules.one_f_one_b(2) if changed == "program" else fpipe.schedules.gpipe(ranks)
    program, example = pipeline_program(model, schedule), (params, rows(12 if changed == "example" else 10))
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if changed == "torch":
                monkeypatch.setattr(torch, "__version__", "2.12.9")
            torch.set_default_dtype(torch.float64 if changed == "settings" else torch.float32)
            step = fpipe.build(program, model, runtime="distributed", example=example, record=changed == "options")
        batch = rows(12 + rank if difference == "rows" else 10)
        step(local_part(program, rank, params), batch, key=rank if difference == "key" else None)
    except ValueError as error:
        return str(error)
    finally:
        torch.set_default_dtype(torch.float32)
    return "nothing"


ROWS = "inputs: float32[{}, 8] with strides [8, 1] instead of inputs: float32[{}, 8] with strides [8, 1]"
MISMATCHES = {
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


@pytest.mark.parametrize("difference", MISMATCHES)
def test_a_difference_between_ranks_is_refused_on_all_of_them(pair: Processes, difference: str):
    is_mismatch = difference not in ("size", "untraceable")
    for rank, message in enumerate(pair.run(refusal_of, difference)):
        assert message.startswith("rank 1 differs from rank 0 in its " + MISMATCHES[difference] if is_mismatch else "")
        assert (f". This is rank {rank}; all ranks come to " if is_mismatch else MISMATCHES[difference]) in message


def steps_with_keys(rank: int) -> list[str]:
    """Run three steps; in the last one the ranks have different keys."""
    model, params, _ = fpipe.from_sequential(nn.Sequential(nn.Dropout(), nn.Linear(8, 8)), stages=2, loss=MSE)
    program = pipeline_program(model, fpipe.schedules.gpipe(2))
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows()))
    keys = 1, 10**400, 253 * rank
    return [time_call(lambda key=key: step(local_part(program, rank, params), rows(), key=key))[0] for key in keys]


def test_keys_that_differ_between_ranks_are_refused_on_all_of_them(pair: Processes):
    """Used to pass in silence, with a loss that was of neither key."""
    for outcomes in pair.run(steps_with_keys):
        assert outcomes[:2] == ["worked"] * 2
        assert re.match(r"RankError: rank . has key (0|253) in this step and rank . has key (0|253)\. All", outcomes[2])


def test_a_build_without_a_process_group_is_refused():
    with pytest.raises(ValueError, match="init_process_group"):
        build_blocks()
    model = model_with("")
    with pytest.raises(ValueError, match="are of runtime='distributed'"):
        fpipe.build(fpipe.program(model), model, timeout=3)


def step_on_nan(rank: int) -> tuple[str, bool]:
    """Run a step with NaN in one microbatch, after one without."""
    program, plain_step, step, params = build_blocks(check_finite=True)
    local_params, reference, (x, target) = (local_part(program, rank, params), plain_step(params, rows()), rows())
    assert not differing_fields(rank, program, step(local_params, rows()), reference)
    target[5] = torch.nan
    message, seconds = time_call(lambda: step(local_params, (x, target)))
    return message, seconds < SOON


def test_nan_in_one_microbatch_ends_all_ranks(pair: Processes):
    rank_0_outcome, rank_1_outcome = pair.run(step_on_nan)
    message = "SPLIT(t[1,1]) wrote t[1,1] with NaN or infinite numbers."
    place_of_op = "in SPLIT(t[1,1]): stage 1 (1), microbatch 1, rank 1"
    assert rank_1_outcome == (f"FloatingPointError: {message}", True)
    assert rank_0_outcome == (f"RankError: rank 1 failed {place_of_op}: FloatingPointError: {message}", True)


TROUBLE: dict[str, Any] = {"what": None}


@torch.library.custom_op("fpipe_tests::trouble", mutates_args=())
def trouble(x: Tensor) -> Tensor:
    """Call the planned action once; an opaque op, which a trace keeps and calls in each step."""
    if TROUBLE["what"] is not None and x[0, 0] > 100:
        action, TROUBLE["what"] = TROUBLE["what"], None
        action()
    return x.clone()


trouble.register_fake(lambda x: torch.empty_like(x))
trouble.register_autograd(lambda ctx, dy: dy)


def trouble_program(ranks: int = 0, *transforms: Any) -> tuple[fpipe.Program, fpipe.Model, Any, Any]:
    def stage(p: Any, x: Tensor) -> Tensor:
        return trouble(x @ p["w"])

    ranks = ranks or dist.get_world_size()
    model = fpipe.from_functions([stage] * ranks, MSE)
    params = tuple({"w": torch.eye(4)} for _ in range(ranks))
    program = fpipe.chain(*transforms)(pipeline_program(model, fpipe.schedules.one_f_one_b(ranks), microbatches=6))
    return program, model, params, (torch.arange(24.0).reshape(6, 4) * 10, torch.zeros(6, 4))


def kill() -> None:
    os.kill(os.getpid(), 9)


def hang() -> None:
    time.sleep(60)


def hang_in_c() -> None:
    """Sleep while holding the GIL, so that no other thread of the process runs either."""
    ctypes.PyDLL(None).sleep(60)


def suspend() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_memory_error(message: str = "out of memory") -> None:
    raise MemoryError(message)


def fail_on_one_rank(
    rank: int, culprit: int, action: Any, timeout: float | None, replicas: tuple[int, int] | None = None
) -> list[Any]:
    """Return the outcome and seconds of a step in which one rank fails, and of the next step."""
    mesh = replicas and init_device_mesh("cpu", replicas, mesh_dim_names=("dp", "pp"))
    program, model, params, batch = (
        trouble_program(replicas[1], fpipe.data_parallel()) if replicas else trouble_program()
    )
    local_params = local_part(program, mesh.get_local_rank("pp") if mesh else rank, params)
    # Traces are cached, so the second build, with the timeout, costs the other ranks no time.
    for limit in (None, timeout) if timeout else (None,):
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch), timeout=limit)
        step(local_params, batch)
    TROUBLE["what"] = action if rank == culprit else None
    return [*time_call(lambda: step(local_params, batch)), *time_call(lambda: step(local_params, batch))]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_error_in_an_op_ends_the_run_on_every_rank(trio: Processes, culprit: int):
    for rank, outcome in enumerate(trio.run(fail_on_one_rank, culprit, raise_memory_error, None)):
        failure = f"rank {culprit} failed in {culprit}F3: stage {culprit} (stage), microbatch 3"
        assert outcome[2].startswith(f"RankError: the run is over, start all ranks again from a checkpoint: {failure}")
        assert outcome[1] < SOON
        if rank == culprit:
            assert outcome[0] == "MemoryError: out of memory"
        else:
            assert outcome[0].startswith(f"RankError: {failure}")


def kill_late() -> None:
    """Kill this process after all ranks could see its position."""
    time.sleep(1)
    kill()


def test_all_other_ranks_name_a_killed_rank_and_its_op():
    actions = (kill, kill_late, kill)
    with several_groups(3, 3) as groups:
        for culprit, (processes, action) in enumerate(zip(groups, actions, strict=True)):
            processes.start(fail_on_one_rank, culprit, action, None)
        for culprit, (processes, action) in enumerate(zip(groups, actions, strict=True)):
            results = processes.results()
            assert results.pop(culprit) is None
            for outcome in results:
                assert outcome[0].startswith(f"RankError: rank {culprit} is gone")
                assert action is kill or outcome[0].endswith(f"; it was last seen in its {culprit}F3 of step 2")
                assert outcome[1] < SOON + (action is kill_late)
                assert "start all ranks again" in outcome[2]
            processes.all[culprit].join(SOON)  # the other ranks may notice the death before the parent does
            assert processes.all[culprit].exitcode == -9
    assert not any(process.is_alive() for processes in groups for process in processes.all)


def test_all_other_ranks_name_a_hanging_rank_and_its_op_in_time():
    actions = (hang, hang_in_c, suspend)
    with several_groups(3, 3) as groups:
        for culprit, (processes, action) in enumerate(zip(groups, actions, strict=True)):
            processes.start(fail_on_one_rank, culprit, action, 2.0)
        for culprit, (processes, action) in enumerate(zip(groups, actions, strict=True)):
            for outcome in [receive_answer(pipe) for rank, pipe in enumerate(processes.pipes) if rank != culprit]:
                assert outcome[0].startswith(f"RankError: rank {culprit} did not send what its {culprit}")
                assert action is not hang or outcome[0].endswith(f"; it was last seen in its {culprit}F3 of step 2")
                assert outcome[1] < 2 + SOON
            processes.all[culprit].kill()


def leaks_of_two_hundred_steps(rank: int) -> list[int]:
    """Count the tensors, threads and files that a hundred steps leave, and the threads and files that a step leaves."""
    program, model, params, batch = trouble_program()
    fpipe.build(program, model, runtime="distributed", example=(params, batch))  # a group keeps its connections
    counts_without_step = count_resources()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch))
    for step_number in range(200):
        if step_number == 100:
            counts_at_half = count_resources()
        step(local_part(program, rank, params), batch)
    leaks = settled_growth(count_resources, counts_at_half)
    del step
    return leaks + settled_growth(lambda: count_resources()[1:], counts_without_step[1:])


def test_two_hundred_steps_leak_no_tensors_threads_or_files(pair: Processes):
    assert pair.run(leaks_of_two_hundred_steps) == [[0] * 5] * 2


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
def test_unpacked_leaves_have_the_strides_of_the_packed_ones(room: int):
    """Leaves of all dtypes and sizes share one message, which may be longer than they need."""
    facts = [fact_of_tensor(leaf, {}) for leaf in LEAVES.values()]
    layout = Layout([None, *facts, 7], torch.device("cpu"))
    message = layout.pack([None, *LEAVES.values(), 7], header_of_step(1, 1, None), layout.size + room)
    assert message.numel() == layout.size + room
    unpacked = layout.unpack(message)
    assert [unpacked[0], unpacked[-1]] == [None, 7]
    for leaf, unpacked_leaf in zip(LEAVES.values(), unpacked[1:-1], strict=True):
        assert torch.equal(unpacked_leaf, leaf)
        assert unpacked_leaf.stride() == leaf.stride()
        assert unpacked_leaf.data_ptr() % 64 == 0
