"""Parameters sharded over replicas are gathered before use and scattered after it, as the program says."""

import copy
import warnings
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
from tests.test_distributed import MSE, local_part, rows

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
    """Return a net whose rows two replicas cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in ((8, 5), (5, 7), (7, 9), (9, 8))))


def differing_names(grads: Any, expected: dict[str, Tensor]) -> list[str]:
    """Return the names of gradients whose gathered bits differ from the expected ones."""
    grad_by_name = {name: grad for stage in grads if stage is not None for name, grad in stage.items()}
    return [name for name, grad in grad_by_name.items() if not torch.equal(grad.full_tensor(), expected[name])]


def test_collectives_have_their_own_lane_and_costs():
    program = sharded(2, "each use", "gpipe", 2)
    costs = fpipe.Costs(gather=[1, 0.5], scatter=2, offload=3)
    timeline = fpipe.simulate(program, costs)
    assert {costs.seconds(op) for op in program.ops if op.kind == "GATHER"} == {1, 0.5}
    assert timeline.makespan == fpipe.simulate(program).makespan + 1  # the first waits for its parameters
    assert timeline.delivered == timeline.makespan + 2
    assert "wire | " in str(fpipe.plot(timeline))


def transformed(*transforms: Any) -> object:
    return fpipe.chain(fpipe.split(4), *transforms)(fpipe.program(4))


def test_sizes_count_gathered_parameters_and_sharded_gradients():
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model, params, _ = fpipe.from_sequential(net, stages=4, loss=MSE)
    batch, weight_bytes = (torch.randn(4, 64), torch.randn(4, 64)), 64 * 64 * 4
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False))
    base = merged(fpipe.program(model))
    sizes = {
        name: fpipe.sizes(fpipe.shard(**options)(base), model, params, batch, replicas=2)
        for name, options in POLICIES.items()
    }
    peaks = {name: max(counted.peak) for name, counted in sizes.items()}
    replicated_peak = max(fpipe.sizes(fpipe.data_parallel()(base), model, params, batch).peak)
    assert (
        peaks["once a step"] >= replicated_peak + weight_bytes
    )  # two stages gathered; in place of one whole sum a half
    assert peaks["each use, late"] < peaks["each use"] <= peaks["once a step"]
    assert sizes["once a step"].bytes[fpipe.Value("all", 0)] == weight_bytes // 2
    assert sizes["once a step"].bytes[fpipe.Value("params", 0)] == weight_bytes


def two_layers() -> tuple[Any, Any, fpipe.Program]:
    """Return a model of two 8 x 8 layers, one a stage, with W split from I and gathers for each use."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge(outputs=False))
    return model, params, fpipe.shard(gather="use")(merged(fpipe.program(model)))


def test_a_gather_leaves_out_unread_leaves():
    """The W of a linear reads no weight, its I no bias, and the I of the first stage nothing."""
    model, params, program = two_layers()
    sizes = fpipe.sizes(program, model, params, rows(8), replicas=2)
    costs = fpipe.Costs(bytes=sizes, cluster="2 ranks; replicas 2 1s 1B/s")
    readers = {value: op for op in program.ops for value in op.reads if value.name == "params"}
    gathers = [(op, readers[op.writes[0]]) for op in program.ops if op.kind == "GATHER"]
    bytes_by_use = {(reader.kind, reader.stage): sizes.size(op.writes[0]) for op, reader in gathers}
    weight, bias = 8 * 8 * 4, 8 * 4
    full_reads, unread = (
        dict.fromkeys([("F", 0), ("F", 1)], weight + bias),
        dict.fromkeys([("I", 0), ("W", 0), ("W", 1)], 0),
    )
    assert bytes_by_use == full_reads | unread | {("I", 1): weight}
    times = {(reader.kind, reader.stage): costs.seconds(op) for op, reader in gathers}
    assert times == {use: 1 + size / 2 if size else 0 for use, size in bytes_by_use.items()}


def count_sent_bytes(rank: int) -> int:
    """Return the bytes of shards that this process sends for GATHERs in a step."""
    from fpipe.runtimes.processes import collective_parts

    _, replica, _ = meshed()
    model, params, program = two_layers()
    step, shards = started(model, params, program, rows(8))
    byte_counts, gathered = list[int](), collective_parts._all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_parts, "_all_gather", lambda *of: byte_counts.append(of[1].nbytes) or gathered(*of))
        step(shards, tuple(tensor + replica for tensor in rows(8)))
    return sum(byte_counts)


def test_unread_leaves_are_not_sent(four: Processes):
    weight, bias = 8 * 8 * 4 // 2, 64  # a half each; what is in a buffer takes a multiple of 64 bytes
    assert four.run(count_sent_bytes) == [2 * (weight + bias), 2 * (weight + bias) + 2 * weight] * 2


@pytest.mark.parametrize(("reduce", "scatter"), [(None, 2), ("float32", 4), ("float64", 8)])
def test_collectives_of_casts_take_the_time_of_cast_bytes(reduce: Any, scatter: int):
    """Used to time a SCATTER by the bytes that it reads."""
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
def test_one_replica_in_one_process_equals_the_reference(runtime: Any, policy: str):
    model, params, _ = fpipe.from_sequential(odd_net(), stages=2, loss=MSE)
    program = replicated(model, microbatches=4) if policy == "none" else sharded(model, policy)
    result = fpipe.build(program, model, runtime=runtime)(params, rows(8))
    expected = fpipe.reference(model, params, rows(8), microbatches=4)
    assert torch.equal(result.loss, expected.loss)
    assert all(map(torch.equal, fpipe.tree.leaves(result.grads), fpipe.tree.leaves(expected.grads)))
    assert fpipe.sizes(program, model, params, rows(8)) is not None


def test_verify_in_lockstep_finds_a_missing_reduce():
    """A single replica has all bits without the REDUCE."""
    model, params, _ = fpipe.from_sequential(odd_net(), stages=2, loss=MSE)
    text = str(sharded(model, microbatches=2))
    text = text.replace("all_loss = REDUCE[1] loss {axis='dp'} @ 1\n", "").replace("loss = all_loss", "loss = loss")
    without_reduce = fpipe.Program.parse(text)
    assert fpipe.verify(without_reduce, model, params, rows(8)).bitwise
    with pytest.raises(fpipe.GradientMismatch, match="loss differs"):
        fpipe.verify(without_reduce, model, params, rows(8), replicas=2)


def compare_three_replicas(rank: int) -> list[str]:
    """Return the names of gradients that differ from three replicas added in order."""
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "pp"))
    net, batches = odd_net(), [tuple(tensor.chunk(3)[index] for tensor in rows(24)) for index in range(3)]
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(1), fpipe.merge(outputs=False))
    program = fpipe.shard(gather="use")(merged(fpipe.program(model)))
    step, shards = started(model, params, program, batches[rank], mesh)
    return differing_names(step(shards, batches[rank]).grads, by_hand(net, batches, 2)[1])


def test_gloo_adds_three_replicas_in_their_order():
    with Processes(3) as three:
        assert three.run(compare_three_replicas) == [[]] * 3


def compare_mixed_dtypes(rank: int, scatter: Any) -> list[str]:
    """Compare stages in bfloat16 whose gradients replicas add in float32 with a loop by hand."""
    _, replica, _ = meshed()
    torch.manual_seed(0)
    float_net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    ids, target = torch.randint(0, 11, (16,)), torch.randint(0, 5, (16,))
    model, params, _ = fpipe.from_sequential(float_net, stages=2, loss=nn.functional.cross_entropy)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(2), fpipe.merge(outputs=False))
    dtypes = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    program = fpipe.shard(gather="use", scatter=scatter, **dtypes)(merged(fpipe.program(model)))
    batches = [*zip(ids.chunk(2), target.chunk(2), strict=True)]
    step, shards = started(model, params, program, batches[0])
    actual_grads = step(shards, batches[replica]).grads
    net, grads = copy.deepcopy(float_net).bfloat16(), {}
    parts = [
        torch.autograd.grad(nn.functional.cross_entropy(net(x), t) * 0.25, [*net.parameters()])
        for x, t in zip(ids.chunk(4), target.chunk(4), strict=True)  # two microbatches of each replica
    ]
    for (name, _), a, b, c, d in zip(net.named_parameters(), *parts, strict=True):
        by_step = (a + b).float() + (c + d).float()
        grads[name] = by_step if scatter == "step" else (a.float() + c.float()) + (b.float() + d.float())
    return differing_names(actual_grads, grads)


@pytest.mark.parametrize("scatter", ["step", "microbatch"])
def test_stages_compute_in_one_dtype_and_replicas_add_in_another(four: Processes, scatter: str):
    assert four.run(compare_mixed_dtypes, scatter) == [[]] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_casts_are_printed_in_the_program_and_verified(policy: str):
    def stage(p: Any, x: Tensor) -> Tensor:
        return torch.tanh((p["e"][x] if "e" in p else x) @ p["w"])

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.float(), target)

    params = {"e": torch.randn(11, 8), "w": torch.randn(8, 8)}, {"w": torch.randn(8, 11)}
    model, batch = fpipe.from_functions([stage] * 2, loss), (torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,)))
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.zb_h1(2), fpipe.merge(outputs=False))(fpipe.program(model))
    dtypes = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    program = fpipe.shard(**POLICIES[policy], **dtypes)(merged)  # type: ignore[arg-type]
    assert fpipe.Program.parse(str(program)) == program
    assert all(fpipe.verify(program, model, params, batch, replicas=replicas).bitwise for replicas in (1, 2))
    for trace in (True, False):
        grads = fpipe.build(program, model, trace=trace)(params, batch).grads
        assert {grad.dtype for grad in fpipe.tree.leaves(grads)} == {torch.float32}


class TiedGPT(nn.Module):
    """A net whose embedding is its head, with a frozen layer, a norm and dropout."""

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


def compare_tied_grads(rank: int, schedule: str, shape: tuple[int, int], options: dict[str, Any]) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    replica, pp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    net, global_batch = TiedGPT(), (torch.randint(0, 11, (8 * shape[0], 5)), torch.randint(0, 11, (8 * shape[0], 5)))
    batch = tuple(tensor.chunk(shape[0])[replica] for tensor in global_batch)
    model, params, _ = fpipe.from_module(net, stages=shape[1], loss=loss, batch=batch)
    merged = fpipe.chain(fpipe.split(4), fpipe.schedules.get(schedule)(shape[1]), fpipe.merge(outputs=False))
    program = fpipe.shard(gather="use")(merged(fpipe.program(model)))
    step, shards = started(model, params, program, batch, mesh, **options)
    result = step(shards, batch, key=3)
    grads = fpipe.reference(model, params, global_batch, microbatches=4, replicas=shape[0], key=3).grads
    pairs = zip(fpipe.tree.paths(result.grads), fpipe.tree.leaves(local_part(program, pp_rank, grads)), strict=True)
    wrong = [
        path
        for (path, grad), expected_grad in pairs
        if grad is not expected_grad and not torch.equal(grad.full_tensor(), expected_grad)
    ]
    if not result.timeline:
        return wrong
    with warnings.catch_warnings():  # which the first rank alone says
        warnings.filterwarnings("ignore", "these costs have no bytes")
        costs = fpipe.profile(program, model, shards, batch, key=3, repeats=1, runtime="distributed", mesh=mesh)
    free = [name for name in ("gather", "scatter") if not getattr(costs, name)[0] > 0]
    return wrong + early_reads(result.timeline) + free


def early_reads(timeline: fpipe.Timeline) -> list[str]:
    """Return the ops of a recorded timeline that read a copy before it was gathered."""
    gathered_at = {
        value: end for op, _, end in timeline.events if op.kind in ("GATHER", "SCATTER") for value in op.writes
    }
    names = {value.name for value in gathered_at}
    reads = [
        (op.cell, gathered_at[value], start)
        for op, start, _ in timeline.events
        for value in op.reads
        if value in gathered_at
    ]
    early_cells = [cell for cell, end, start in reads if start < end - 1e-3]  # clocks of two processes differ
    return early_cells + ["not recorded"] * (not {"params", "all"} <= names)


@pytest.mark.parametrize(("lead", "makespan"), [(0, 10), (1, 7)])
def test_a_gather_starts_when_the_op_before_it_ends(lead: int, makespan: int):
    """Ops take 6 s, each of four gathers 1 s: at lead 0 ops wait for all four, at lead 1 for the first."""
    pipeline = fpipe.chain(fpipe.split(1), fpipe.merge(outputs=False), fpipe.shard(gather="use", lead=lead))
    timeline = fpipe.simulate(pipeline(fpipe.program(2)), fpipe.Costs(gather=1))
    assert timeline.makespan == makespan
    assert sum(step.end - step.start for step in timeline.critical_path) == makespan


@pytest.mark.parametrize(
    ("schedule", "shape", "options"),
    [
        ("zb_h1", (2, 2), {}),
        ("dualpipe", (2, 2), {"check_finite": True}),
        ("one_f_one_b", (2, 2), {"record": True}),
        ("one_f_one_b", (4, 1), {}),
    ],
)
def test_tied_frozen_and_random_stages_give_the_gradients_of_autograd(
    four: Processes, schedule: str, shape: tuple[int, int], options: dict[str, Any]
):
    assert four.run(compare_tied_grads, schedule, shape, options) == [[]] * 4


def train_shards(rank: int) -> list[bool]:
    """Train shards by an optimizer, and compare with an optimizer over the whole parameters."""
    _, replica, pp_rank = meshed()
    net, global_batch = odd_net(), rows(16)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    params = tuple({name: leaf.detach().clone() for name, leaf in stage.items()} for stage in params)
    batches = [tuple(tensor.chunk(2)[index] for tensor in global_batch) for index in range(2)]
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
    expected_params = dict(net.named_parameters())
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    is_equal = [torch.equal(leaf.full_tensor(), expected_params[name]) for name, leaf in shards[pp_rank].items()]
    return [*is_equal, *(isinstance(moment, DTensor) and moment.placements == (Shard(0),) for moment in moments)]


def test_an_optimizer_over_shards_trains_as_over_the_whole(four: Processes):
    assert four.run(train_shards) == [[True] * 8] * 4


def refuse_shards(rank: int, number: int) -> str:
    """Return the error of a call that makes or takes invalid shards."""
    mesh, _, pp_rank = meshed()
    net, dp_mesh = odd_net(), mesh["dp"]
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    program, named, shard = sharded(model), dict(net.named_parameters()), fpipe.shard_params
    mine = local_part(program, pp_rank, params)
    shards = shard(mine, dp_mesh)
    replicated_params = [
        {name: leaf.redistribute(dp_mesh, [Replicate()]) for name, leaf in stage.items()} if stage else stage
        for stage in shards
    ]

    def step(step_params: Any, example: Any = shards, **options: Any) -> object:
        options = options or {"runtime": "distributed", "mesh": mesh}
        return fpipe.build(program, model, example=(example, rows(8)), **options)(step_params, rows(8))

    calls: list[Any] = [*(lambda args=args: shard(*args) for args in (((named,), mesh), ((named,), mesh["pp"])))]
    calls += [lambda: shard(net, dp_mesh), lambda: shard(named, dp_mesh), lambda: step(mine)]
    calls += [
        lambda: step(shards, tuple(replicated_params)),
        lambda: step(shards, shard(params, dp_mesh), runtime="local"),
    ]
    with pytest.raises((TypeError, ValueError)) as error:
        calls[number]()
    return str(error.value)


NO_SHARDS = [
    *["dimension 'pp' of the mesh has the ranks of a program: hand in mesh['dp'], that of replicas."] * 2,
    "params is a list; found a Sequential",
    "found a dict",
    "was handed a plain tensor of shape",
    "and the program shards it by rows, Shard(0), over 'dp'",
    "and one process runs one replica. Hand in its .full_tensor()",
]


@pytest.mark.parametrize("number", range(len(NO_SHARDS)))
def test_invalid_shards_are_refused(four: Processes, number: int):
    """Used to return a net unchanged, and to shard stages over the ranks of a program."""
    assert all(NO_SHARDS[number] in message for message in four.run(refuse_shards, number))


test_refusals = refusals(
    globals(),
    """
fpipe.shard()(fpipe.split(2)(fpipe.program(1)))
    ProgramError: fpipe.merge() before
transformed(fpipe.place("linear"), fpipe.merge(), fpipe.communicate(), fpipe.shard())
    ProgramError: put fpipe.shard() before fpipe.communicate()
fpipe.shard()(sharded(2))
    ProgramError: sharded already; shard it once
transformed(fpipe.merge(), fpipe.data_parallel(), fpipe.shard("tp"), fpipe.data_parallel("cp"))
    ProgramError: has replicas along 'dp' and 'tp' already
transformed(fpipe.schedules.gpipe(2), fpipe.merge(), fpipe.shard(gather="use"), fpipe.schedules.zbv(2))
    ProgramError: put fpipe.shard(gather=...) after what places the program
fpipe.shard(scatter="use")
    ValueError: scatter is 'step' or 'microbatch'
fpipe.shard(lead=-1)
    ValueError: lead is a whole number, at least 0
fpipe.shard(compute_dtype=torch.int8)
    ValueError: compute_dtype is a floating dtype
fpipe.Program.parse(str(sharded(2)).replace("GATHER[0] shard[0]", "GATHER[0] shard[1]"))
    ProgramError: does not make a stage's params from its shard
fpipe.data_parallel()(fpipe.program(2))
    ProgramError: replicas need the weights that SPLIT writes: put fpipe.split() (at least split(1)) and
    fpipe.merge() before
fpipe.chain(fpipe.split(2), fpipe.data_parallel(), fpipe.merge())(fpipe.program(2))
    ProgramError: loss[1,0] is of one microbatch, not merged: put fpipe.split() (at least split(1)) and
    fpipe.merge() before
transformed(fpipe.place("linear"), fpipe.merge(), fpipe.communicate(), fpipe.data_parallel())
    ProgramError: put fpipe.data_parallel() before fpipe.communicate().
fpipe.data_parallel("b")(replicated(2))
    ProgramError: replicas along 'dp' already
fpipe.shard("pp")
    ValueError: mesh dimension 'pp' has the program's ranks
fpipe.Program.parse(str(replicated(2)).replace("REDUCE[0] sum[0,1] {axis='dp'}", "REDUCE[0] sum[0,1]"))
    ProgramError: REDUCE(all[0]) says no axis of replicas: {axis='...'}
""",
)


@pytest.mark.parametrize("rule", [{"rule": "AdamW"}, {"rule": "SGD", "momentum": 0.9}], ids=str)
def test_fused_updates_of_shards_agree_to_rounding(rule: dict[str, Any]):
    """Used to refuse correct steps. Fused kernels round the tail of a tensor differently, and a shard has another
    tail."""
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
