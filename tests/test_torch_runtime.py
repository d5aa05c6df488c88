"""Programs of ours on torch's own pipeline runtime, its tables on ours, and what cannot go over, in its sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torchs
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
OURS = ["gpipe", "one_f_one_b", "interleaved", "interleaved_zb", "zbv", "dualpipev", "zb_h1", "looped_bfs"]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
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


def differ(found: Sequence[Any], right: Sequence[Any], *, bitwise: bool = True) -> list[str]:
    """This rank's gradients that are wrong. In another order the sums over microbatches round otherwise, and nothing
    else."""
    same = torch.equal if bitwise else lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-7)
    each = [(paths(one), leaves(other)) for one, other in zip(found, right, strict=True) if one is not None]
    pairs = [(*own, leaf) for stage in each for own, leaf in zip(*stage, strict=True)]
    return [path for path, own, leaf in pairs if not (own is leaf is None or same(own, leaf))]


def layers(stages: int) -> tuple[fpipe.Model, Any]:
    return fpipe.from_sequential(net_of(stages), stages=stages, loss=MSE)[:2]


def ours_on_torchs(rank: int, name: str, make: Callable[[int], tuple[fpipe.Model, Any]]) -> tuple[list[str], bool]:
    """One of our schedules on torch's runtime, twice, against autograd; stages share their memory with the params."""
    model, params = make(STAGES.get(name, 4))
    program = merged(model, MICROBATCHES, fpipe.schedules.get(name)(2))
    runtime = torch_pipelining.runtime(program, model, fpipe.local_params(program, params, rank))
    x, target = batch_of()
    for _ in range(2):
        losses: list[Tensor] = []
        for stage in runtime.stages:
            stage.submod.zero_grad()
        runtime.step(x, target=target, losses=losses)
    right = fpipe.reference(model, params, (x, target), microbatches=MICROBATCHES)
    mine = torch_pipelining.grads(runtime.stages)
    assert [one is None for one in mine] == [home != rank for home in program.placement]
    odd = differ(mine, right.grads, bitwise=summed_in_order(program))
    for stage in runtime.stages:
        pairs = zip(leaves(stage.submod.params()), leaves(params[stage.stage_index]), strict=True)
        odd += ["memory" for one, other in pairs if one.data_ptr() != other.data_ptr()]
    if losses and not torch.equal(sum(losses[1:], losses[0]), right.loss):
        odd.append("losses")
    return odd, summed_in_order(program)


def functions(stages: int) -> tuple[fpipe.Model, Any]:
    """Stages with nested params, a frozen leaf, a skip carried along, rules of their own, and an int on the way."""

    def first(p: Any, x: Tensor) -> Any:
        return torch.tanh(x @ p["in"]["w"] + p["in"]["b"]), x, torch.arange(len(x))

    def second(p: Any, x: Any) -> Any:
        h, kept, rows = x
        return h @ p[0] + p[1], kept, rows

    def third(p: Any, x: Any) -> Any:
        h, kept, rows = x
        return torch.tanh(h * p["w"]) + kept * p["w"] + rows[:, None]

    scaled = fpipe.custom_stage(
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
    return fpipe.freeze(fpipe.from_functions([first, second, third, scaled], MSE), (3, "s")), params


@pytest.mark.parametrize(
    ("name", "make"), [*((name, layers) for name in OURS), ("interleaved", functions), ("zbv", functions)]
)
def test_a_program_on_torchs_runtime_gives_the_gradients_of_autograd(pair: Processes, name: str, make: Any):
    in_order = name != "looped_bfs"
    assert pair.each(ours_on_torchs, name, make) == [([], in_order), ([], in_order)]


TORCHS = {
    "GPipe": "gpipe",
    "1F1B": "one_f_one_b",
    "LoopedBFS": "looped_bfs",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def torchs_on_ours(rank: int, name: str) -> list[str]:
    """Torch's own schedule, run by torch on stages of ours, and its table run by us: both against autograd."""
    alike, batch = TORCHS[name], batch_of()
    model, params = layers(STAGES.get(alike, 4))
    placed = merged(model, MICROBATCHES, fpipe.schedules.get(alike)(2))
    stages = torch_pipelining.stages(placed, model, fpipe.local_params(placed, params, rank))
    kind = torchs.get_schedule_class(name)
    single = issubclass(kind, torchs.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=MSE)
    schedule.step(*([batch[0]] if stages[0].is_first else []), target=batch[1])
    right = fpipe.reference(model, params, batch, microbatches=MICROBATCHES).grads
    odd = differ(torch_pipelining.grads(stages), right, bitwise=False)

    if name == "1F1B":  # its own table, which torch only draws, has no forward of microbatch 0 on the last rank
        order = torchs.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=MSE).pipeline_order
    else:
        order = schedule._get_pipeline_order() if single else schedule.pipeline_order
    program = merged(model, MICROBATCHES, torch_pipelining.schedule(order))
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch))
    return odd + differ(step(fpipe.local_params(program, params, rank), batch).grads, right)


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_tables_run_on_ours_and_on_its_own_with_stages_of_ours(pair: Processes, name: str):
    assert pair.each(torchs_on_ours, name) == [[], []]


def chain_of(*fns: Any, **given: Any) -> fpipe.Model:
    return fpipe.from_functions([*fns], **{"loss": MSE} | given)


def plain(p: Any, x: Any) -> Any:
    return x * p["w"]


def asking(p: Any, x: Any, *, microbatch: int) -> Any:
    return x * p["w"] * microbatch


def layered(*layers: nn.Module) -> fpipe.Model:
    return fpipe.from_sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers), sizes=[1, len(layers)], loss=MSE)[0]


def in_two(model: Any, *more: Any, schedule: Any = None, split: Any = None) -> Program:
    chain = (split or fpipe.split(2), schedule or fpipe.schedules.one_f_one_b(2), *more, fpipe.merge())
    return fpipe.chain(*chain)(fpipe.program(model))


def of_model(model: fpipe.Model) -> Any:
    program = in_two(model, schedule=fpipe.place([min(stage, 1) for stage in range(len(model.stages))]))
    return torch_pipelining.runtime(program, model, [{}] * len(model.stages))


def of_program(program: Program) -> Any:
    return torch_pipelining.runtime(program, PLAIN, ({"w": torch.ones(())},) * 2)


PLAIN = chain_of(plain, plain)
BOTH_WAYS = fpipe.schedules.from_table("0F0 1F0 1B0 0B0\n0F1 1F1 1B1 0B1", replicated=True)
ONE = fpipe.place([0, 0])
WEIGHTS = ({"w": torch.ones(WIDTH)}, {"w": torch.ones(WIDTH)})


def by_one(model: fpipe.Model, params: Any = WEIGHTS, schedule: Any = ONE) -> Any:
    return torch_pipelining.runtime(in_two(model, schedule=schedule), model, params)


def stepped(rows: int, target: Any, model: fpipe.Model = PLAIN) -> Any:
    return by_one(model).step(torch.ones(rows, WIDTH), target=target)


NET, (OF_NET, _), _ = fpipe.from_sequential(net_of(2), stages=2, loss=MSE)
test_what_one_process_is_handed_is_checked = pytest.mark.usefixtures("alone")(
    refusals(
        globals(),
        """
by_one(PLAIN, schedule=fpipe.place([0, 1]))
    ValueError: the program has 2 ranks and the process group 1 processes
by_one(PLAIN, WEIGHTS[:1])
    ValueError: params is a tuple with one pytree for each of the 2 stages, found 1 of them.
by_one(PLAIN, (*WEIGHTS[:1], None))
    ValueError: params of stage 1 is None, and the stage runs in this process.
torch_pipelining.stages(in_two(PLAIN, schedule=ONE), PLAIN, WEIGHTS, device="meta")
    ValueError: 'w' of stage 0 is on cpu, and the stages run on meta: move it there
torch_pipelining.stages(in_two(NET, schedule=ONE), NET, (OF_NET, {}))
    ValueError: params of stage 1 must have '1.0.weight', which is missing.
# Torch would receive the second microbatch into the buffer of the first.
stepped(5, torch.ones(4, WIDTH))
    ValueError: torch's runtime needs equal microbatches; found 5 rows for 2. Hand in a multiple
    of 2 rows, or use fpipe.build(runtime="distributed").
stepped(4, {"t": torch.ones(4, WIDTH)})
    ValueError: torch's runtime takes a target that is one tensor; found dict.
stepped(4, torch.ones(4, WIDTH), chain_of(lambda p, x: {}, plain))
    TypeError: stage 0 (<lambda>) returns one dict; torch's runtime passes on a tensor or a tuple of two or more.
stepped(4, torch.ones(4, WIDTH), chain_of(lambda p, x: (x, 3), plain))
    TypeError: stage 0 (<lambda>) returns a tuple of Tensor, int; torch's runtime passes on a tensor
""",
    )
)


def test_inputs_that_are_a_dict_go_as_keywords(alone: None):
    model = chain_of(lambda p, x: x["a"] * p["w"] + x["b"], plain)
    program = in_two(model, schedule=ONE)
    runtime = torch_pipelining.runtime(program, model, WEIGHTS)
    x, target = batch_of()
    runtime.step(a=x, b=target, target=target)
    ours = fpipe.build(program, model)(WEIGHTS, ({"a": x, "b": target}, target)).grads
    assert differ(torch_pipelining.grads(runtime.stages), ours) == []
    with pytest.raises(RuntimeError) as refused:
        runtime.step(x, a=x, b=target, target=target)
    assert str(refused.value.__cause__).startswith("the inputs of a batch are one or several tensors, or a dict as")


def test_a_later_stage_may_look_up_what_it_was_handed(alone: None):
    """Torch learns shapes on memory that nobody wrote, whose numbers are in no table."""
    model = chain_of(lambda p, x: (x[0] * p["w"], x[1]), lambda p, x: x[0] + p["table"][x[1]])
    program = in_two(model, schedule=ONE)
    params = ({"w": torch.ones(WIDTH)}, {"table": torch.randn(3, WIDTH)})
    (x, target), rows = batch_of(), torch.arange(12) % 3
    torch.use_deterministic_algorithms(True)  # fills such memory with the largest numbers
    try:
        runtime = torch_pipelining.runtime(program, model, params)
        runtime.step(x, rows, target=target)
    finally:
        torch.use_deterministic_algorithms(False)
    ours = fpipe.build(program, model)(params, ((x, rows), target)).grads
    assert torch.allclose(torch_pipelining.grads(runtime.stages)[1]["table"], ours[1]["table"], rtol=1e-6)


def recomputed(own: Any, x: Tensor) -> Tensor:
    return torch_checkpoint(lambda x: own.inner(x).tanh(), x, use_reentrant=False)


@pytest.mark.parametrize(
    "schedule", ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "0F0 1F0 0F1 1F1 1I0 1W0 0I0 0W0 1I1 1W1 0I1 0W1"]
)
def test_a_module_that_recomputes_in_its_backward_does_so_with_what_it_was_handed(alone: None, schedule: str):
    """The net has other weights by then."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Toy(recomputed, inner=nn.Linear(WIDTH, WIDTH)))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    params = tuple({name: leaf + 1 for name, leaf in stage.items()} for stage in params)
    program = in_two(model, schedule=fpipe.schedules.from_table(schedule))
    runtime = torch_pipelining.runtime(program, model, params)
    x, target = batch_of()
    runtime.step(x, target=target)
    net.load_state_dict(fpipe.join_params(model, params))
    for part in zip(x.tensor_split(2), target.tensor_split(2), strict=True):
        (MSE(net(part[0]), part[1]) * 0.5).backward()
    assert (
        differ(
            torch_pipelining.grads(runtime.stages),
            [{name: one.grad for name, one in part.named_parameters(str(at))} for at, part in enumerate(net)],
        )
        == []
    )


test_refusals = refusals(
    globals(),
    r"""
of_model(chain_of(plain, plain, lambda p, x: x[0] + x[1], inputs=("batch", 0, (1, 0))))
    ValueError: stage 2 (<lambda>) takes (1, 0); torch's runtime passes it the output of the stage before. Pass values
    on in tuples, or use fpipe.build(runtime="distributed").
of_model(chain_of(plain, plain, ties=[((0, "w"), (1, "w"))]))
    ValueError: leaf 'w' of stage 0 is tied to 'w' of stage 1; put both into one stage,
    or use fpipe.build(runtime="distributed").
of_model(layered(nn.BatchNorm1d(WIDTH)))
    ValueError: stage 1 (1) has module state, which torch's runtime updates once too often. Call eval() before the
    net is cut, or use fpipe.build(runtime="distributed").
of_model(chain_of(plain, asking))
    ValueError: stage 1 (asking) asks for 'microbatch'; torch's runtime passes a stage only its input. Write
    it without, or use fpipe.build(runtime="distributed").
of_model(layered(nn.Dropout(0.5)))
    ValueError: stage 1 (1): '1' (Dropout) draws random numbers; torch's runtime has no key. Call eval() on it,
    or use fpipe.build(runtime="distributed").
of_model(chain_of(lambda p, x: (x, x.sum()), plain, aux_losses=[0]))
    ValueError: stage 0 (<lambda>) returns a loss of its own; torch's runtime has the last stage's only. Pass it on,
    or use fpipe.build(runtime="distributed").
of_model(chain_of(plain, plain, loss=None))
    ValueError: this model has no loss=, which torch's runtime computes. Say loss=lambda y, target: y,
    or use fpipe.build(runtime="distributed").
of_model(chain_of(plain, plain, loss=lambda y, t: (y.sum(), len(t)), reduction="count"))
    ValueError: the loss also returns a count; torch's runtime takes a loss alone. Return
    no more, or use fpipe.build(runtime="distributed").
of_model(chain_of(plain, plain, loss=lambda y, t: (y.sum(), y), aux=True))
    ValueError: the loss also returns auxiliary results; torch's runtime takes a loss alone.
of_program(in_two(PLAIN, fpipe.checkpoint("always")))
    ProgramError: 0R0: torch's tables have no recompute. Wrap the stages' modules in
    torch.utils.checkpoint instead of fpipe.checkpoint().
of_program(in_two(PLAIN, split=fpipe.split(2, slices=2), schedule=fpipe.place([0, 1])))
    ProgramError: SPLIT(x[0,0.0]): torch's tables have no slices.
torch_pipelining.to_csv(fpipe.place([0, 1, 2])(fpipe.program(3, inputs=("batch", 0, (1, 0)))), format="compute_comms")
    ProgramError: 2F0 reads y[0,0] of 0F0 on rank 0; torch's runtime sends to adjacent stages only.
of_program(in_two(PLAIN, schedule=BOTH_WAYS))
    ProgramError: stage 0 is on ranks (0, 1); torch's runtime has one rank a stage.
of_program(in_two(PLAIN, schedule=fpipe.place([0, 1], homes={0: [1]})))
    ProgramError: params[0] has its home on ranks (1,) and its stage on rank 0. Leave out place(homes=),
    or use fpipe.build(runtime="distributed").
of_program(in_two(PLAIN, fpipe.offload(lambda stage, microbatch: True)))
    ProgramError: torch's tables have no OFFLOAD.
of_program(in_two(PLAIN, split=fpipe.split(size=4, rows=8)))
    ProgramError: SPLIT(x[0,0]) has size=4; torch's runtime cuts equal microbatches of rows. Say
    fpipe.split(2), or use fpipe.build(runtime="distributed").
of_program(in_two(PLAIN, fpipe.communicate(cast=torch.bfloat16)))
    ProgramError: SEND(y[0,0]>1) casts to bfloat16, and torch's runtime does not. Leave out
    communicate(cast=), or use fpipe.build(runtime="distributed").
of_program(fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(PLAIN)))
    ProgramError: this program does not sum gradients over microbatches, as torch's runtime does; put
    fpipe.merge() behind the schedule.
of_program(fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(PLAIN, input_grads=True)))
    ProgramError: this program also gives input_grads; torch's runtime does not. Leave it out,
    or use fpipe.build(runtime="distributed").
of_program(in_two(PLAIN, schedule=fpipe.schedules.from_table("0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0")))
    ProgramError: 1F0 comes after a later microbatch's forward; torch's runtime needs ascending losses. Reorder them,
    or use fpipe.build(runtime="distributed").
torch_pipelining.runtime(in_two(PLAIN), chain_of(plain), WEIGHTS[:1])
    ValueError: the program has 2 stages and the model 1
torch_pipelining.runtime(in_two(PLAIN), PLAIN, WEIGHTS)
    ValueError: for processes that torch.distributed.init_process_group has joined.
""",
)
