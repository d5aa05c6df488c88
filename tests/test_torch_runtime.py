"""Our programs on torch's pipeline runtime, its tables on ours, and the errors of programs that cannot move."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fpipe
from fpipe.interop import torch_pipelining
from fpipe.program import Program, parts_of
from fpipe.tree import leaves, paths
from tests.processes import Processes
from tests.refusals import refusals
from tests.toys import Toy, merged

MSE = nn.functional.mse_loss
WIDTH, MICROBATCHES = 6, 4
STAGES = {"gpipe": 2, "one_f_one_b": 2, "zb_h1": 2}
SCHEDULES = ["gpipe", "one_f_one_b", "interleaved", "interleaved_zb", "zbv", "dualpipev", "zb_h1", "looped_bfs"]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Join a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net_of(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def batch_of(rows: int = 3 * MICROBATCHES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def summed_in_order(program: Program) -> bool:
    """Whether each stage's weight gradients come in ascending microbatches, which is how torch adds them up."""
    orders: dict[int | None, list[Any]] = {}
    for op in parts_of(program.ops):
        if op.kind in ("B", "W"):
            orders.setdefault(op.stage, []).append(op.microbatch)
    return all(order == sorted(order) for order in orders.values())


def differing_paths(actual: Sequence[Any], expected: Sequence[Any], *, bitwise: bool = True) -> list[str]:
    """Return the paths of this rank's wrong gradients. Sums in another order of microbatches may round differently."""
    are_equal = torch.equal if bitwise else lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-7)
    stages = [
        (paths(actual_stage), leaves(expected_stage))
        for actual_stage, expected_stage in zip(actual, expected, strict=True)
        if actual_stage is not None
    ]
    pairs = [(*path_and_leaf, leaf) for stage in stages for path_and_leaf, leaf in zip(*stage, strict=True)]
    return [
        path
        for path, path_and_leaf, leaf in pairs
        if not (path_and_leaf is leaf is None or are_equal(path_and_leaf, leaf))
    ]


def make_layers(stages: int) -> tuple[fpipe.Model, Any]:
    return fpipe.from_sequential(net_of(stages), stages=stages, loss=MSE)[:2]


def run_on_torch(rank: int, name: str, make_model: Callable[[int], tuple[fpipe.Model, Any]]) -> tuple[list[str], bool]:
    """Run a schedule of ours twice on torch's runtime, and name what differs from autograd; stages share memory with
    params."""
    model, params = make_model(STAGES.get(name, 4))
    program = merged(model, MICROBATCHES, fpipe.schedules.get(name)(2))
    runtime = torch_pipelining.runtime(program, model, fpipe.local_params(program, params, rank))
    x, target = batch_of()
    for _ in range(2):
        losses: list[Tensor] = []
        for stage in runtime.stages:
            stage.submod.zero_grad()
        runtime.step(x, target=target, losses=losses)
    expected = fpipe.reference(model, params, (x, target), microbatches=MICROBATCHES)
    local_grads = torch_pipelining.grads(runtime.stages)
    assert [leaf is None for leaf in local_grads] == [home != rank for home in program.placement]
    differences = differing_paths(local_grads, expected.grads, bitwise=summed_in_order(program))
    for stage in runtime.stages:
        pairs = zip(leaves(stage.submod.params()), leaves(params[stage.stage_index]), strict=True)
        differences += ["memory" for leaf, param in pairs if leaf.data_ptr() != param.data_ptr()]
    if losses and not torch.equal(sum(losses[1:], losses[0]), expected.loss):
        differences.append("losses")
    return differences, summed_in_order(program)


def make_functions(stages: int) -> tuple[fpipe.Model, Any]:
    """Return stages with nested params, a frozen leaf, a skip, custom rules, and an int that is passed on."""

    def first_stage(p: Any, x: Tensor) -> Any:
        return torch.tanh(x @ p["in"]["w"] + p["in"]["b"]), x, torch.arange(len(x))

    def second_stage(p: Any, x: Any) -> Any:
        h, skip, rows = x
        return h @ p[0] + p[1], skip, rows

    def third_stage(p: Any, x: Any) -> Any:
        h, skip, rows = x
        return torch.tanh(h * p["w"]) + skip * p["w"] + rows[:, None]

    scale = fpipe.custom_stage(
        lambda p, x: (x * p["s"], x),
        lambda p, res, dy: (dy * p["s"], (res, dy)),
        lambda p, wres: {"s": (wres[0] * wres[1]).sum(0)},
    )
    torch.manual_seed(2)
    params = (
        {"in": {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)}},
        [torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)],
        {"w": torch.randn(WIDTH)},
        {"s": torch.randn(WIDTH)},
    )
    return fpipe.freeze(fpipe.from_functions([first_stage, second_stage, third_stage, scale], MSE), (3, "s")), params


@pytest.mark.parametrize(
    ("name", "make_model"),
    [*((name, make_layers) for name in SCHEDULES), ("interleaved", make_functions), ("zbv", make_functions)],
)
def test_a_program_on_torchs_runtime_gives_the_gradients_of_autograd(pair: Processes, name: str, make_model: Any):
    in_order = name != "looped_bfs"
    assert pair.run(run_on_torch, name, make_model) == [([], in_order), ([], in_order)]


OUR_NAME_BY_TORCH_NAME = {
    "GPipe": "gpipe",
    "1F1B": "one_f_one_b",
    "LoopedBFS": "looped_bfs",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def run_torch_table(rank: int, name: str) -> list[str]:
    """Run torch's schedule on stages of ours, and its table on our runtime; return what differs from autograd."""
    our_name, batch = OUR_NAME_BY_TORCH_NAME[name], batch_of()
    model, params = make_layers(STAGES.get(our_name, 4))
    placed = merged(model, MICROBATCHES, fpipe.schedules.get(our_name)(2))
    stages = torch_pipelining.stages(placed, model, fpipe.local_params(placed, params, rank))
    schedule_class = torch_schedules.get_schedule_class(name)
    is_single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if is_single else stages, MICROBATCHES, loss_fn=MSE)
    schedule.step(*([batch[0]] if stages[0].is_first else []), target=batch[1])
    expected = fpipe.reference(model, params, batch, microbatches=MICROBATCHES).grads
    differences = differing_paths(torch_pipelining.grads(stages), expected, bitwise=False)

    if name == "1F1B":  # its own table, which torch only draws, has no forward of microbatch 0 on the last rank
        order = torch_schedules.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=MSE).pipeline_order
    else:
        order = schedule._get_pipeline_order() if is_single else schedule.pipeline_order
    program = merged(model, MICROBATCHES, torch_pipelining.schedule(order))
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch))
    return differences + differing_paths(step(fpipe.local_params(program, params, rank), batch).grads, expected)


@pytest.mark.parametrize("name", OUR_NAME_BY_TORCH_NAME)
def test_torchs_tables_run_on_both_runtimes_with_stages_of_ours(pair: Processes, name: str):
    assert pair.run(run_torch_table, name) == [[], []]


def model_of(*fns: Any, **options: Any) -> fpipe.Model:
    return fpipe.from_functions([*fns], **{"loss": MSE} | options)


def multiply(p: Any, x: Any) -> Any:
    return x * p["w"]


def multiply_by_microbatch(p: Any, x: Any, *, microbatch: int) -> Any:
    return x * p["w"] * microbatch


def model_of_layers(*make_layers: nn.Module) -> fpipe.Model:
    return fpipe.from_sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *make_layers), sizes=[1, len(make_layers)], loss=MSE
    )[0]


def program_on_two(model: Any, *transforms: Any, schedule: Any = None, split: Any = None) -> Program:
    parts = (split or fpipe.split(2), schedule or fpipe.schedules.one_f_one_b(2), *transforms, fpipe.merge())
    return fpipe.chain(*parts)(fpipe.program(model))


def runtime_of_model(model: fpipe.Model) -> Any:
    program = program_on_two(model, schedule=fpipe.place([min(stage, 1) for stage in range(len(model.stages))]))
    return torch_pipelining.runtime(program, model, [{}] * len(model.stages))


def runtime_of_program(program: Program) -> Any:
    return torch_pipelining.runtime(program, PLAIN, ({"w": torch.ones(())},) * 2)


PLAIN = model_of(multiply, multiply)
BIDIRECTIONAL = fpipe.schedules.from_table("0F0 1F0 1B0 0B0\n0F1 1F1 1B1 0B1", replicated=True)
ON_RANK_0 = fpipe.place([0, 0])
WEIGHTS = ({"w": torch.ones(WIDTH)}, {"w": torch.ones(WIDTH)})


def runtime_on_rank_0(model: fpipe.Model, params: Any = WEIGHTS, schedule: Any = ON_RANK_0) -> Any:
    return torch_pipelining.runtime(program_on_two(model, schedule=schedule), model, params)


def step_with(rows: int, target: Any, model: fpipe.Model = PLAIN) -> Any:
    return runtime_on_rank_0(model).step(torch.ones(rows, WIDTH), target=target)


NET, (NET_PARAMS, _), _ = fpipe.from_sequential(net_of(2), stages=2, loss=MSE)
test_inputs_of_one_process_are_checked = pytest.mark.usefixtures("group_of_one")(
    refusals(
        globals(),
        """
runtime_on_rank_0(PLAIN, schedule=fpipe.place([0, 1]))
    ValueError: the program has 2 ranks and the process group 1 processes
runtime_on_rank_0(PLAIN, WEIGHTS[:1])
    ValueError: params is a tuple with one pytree for each of the 2 stages, found 1 of them.
runtime_on_rank_0(PLAIN, (*WEIGHTS[:1], None))
    ValueError: params of stage 1 is None, and the stage runs in this process.
torch_pipelining.stages(program_on_two(PLAIN, schedule=ON_RANK_0), PLAIN, WEIGHTS, device="meta")
    ValueError: 'w' of stage 0 is on cpu, and the stages run on meta: move it there
torch_pipelining.stages(program_on_two(NET, schedule=ON_RANK_0), NET, (NET_PARAMS, {}))
    ValueError: params of stage 1 must have '1.0.weight', which is missing.
# Torch would receive the second microbatch into the buffer of the first.
step_with(5, torch.ones(4, WIDTH))
    ValueError: torch's runtime needs equal microbatches; found 5 rows for 2. Hand in a multiple
    of 2 rows, or use fpipe.build(runtime="distributed").
step_with(4, {"t": torch.ones(4, WIDTH)})
    ValueError: torch's runtime takes one tensor as target; found dict.
step_with(4, torch.ones(4, WIDTH), model_of(lambda p, x: {}, multiply))
    TypeError: stage 0 (<lambda>) returns one dict; torch's runtime passes on a tensor or a tuple of two or more.
step_with(4, torch.ones(4, WIDTH), model_of(lambda p, x: (x, 3), multiply))
    TypeError: stage 0 (<lambda>) returns a tuple of Tensor, int; torch's runtime passes on a tensor
""",
    )
)


def test_a_dict_of_inputs_becomes_keywords(group_of_one: None):
    model = model_of(lambda p, x: x["a"] * p["w"] + x["b"], multiply)
    program = program_on_two(model, schedule=ON_RANK_0)
    runtime = torch_pipelining.runtime(program, model, WEIGHTS)
    x, target = batch_of()
    runtime.step(a=x, b=target, target=target)
    grads = fpipe.build(program, model)(WEIGHTS, ({"a": x, "b": target}, target)).grads
    assert differing_paths(torch_pipelining.grads(runtime.stages), grads) == []
    with pytest.raises(RuntimeError) as error_info:
        runtime.step(x, a=x, b=target, target=target)
    assert str(error_info.value.__cause__).startswith("the inputs of a batch are one or several tensors, or a dict as")


def test_a_later_stage_may_index_by_its_input(group_of_one: None):
    """Torch learns shapes on uninitialized memory, whose numbers are in no table."""
    model = model_of(lambda p, x: (x[0] * p["w"], x[1]), lambda p, x: x[0] + p["table"][x[1]])
    program = program_on_two(model, schedule=ON_RANK_0)
    params = ({"w": torch.ones(WIDTH)}, {"table": torch.randn(3, WIDTH)})
    (x, target), rows = batch_of(), torch.arange(12) % 3
    torch.use_deterministic_algorithms(True)  # fills such memory with the largest numbers
    try:
        runtime = torch_pipelining.runtime(program, model, params)
        runtime.step(x, rows, target=target)
    finally:
        torch.use_deterministic_algorithms(False)
    grads = fpipe.build(program, model)(params, ((x, rows), target)).grads
    assert torch.allclose(torch_pipelining.grads(runtime.stages)[1]["table"], grads[1]["table"], rtol=1e-6)


@pytest.mark.parametrize(
    "schedule", ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "0F0 1F0 0F1 1F1 1I0 1W0 0I0 0W0 1I1 1W1 0I1 0W1"]
)
def test_a_module_recomputes_in_its_backward_with_the_params_of_the_step(group_of_one: None, schedule: str):
    """The net has other weights by then."""
    recompute = lambda module, x: torch_checkpoint(lambda x: module.inner(x).tanh(), x, use_reentrant=False)  # noqa: E731
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Toy(recompute, inner=nn.Linear(WIDTH, WIDTH)))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    params = tuple({name: leaf + 1 for name, leaf in stage.items()} for stage in params)
    program = program_on_two(model, schedule=fpipe.schedules.from_table(schedule))
    runtime = torch_pipelining.runtime(program, model, params)
    x, target = batch_of()
    runtime.step(x, target=target)
    net.load_state_dict(fpipe.join_params(model, params))
    for part in zip(x.tensor_split(2), target.tensor_split(2), strict=True):
        (MSE(net(part[0]), part[1]) * 0.5).backward()
    assert (
        differing_paths(
            torch_pipelining.grads(runtime.stages),
            [
                {name: leaf.grad for name, leaf in part.named_parameters(str(stage_index))}
                for stage_index, part in enumerate(net)
            ],
        )
        == []
    )


test_refusals = refusals(
    globals(),
    r"""
runtime_of_model(model_of(multiply, multiply, lambda p, x: x[0] + x[1], inputs=("batch", 0, (1, 0))))
    ValueError: stage 2 (<lambda>) takes (1, 0); torch's runtime passes it the output of the stage before. Pass values
    on in tuples, or use fpipe.build(runtime="distributed").
runtime_of_model(model_of(multiply, multiply, ties=[((0, "w"), (1, "w"))]))
    ValueError: leaf 'w' of stage 0 is tied to 'w' of stage 1; put both into one stage,
    or use fpipe.build(runtime="distributed").
runtime_of_model(model_of_layers(nn.BatchNorm1d(WIDTH)))
    ValueError: stage 1 (1) has module state, which torch's runtime updates once too often. Call eval() before the
    net is cut, or use fpipe.build(runtime="distributed").
runtime_of_model(model_of(multiply, multiply_by_microbatch))
    ValueError: stage 1 (multiply_by_microbatch) asks for 'microbatch'; torch's runtime passes a stage only its input.
    Write it without, or use fpipe.build(runtime="distributed").
runtime_of_model(model_of_layers(nn.Dropout(0.5)))
    ValueError: stage 1 (1): '1' (Dropout) draws random numbers; torch's runtime has no key. Call eval() on it or
    set its probability to 0, or use fpipe.build(runtime="distributed").
runtime_of_model(model_of(lambda p, x: (x, x.sum()), multiply, aux_losses=[0]))
    ValueError: stage 0 (<lambda>) returns a loss of its own; torch's runtime has the last stage's only. Pass it on
    and add it there, or use fpipe.build(runtime="distributed").
runtime_of_model(model_of(multiply, multiply, loss=None))
    ValueError: this model has no loss=, which torch's runtime computes. Say loss=lambda y, target: y,
    or use fpipe.build(runtime="distributed").
runtime_of_model(model_of(multiply, multiply, loss=lambda y, t: (y.sum(), len(t)), reduction="count"))
    ValueError: the loss also returns a count; torch's runtime takes a loss alone. Return
    no more, or use fpipe.build(runtime="distributed").
runtime_of_model(model_of(multiply, multiply, loss=lambda y, t: (y.sum(), y), aux=True))
    ValueError: the loss also returns auxiliary results; torch's runtime takes a loss alone.
runtime_of_program(program_on_two(PLAIN, fpipe.checkpoint("always")))
    ProgramError: 0R0: torch's tables have no recompute. Wrap the stages' modules in
    torch.utils.checkpoint instead of fpipe.checkpoint().
runtime_of_program(program_on_two(PLAIN, split=fpipe.split(2, slices=2), schedule=fpipe.place([0, 1])))
    ProgramError: SPLIT(x[0,0.0]): torch's tables have no slices.
torch_pipelining.to_csv(fpipe.place([0, 1, 2])(fpipe.program(3, inputs=("batch", 0, (1, 0)))), format="compute_comms")
    ProgramError: 2F0 reads y[0,0] of 0F0 on rank 0; torch's runtime sends to adjacent stages only.
runtime_of_program(program_on_two(PLAIN, schedule=BIDIRECTIONAL))
    ProgramError: stage 0 is on ranks (0, 1); torch's runtime has one rank a stage.
runtime_of_program(program_on_two(PLAIN, schedule=fpipe.place([0, 1], homes={0: [1]})))
    ProgramError: params[0] has its home on ranks (1,) and its stage on rank 0. Leave out place(homes=),
    or use fpipe.build(runtime="distributed").
runtime_of_program(program_on_two(PLAIN, fpipe.offload(lambda stage, microbatch: True)))
    ProgramError: torch's tables have no OFFLOAD.
runtime_of_program(program_on_two(PLAIN, split=fpipe.split(size=4, rows=8)))
    ProgramError: SPLIT(x[0,0]) has size=4; torch's runtime cuts equal microbatches of rows. Say
    fpipe.split(2), or use fpipe.build(runtime="distributed").
runtime_of_program(program_on_two(PLAIN, fpipe.communicate(cast=torch.bfloat16)))
    ProgramError: SEND(y[0,0]>1) casts to bfloat16, and torch's runtime does not. Leave out
    communicate(cast=), or use fpipe.build(runtime="distributed").
runtime_of_program(fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(PLAIN)))
    ProgramError: this program does not sum gradients over microbatches, as torch's runtime does; put
    fpipe.merge() behind the schedule.
runtime_of_program(fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(
fpipe.program(PLAIN, input_grads=True)))
    ProgramError: this program also gives input_grads; torch's runtime does not. Leave it out,
    or use fpipe.build(runtime="distributed").
runtime_of_program(program_on_two(PLAIN, schedule=fpipe.schedules.from_table("0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0")))
    ProgramError: 1F0 comes after a later microbatch's forward; torch's runtime needs ascending losses. Reorder them,
    or use fpipe.build(runtime="distributed").
torch_pipelining.runtime(program_on_two(PLAIN), model_of(multiply), WEIGHTS[:1])
    ValueError: the program has 2 stages and the model 1
torch_pipelining.runtime(program_on_two(PLAIN), PLAIN, WEIGHTS)
    ValueError: for processes that torch.distributed.init_process_group has joined.
""",
)
