"""Parameters that replicas share out: gathered before their use and scattered behind it, as the program says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fpipe
from tests.processes import Processes
from tests.refusals import refusals
from tests.test_data_parallel import by_hand, meshed, replicated, started
from tests.test_distributed import MSE, own, rows

POLICIES: dict[str, dict[str, Any]] = {
    "once a step": {},
    "each run": {"gather": "run"},
    "each use": {"gather": "use"},
    "each use, late": {"gather": "use", "lead": 0},
    "all forwards": {"gather": lambda op: op.kind == "F"},
    "each microbatch": {"scatter": "microbatch"},
}


def sharded(model: Any, policy: str = "once a step", schedule: str = "one_f_one_b", microbatches: int = 4) -> Any:
    merged = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.get(schedule)(2), fpipe.merge())
    return fpipe.shard(**POLICIES[policy])(merged(fpipe.program(model)))


def odd_net() -> nn.Sequential:
    """Rows that two replicas have not equally many of."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in ((8, 5), (5, 7), (7, 9), (9, 8))))


def unlike(grads: Any, expected: dict[str, Tensor]) -> list[str]:
    """The names of gradients that differ in a bit when they are put together."""
    made = {name: grad for stage in grads if stage is not None for name, grad in stage.items()}
    return [name for name, grad in made.items() if not torch.equal(grad.full_tensor(), expected[name])]


def test_collectives_have_a_lane_and_costs_of_their_own():
    program = sharded(2, "each use", "gpipe", 2)
    costs = fpipe.Costs(gather=[1, 0.5], scatter=2, offload=3)
    timeline = fpipe.simulate(program, costs)
    assert {costs.seconds(op) for op in program.ops if op.kind == "GATHER"} == {1, 0.5}
    assert timeline.makespan == fpipe.simulate(program).makespan + 1  # the first waits for its parameters
    assert timeline.delivered == timeline.makespan + 2
    assert "wire | " in str(fpipe.plot(timeline))


def after(*transforms: Any) -> object:
    return fpipe.chain(fpipe.split(4), *transforms)(fpipe.program(4))


def test_sizes_count_what_is_gathered_and_a_replicas_part_of_gradients():
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=MSE)
    batch, one = (torch.randn(4, 64), torch.randn(4, 64)), 64 * 64 * 4
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False))
    base = merged(fpipe.program(model))
    sizes = {
        name: fpipe.sizes(fpipe.shard(**how)(base), model, params, batch, replicas=2) for name, how in POLICIES.items()
    }
    peaks = {name: max(counted.peak) for name, counted in sizes.items()}
    whole = max(fpipe.sizes(fpipe.data_parallel()(base), model, params, batch).peak)
    assert peaks["once a step"] >= whole + one  # two stages gathered; in place of one whole sum a half
    assert peaks["each use, late"] < peaks["each use"] <= peaks["once a step"]
    assert sizes["once a step"].bytes[fpipe.Value("all", 0)] == one // 2
    assert sizes["once a step"].bytes[fpipe.Value("params", 0)] == one


def two_layers() -> tuple[Any, Any, fpipe.Program]:
    """A stage each for two layers of 8 x 8 weights, W apart from I, gathered for each use."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge(outputs=False))
    return model, params, fpipe.shard(gather="use")(merged(fpipe.program(model)))


def test_leaves_that_a_use_does_not_read_are_not_gathered_for_it():
    """A linear's W reads no weight, its I no bias, and the I of the first stage nothing."""
    model, params, program = two_layers()
    sizes = fpipe.sizes(program, model, params, rows(8), replicas=2)
    costs = fpipe.Costs(bytes=sizes, cluster="2 ranks; replicas 2 1s 1B/s")
    readers = {value: op for op in program.ops for value in op.reads if value.name == "params"}
    gathers = [(op, readers[op.writes[0]]) for op in program.ops if op.kind == "GATHER"]
    found = {(reader.kind, reader.stage): sizes.size(op.writes[0]) for op, reader in gathers}
    weight, bias = 8 * 8 * 4, 8 * 4
    both, none = dict.fromkeys([("F", 0), ("F", 1)], weight + bias), dict.fromkeys([("I", 0), ("W", 0), ("W", 1)], 0)
    assert found == both | none | {("I", 1): weight}
    times = {(reader.kind, reader.stage): costs.seconds(op) for op, reader in gathers}
    assert times == {use: 1 + size / 2 if size else 0 for use, size in found.items()}


def sent(rank: int) -> int:
    """Bytes of shards that this process sends for GATHERs in a step."""
    from fpipe.runtimes.processes import collective_parts

    _, replica, _ = meshed()
    model, params, program = two_layers()
    step, shards = started(model, params, program, rows(8))
    found, gathered = list[int](), collective_parts._all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_parts, "_all_gather", lambda *of: found.append(of[1].nbytes) or gathered(*of))
        step(shards, tuple(half + replica for half in rows(8)))
    return sum(found)


def test_and_are_not_sent(four: Processes):
    weight, bias = 8 * 8 * 4 // 2, 64  # a half each; what is in a buffer takes a multiple of 64 bytes
    assert four.each(sent) == [2 * (weight + bias), 2 * (weight + bias) + 2 * weight] * 2


@pytest.mark.parametrize(("reduce", "scatter"), [(None, 2), ("float32", 4), ("float64", 8)])
def test_times_are_of_the_bytes_of_casts(reduce: Any, scatter: int):
    """SCATTERs were timed by the bytes that they read."""
    model, params, _ = fpipe.from_sequential(odd_net(), stages=2, loss=MSE)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge(outputs=False))(fpipe.program(model))
    program = fpipe.shard(compute_dtype=torch.bfloat16, reduce_dtype=reduce)(merged)
    sizes = fpipe.sizes(program, model, params, rows(8), replicas=2)
    costs = fpipe.Costs(bytes=sizes, cluster="2 ranks; replicas 2 1B/s")
    numbers = sum(leaf.numel() for leaf in params[0].values())
    times = {op.kind: costs.seconds(op) for op in program.ops if op.kind in ("GATHER", "SCATTER") and op.stage == 0}
    assert times == {"GATHER": numbers * 2 / 2, "SCATTER": numbers * scatter / 2}


@pytest.mark.crossed
@pytest.mark.parametrize("policy", [*POLICIES, "none"])
@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_in_one_process_one_replica_has_the_whole(runtime: Any, policy: str):
    model, params, _ = fpipe.from_sequential(odd_net(), stages=2, loss=MSE)
    program = replicated(model, microbatches=4) if policy == "none" else sharded(model, policy)
    found = fpipe.build(program, model, runtime=runtime)(params, rows(8))
    expected = fpipe.reference(model, params, rows(8), microbatches=4)
    assert torch.equal(found.loss, expected.loss)
    assert all(map(torch.equal, fpipe.tree.leaves(found.grads), fpipe.tree.leaves(expected.grads)))
    assert fpipe.sizes(program, model, params, rows(8)) is not None


def test_a_sum_that_replicas_forget_is_found_in_lockstep():
    """One replica alone has every bit without it."""
    model, params, _ = fpipe.from_sequential(odd_net(), stages=2, loss=MSE)
    text = str(sharded(model, microbatches=2))
    text = text.replace("all_loss = REDUCE[1] loss {axis='dp'} @ 1\n", "").replace("loss = all_loss", "loss = loss")
    lost = fpipe.Program.parse(text)
    assert fpipe.verify(lost, model, params, rows(8)).bitwise
    with pytest.raises(fpipe.GradientMismatch, match="loss differs"):
        fpipe.verify(lost, model, params, rows(8), replicas=2)


def by_three(rank: int) -> list[str]:
    """Names of gradients that are not those of three replicas, added in their order."""
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "pp"))
    net, batches = odd_net(), [tuple(half.chunk(3)[one] for half in rows(24)) for one in range(3)]
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(1), fpipe.merge(outputs=False))
    program = fpipe.shard(gather="use")(merged(fpipe.program(model)))
    step, shards = started(model, params, program, batches[rank], mesh)
    return unlike(step(shards, batches[rank]).grads, by_hand(net, batches, 2)[1])


def test_gloo_adds_three_replicas_in_their_order():
    with Processes(3) as three:
        assert three.each(by_three) == [[]] * 3


def mixed(rank: int, scatter: Any) -> list[str]:
    """Stages compute in bfloat16, gradients are added over replicas in float32, as by hand."""
    _, replica, _ = meshed()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    ids, target = torch.randint(0, 11, (16,)), torch.randint(0, 5, (16,))
    model, params, _ = fpipe.from_sequential(whole, stages=2, loss=nn.functional.cross_entropy)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False))
    half = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    program = fpipe.shard(gather="use", scatter=scatter, **half)(merged(fpipe.program(model)))
    batches = [*zip(ids.chunk(2), target.chunk(2), strict=True)]
    step, shards = started(model, params, program, batches[0])
    found = step(shards, batches[replica]).grads
    net, grads = copy.deepcopy(whole).bfloat16(), {}
    parts = [
        torch.autograd.grad(nn.functional.cross_entropy(net(x), t) * 0.25, [*net.parameters()])
        for x, t in zip(ids.chunk(4), target.chunk(4), strict=True)  # two microbatches of each replica
    ]
    for (name, _), a, b, c, d in zip(net.named_parameters(), *parts, strict=True):
        by_step = (a + b).float() + (c + d).float()
        grads[name] = by_step if scatter == "step" else (a.float() + c.float()) + (b.float() + d.float())
    return unlike(found, grads)


@pytest.mark.parametrize("scatter", ["step", "microbatch"])
def test_stages_compute_in_one_dtype_and_replicas_add_in_another(four: Processes, scatter: str):
    assert four.each(mixed, scatter) == [[]] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_casts_are_part_of_the_program_and_of_its_proof(policy: str):
    def stage(p: Any, x: Tensor) -> Tensor:
        return torch.tanh((p["e"][x] if "e" in p else x) @ p["w"])

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.float(), target)

    params = {"e": torch.randn(11, 8), "w": torch.randn(8, 8)}, {"w": torch.randn(8, 11)}
    model, batch = fpipe.from_functions([stage] * 2, loss), (torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,)))
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge(outputs=False))(fpipe.program(model))
    half = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    program = fpipe.shard(**POLICIES[policy], **half)(merged)  # type: ignore[arg-type]
    assert fpipe.Program.parse(str(program)) == program
    assert all(fpipe.verify(program, model, params, batch, replicas=replicas).bitwise for replicas in (1, 2))
    for trace in (True, False):
        grads = fpipe.build(program, model, trace=trace)(params, batch).grads
        assert {grad.dtype for grad in fpipe.tree.leaves(grads)} == {torch.float32}


class TiedGPT(nn.Module):
    """An embedding that is the head too, a frozen layer, a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Dropout(0.2)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.second.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.tanh(self.first(self.norm(x)))
        return self.head(x + self.drop(torch.tanh(self.second(x))))


def tied(rank: int, schedule: str, shape: tuple[int, int], more: dict[str, Any]) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    replica, place = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    net, whole = TiedGPT(), (torch.randint(0, 11, (8 * shape[0], 5)), torch.randint(0, 11, (8 * shape[0], 5)))
    batch = tuple(half.chunk(shape[0])[replica] for half in whole)
    model, params, _ = fpipe.from_module(net, stages=shape[1], loss=loss, example=batch)
    merged = fpipe.chain(fpipe.split(4), fpipe.schedules.get(schedule)(shape[1]), fpipe.merge(outputs=False))
    program = fpipe.shard(gather="use")(merged(fpipe.program(model)))
    step, shards = started(model, params, program, batch, mesh, **more)
    found = step(shards, batch, key=3)
    grads = fpipe.reference(model, params, whole, microbatches=4, replicas=shape[0], key=3).grads
    pairs = zip(fpipe.tree.paths(found.grads), fpipe.tree.leaves(own(program, place, grads)), strict=True)
    wrong = [path for (path, one), other in pairs if one is not other and not torch.equal(one.full_tensor(), other)]
    if not found.timeline:
        return wrong
    with pytest.warns(UserWarning, match="these costs have no bytes"):
        costs = fpipe.profile(program, model, shards, batch, key=3, repeats=1, runtime="distributed", mesh=mesh)
    free = [word for word in ("gather", "scatter") if not getattr(costs, word)[0] > 0]
    return wrong + misread(found.timeline) + free


def misread(timeline: fpipe.Timeline) -> list[str]:
    """A record tells until when each copy was gathered: nobody has begun to read it before."""
    over = {value: end for op, _, end in timeline.events if op.kind in ("GATHER", "SCATTER") for value in op.writes}
    names = {value.name for value in over}
    read = [(op.cell, over[value], start) for op, start, _ in timeline.events for value in op.reads if value in over]
    early = [cell for cell, end, start in read if start < end - 1e-3]  # clocks of two processes differ
    return early + ["not recorded"] * (not {"params", "all"} <= names)


@pytest.mark.parametrize(("lead", "makespan"), [(0, 10), (1, 7)])
def test_a_copy_is_on_its_way_from_the_end_of_the_op_before(lead: int, makespan: int):
    """Ops take 6 s, each of four copies one: at lead 0 all are waited for, at lead 1 the first."""
    pipeline = fpipe.chain(fpipe.split(1), fpipe.merge(outputs=False), fpipe.shard(gather="use", lead=lead))
    timeline = fpipe.simulate(pipeline(fpipe.program(2)), fpipe.Costs(gather=1))
    assert timeline.makespan == makespan
    assert sum(step.end - step.start for step in timeline.critical_path) == makespan


@pytest.mark.parametrize(
    ("schedule", "shape", "more"),
    [
        ("zb_h1", (2, 2), {}),
        ("dualpipe", (2, 2), {"check_finite": True}),
        ("one_f_one_b", (2, 2), {"record": True}),
        ("one_f_one_b", (4, 1), {}),
    ],
)
def test_ties_frozen_leaves_and_random_numbers_are_those_of_plain_autograd(
    four: Processes, schedule: str, shape: tuple[int, int], more: dict[str, Any]
):
    assert four.each(tied, schedule, shape, more) == [[]] * 4


def training(rank: int) -> list[bool]:
    """An optimizer over shards has a shard of its state, and the parameters of one over the whole."""
    _, replica, place = meshed()
    net, whole = odd_net(), rows(16)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    params = tuple({name: leaf.detach().clone() for name, leaf in stage.items()} for stage in params)
    batches = [tuple(half.chunk(2)[one] for half in whole) for one in range(2)]
    step, shards = started(model, params, sharded(model, "each use"), batches[replica])
    optimizer = torch.optim.AdamW([leaf for leaf in fpipe.tree.leaves(shards) if leaf is not None])
    plain = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        fpipe.assign_grads(shards, step(shards, batches[replica]).grads)
        optimizer.step()
        _, grads = by_hand(net, batches, 4)
        for name, leaf in net.named_parameters():
            leaf.grad = grads[name]
        plain.step()
    after = dict(net.named_parameters())
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    same = [torch.equal(leaf.full_tensor(), after[name]) for name, leaf in shards[place].items()]
    return [*same, *(isinstance(one, DTensor) and one.placements == (Shard(0),) for one in moments)]


def test_an_optimizer_over_shards_trains_as_over_the_whole(four: Processes):
    assert four.each(training) == [[True] * 8] * 4


def refused(rank: int, number: int) -> str:
    """What is said where no shards can be made, or are handed in."""
    mesh, _, place = meshed()
    net, over = odd_net(), mesh["dp"]
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    program, named, shard = sharded(model), dict(net.named_parameters()), fpipe.shard_params
    mine = own(program, place, params)
    shards = shard(mine, over)
    whole = [
        {name: leaf.redistribute(over, [Replicate()]) for name, leaf in one.items()} if one else one for one in shards
    ]

    def step(given: Any, example: Any = shards, **how: Any) -> object:
        how = how or {"runtime": "distributed", "mesh": mesh}
        return fpipe.build(program, model, example=(example, rows(8)), **how)(given, rows(8))

    calls: list[Any] = [*(lambda one=one: shard(*one) for one in (((named,), mesh), ((named,), mesh["pp"])))]
    calls += [lambda: shard(net, over), lambda: shard(named, over), lambda: step(mine)]
    calls += [lambda: step(shards, tuple(whole)), lambda: step(shards, shard(params, over), runtime="local")]
    with pytest.raises((TypeError, ValueError)) as error:
        calls[number]()
    return str(error.value)


NO_SHARDS = [
    *["dimension 'pp' of the mesh has the ranks of a program: hand in mesh['dp'], that of replicas."] * 2,
    "one entry for each stage, as load_params or local_params gives them; found a Sequential",
    "found a dict",
    "was handed a plain tensor of shape",
    "and the program shards it by rows, Shard(0), over 'dp'",
    "and one process runs one replica. Hand in its .full_tensor()",
]


@pytest.mark.parametrize("number", range(len(NO_SHARDS)))
def test_what_is_no_shard_is_refused_by_name(four: Processes, number: int):
    """A net was handed back as it is, and stages were shared out among the ranks of a program."""
    assert all(NO_SHARDS[number] in said for said in four.each(refused, number))


test_refusals = refusals(
    globals(),
    """
fpipe.shard()(fpipe.split(2)(fpipe.program(1)))
    ProgramError: fpipe.merge() before
after(fpipe.place("linear"), fpipe.merge(), fpipe.communicate(), fpipe.shard())
    ProgramError: put fpipe.shard() before fpipe.communicate()
fpipe.shard()(sharded(2))
    ProgramError: sharded already; shard it once
after(fpipe.merge(), fpipe.data_parallel(), fpipe.shard("tp"), fpipe.data_parallel("cp"))
    ProgramError: has replicas along 'dp' and 'tp' already
after(fpipe.schedules.gpipe(2), fpipe.merge(), fpipe.shard(gather="use"), fpipe.schedules.zbv(2))
    ProgramError: put fpipe.shard(gather=...) after what places the program
fpipe.shard(gather="pass")
    ValueError: gather is 'step', 'run', 'use' or f(op), found 'pass'
fpipe.shard(scatter="use")
    ValueError: scatter is 'step' or 'microbatch'
fpipe.shard(lead=-1)
    ValueError: lead is a whole number, at least 0
fpipe.shard(compute_dtype=torch.int8)
    ValueError: compute_dtype is a floating dtype
fpipe.shard_params(({},), 2)
    TypeError: such as mesh['dp']; found 2
fpipe.Program.parse(str(sharded(2)).replace("GATHER[0] shard[0]", "GATHER[0] shard[1]"))
    ProgramError: does not make a stage's params from its shard
fpipe.data_parallel()(fpipe.program(2))
    ProgramError: replicas need the weights that SPLIT writes: put fpipe.split() (at least split(1)) and fpipe.merge() before
fpipe.chain(fpipe.split(2), fpipe.data_parallel(), fpipe.merge())(fpipe.program(2))
    ProgramError: loss[1,0] is of one microbatch, not merged: put fpipe.split() (at least split(1)) and fpipe.merge() before
after(fpipe.place("linear"), fpipe.merge(), fpipe.communicate(), fpipe.data_parallel())
    ProgramError: put fpipe.data_parallel() before fpipe.communicate().
fpipe.data_parallel("b")(replicated(2))
    ProgramError: replicas along 'dp' already
fpipe.shard("pp")
    ValueError: mesh dimension 'pp' has the program's ranks
fpipe.data_parallel(2)
    ValueError: such as 'dp'; found 2.
fpipe.Program.parse(str(replicated(2)).replace("REDUCE[0] sum[0,1] {axis='dp'}", "REDUCE[0] sum[0,1]"))
    ProgramError: REDUCE(all[0]) says no axis of replicas: {axis='...'}
""",
)


@pytest.mark.parametrize("rule", [{"rule": "AdamW"}, {"rule": "SGD", "momentum": 0.9}], ids=str)
def test_fused_rules_of_shards_are_right_to_rounding(rule: dict[str, Any]):
    """The kernels add and multiply at once, but in the last numbers of a tensor: shards have other last numbers, and
    right steps were accused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    batches = [(torch.randn(18, 7), torch.randn(18, 5)) for _ in range(3)]
    parts = fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge(), fpipe.shard("dp")
    program = fpipe.chain(*parts, fpipe.update(**rule, clip=1.0, fused=True), fpipe.steps(3))(fpipe.program(model))
    report = fpipe.verify(program, model, params, batches, replicas=2)
    assert report.bitwise or "compared to rounding" in report.notes[-1]  # as the kernels of this CPU are
    wrong = fpipe.Program.parse(str(program).replace("index=1", "index=0"))
    with pytest.raises(fpipe.GradientMismatch):
        fpipe.verify(wrong, model, params, batches, replicas=2)
