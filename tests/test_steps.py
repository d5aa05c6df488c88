"""Several training steps in one program train as a plain loop with equal delays does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fpipe
from tests.processes import Processes
from tests.refusals import refusals
from tests.test_distributed import MSE, local_part
from tests.test_update import cut_net, differences, join_stages, net_of, run_torch_loop


def make_batches(count: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 8), torch.randn(rows, 8)) for _ in range(count)]


def program_of(
    model: Any, *transforms: Any, rule: str = "AdamW", clip: float | None = None, microbatches: int = 4
) -> Any:
    parts = fpipe.split(microbatches), fpipe.merge(outputs=False), fpipe.update(rule, clip=clip)
    return fpipe.chain(*parts, *transforms)(fpipe.program(model))


def run_plain_loop(net: nn.Module, batches: list[Any], delays: list[int], clip: float | None, lr: float) -> Any:
    """Return losses and optimizer of a plain loop in which stage s reads its parameters of delays[s] steps ago."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, foreach=False)
    params_by_step, losses = [{name: leaf.detach().clone() for name, leaf in net.named_parameters()}], []
    for step_index, batch in enumerate(batches):
        stale_params = {
            name: params_by_step[max(step_index - delays[int(name.split(".")[0])], 0)][name].clone().requires_grad_()
            for name in params_by_step[0]
        }
        total = torch.zeros(())
        for microbatch, (x, target) in enumerate(zip(*(leaf.tensor_split(4) for leaf in batch), strict=True)):
            loss = MSE(functional_call(net, stale_params, (x,)), target) * 0.25
            loss.backward()
            total = total + loss.detach() if microbatch else loss.detach()
        losses.append(total)
        for name, leaf in net.named_parameters():
            leaf.grad = stale_params[name].grad
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip, foreach=False)
        optimizer.step()
        params_by_step.append({name: leaf.detach().clone() for name, leaf in net.named_parameters()})
    return losses, optimizer


@pytest.mark.crossed
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h2", "interleaved", "zbv", "dualpipe", "roundpipe"])
@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}, {"record": True}], ids=repr)
def test_steps_have_the_bits_of_a_plain_loop(schedule: str, clip: float | None, options: dict[str, Any]):
    net, batches = net_of(), make_batches(3)
    stages = 2 if schedule in ("one_f_one_b", "zb_h2", "dualpipe") else 4
    model, params, _ = cut_net(stages)
    program = program_of(model, fpipe.schedules.get(schedule)(2), fpipe.steps(3), clip=clip)
    assert program.steps == 3
    assert fpipe.Program.parse(str(program)) == program
    initial_params = copy.deepcopy(params)
    result = fpipe.build(program, model, **options)(
        params, batches, opt=fpipe.optimizer_state(program, params), lr=0.01
    )
    assert all(
        map(torch.equal, join_stages(params).values(), join_stages(initial_params).values())
    )  # nothing is mutated
    losses, optimizer = run_plain_loop(net, batches, [0] * 4, clip, 0.01)
    assert all(map(torch.equal, result.loss, losses))
    assert differences(net, optimizer, result) == []


def test_steps_of_a_tied_leaf_have_the_bits_of_a_plain_loop():
    """The sum over its uses and the last sum of one use had one name, and the program was refused as a circle."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net[2].weight = net[0].weight
    batches = make_batches(3)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = program_of(model, fpipe.schedules.one_f_one_b(2), fpipe.steps(3))
    result = fpipe.build(program, model)(params, batches, opt=fpipe.optimizer_state(program, params), lr=0.01)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    for batch in batches:
        # The gradient of a tied leaf: over the microbatches of each use, and then over the uses.
        grads_by_use = [torch.zeros(8, 8), torch.zeros(8, 8)]
        optimizer.zero_grad()
        for x, target in zip(*(leaf.tensor_split(4) for leaf in batch), strict=True):
            uses = [net[0].weight.detach().requires_grad_() for _ in range(2)]
            y = nn.functional.linear(nn.functional.linear(x, uses[0], net[0].bias).tanh(), uses[1], net[2].bias)
            (MSE(y, target) * 0.25).backward()
            grads_by_use = [total + use.grad for total, use in zip(grads_by_use, uses, strict=True)]
        net[0].weight.grad = grads_by_use[0] + grads_by_use[1]
        optimizer.step()
    assert differences(net, optimizer, result) == []


@pytest.mark.crossed
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("stale", "delays"), [(1, [1, 1, 1, 1]), (2, [2, 2, 2, 2]), ("stash", [3, 2, 1, 0])])
@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=repr)
def test_stale_steps_have_the_bits_of_a_loop_with_equal_delays(
    stale: Any, delays: list[int], clip: Any, options: dict[str, Any]
):
    net, batches = net_of(), make_batches(5)
    model, params, _ = cut_net(4)
    program = program_of(model, fpipe.steps(5, stale=stale), fpipe.schedules.one_f_one_b(4), clip=clip)
    result = fpipe.build(program, model, **options)(
        params, batches, opt=fpipe.optimizer_state(program, params), lr=0.01
    )
    losses, optimizer = run_plain_loop(net, batches, delays, clip, 0.01)
    assert all(map(torch.equal, result.loss, losses))
    assert differences(net, optimizer, result) == []


@pytest.mark.parametrize(
    "options", [{"trace": False}, {"donate": True}, {"runtime": "threads", "donate": True}], ids=repr
)
def test_a_host_updates_while_the_next_step_runs_forward(options: dict[str, Any]):
    """RoundPipe's asynchronous step keeps parameters and Adam's state on a host, which stale= used to refuse."""
    net, batches = net_of(), make_batches(3)
    model, params, _ = cut_net(4)
    parts = fpipe.split(4), fpipe.schedules.roundpipe(2), fpipe.merge(outputs=False), fpipe.update("AdamW", clip=0.05)
    program = fpipe.chain(*parts, fpipe.steps(3, stale=1))(fpipe.program(model))
    events = fpipe.simulate(program, fpipe.Costs(1, 1, 1, update=2)).events
    end_of_updates = max(event.end for event in events if event.op.kind == "UPDATE" and event.op.microbatch == 3)
    assert any(event.start < end_of_updates for event in events if event.op.kind == "F" and event.op.microbatch == 4)
    donated_params = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in params)
    result = fpipe.build(program, model, **options)(
        donated_params, batches, opt=fpipe.optimizer_state(program, donated_params), lr=0.01
    )
    losses, optimizer = run_plain_loop(net, batches, [1] * 4, 0.05, 0.01)
    assert all(map(torch.equal, result.loss, losses))
    assert differences(net, optimizer, result) == []


def test_pipedream_stashes_a_version_for_each_microbatch_in_flight():
    program = program_of(3, fpipe.steps(6, stale="stash"), fpipe.schedules.one_f_one_b(3), microbatches=1)
    assert program.table() == fpipe.chain(fpipe.split(6), fpipe.schedules.one_f_one_b(3))(fpipe.program(3)).table()
    version_by_microbatch = {
        op.microbatch: op.reads[0].microbatch for op in program.ops if op.kind == "F" and op.stage == 0
    }
    assert version_by_microbatch == {0: None, 1: None, 2: None, 3: 0, 4: 1, 5: 2}
    assert all(
        op.reads[0].microbatch == version_by_microbatch[op.microbatch]
        for op in program.ops
        if op.kind == "B" and op.stage == 0
    )


def test_running_statistics_pass_from_step_to_step():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    twin, batches = copy.deepcopy(net), make_batches(2)
    model, params, state = fpipe.from_sequential(net, stages=3, loss=MSE)
    program = program_of(model, fpipe.schedules.one_f_one_b(3), fpipe.steps(2), rule="SGD")
    opt = fpipe.optimizer_state(program, params)
    result = fpipe.build(program, model)(params, batches, state=state, opt=opt, lr=0.1)
    _, _, optimizer = run_torch_loop(twin, batches[0], 1, "SGD", None, [0.1])
    run_torch_loop(twin, batches[1], 1, "SGD", None, [0.1])
    assert differences(twin, optimizer, result) == []
    assert torch.equal(result.state[1]["1.running_var"], twin[1].running_var)


PERIODS = {  # p=4, m=8, F=I=W=1, UPDATE=.5: in turn; with a clip; one step stale
    "one_f_one_b": (33.5, 33.5, 24.5),
    "zb_h1": (27.5, 27.5, 24.5),
    "zb_h2": (24.5, 27.5, 24.5),
    "zbv": (24.5, 26, 24.5),
}


@pytest.mark.parametrize("name", PERIODS)
def test_the_period_of_steps_is_the_published_one(name: str):
    chunks = 2 if name == "zbv" else 1
    schedule = fpipe.schedules.get(name)(4)
    costs = fpipe.Costs(1 / chunks, 1 / chunks, 1 / chunks, update=0.5 / chunks)

    def period(clip: float | None, *transforms: Any) -> float:
        def spans(count: int) -> float:
            concrete = [
                transform(count) if callable(transform) and transform is not schedule else transform
                for transform in transforms
            ]
            program = program_of(4 * chunks, *concrete, clip=clip, microbatches=8)
            return fpipe.simulate(program, costs).makespan

        return (spans(6) - spans(4)) / 2

    synchronous = (schedule, lambda count: fpipe.steps(count))
    stale = (lambda count: fpipe.steps(count, stale=1), schedule)
    assert (period(None, *synchronous), period(1.0, *synchronous), period(None, *stale)) == PERIODS[name]


def run_two_steps(batch: Any, **options: Any) -> Any:
    model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
    program = program_of(model, fpipe.steps(2), rule="SGD", microbatches=1)
    params = ({"w": torch.tensor(3.0)},)
    return fpipe.build(program, model)(params, batch, opt=fpipe.optimizer_state(program, params), **options)


def run_reference(**options: Any) -> Any:
    model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
    return fpipe.reference(model, ({"w": torch.tensor(3.0)},), [BATCH] * 2, rule="SGD", steps=2, **options)


def updating_program(split: Any, **options: Any) -> fpipe.Program:
    parts = split, fpipe.merge(), fpipe.update("SGD"), fpipe.steps(2)
    return fpipe.chain(*parts)(fpipe.program(2, **options))


BATCH = (torch.ones(2), torch.ones(2))
test_refusals = refusals(
    globals(),
    """
fpipe.steps(0)
    ValueError: steps is a whole number, at least 1
fpipe.chain(fpipe.split(2), fpipe.merge(), fpipe.steps(2))(fpipe.program(2))
    ProgramError: put fpipe.update() before
program_of(2, fpipe.steps(2), fpipe.steps(2))
    ProgramError: 2 training steps already
updating_program(fpipe.identity())
    ProgramError: put fpipe.split() before
updating_program(fpipe.split(2, presplit=True))
    ProgramError: each step cuts its own batch
updating_program(fpipe.split(2), input_grads=True)
    ProgramError: input_grads= is for a single step
program_of(2, fpipe.place("linear"), fpipe.communicate(), fpipe.steps(2))
    ProgramError: put fpipe.steps() before fpipe.communicate
program_of(2, fpipe.schedules.gpipe(2), fpipe.steps(2, stale=1))
    ProgramError: Put the schedule behind fpipe.steps
program_of(2, fpipe.steps(3, stale=1), fpipe.schedules.gpipe(2))
    ProgramError: waits here for parameters that a backward behind it updates
run_two_steps(BATCH, lr=0.1)
    ValueError: takes a list of 2 batches, found tuple
run_two_steps([BATCH] * 3, lr=0.1)
    ValueError: takes a list of 2 batches, found a list of 3
run_two_steps([BATCH] * 2, lr=[0.1] * 3)
    ValueError: a list of 2, one for each step; found 3
run_two_steps([BATCH, (torch.ones(3), torch.ones(3))], lr=0.1)
    ValueError: equally many rows; found [2, 3]
run_reference(lr=[0.1] * 3)
    ValueError: a list of 2, one for each step; found 3
run_reference(lr=0.1, key=[1])
    ValueError: key is one whole number, or a list of 2
run_reference(lr={"lr": 0.1, "dampening": -1.0})
    ValueError: dampening is a finite number from 0
""",
)


def differences_on_rank(rank: int, schedule: str, stages: int, stale: Any) -> list[str]:
    """Name this rank's parameters and state that differ from a plain loop with equal delays."""
    net, batches = net_of(), make_batches(3)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=stages, loss=MSE)
    on_host = schedule == "roundpipe"
    transforms = [fpipe.schedules.get(schedule)(1 if on_host else 2), fpipe.steps(3, stale=stale)]
    program = program_of(model, *(transforms if stale == 0 or on_host else transforms[::-1]), clip=0.05)
    local_params = local_part(program, rank, params)
    step = fpipe.build(program, model, runtime="distributed", example=(params, batches))
    for _ in range(2):
        result = step(local_params, batches, opt=fpipe.optimizer_state(program, local_params), lr=0.01)
    losses, optimizer = run_plain_loop(net, batches, [stale] * 4, 0.05, 0.01)
    local_losses = [loss for loss in result.loss if isinstance(loss, Tensor)]
    differing = ["loss"] * (bool(local_losses) and not all(map(torch.equal, local_losses, losses)))
    return differing + differences(net, optimizer, result)


@pytest.mark.parametrize(
    ("schedule", "stages", "stale"),
    [("zb_h2", 2, 0), ("interleaved", 4, 0), ("one_f_one_b", 2, 1), ("roundpipe", 4, 1)],
)
def test_two_processes_take_several_steps(pair: Processes, schedule: str, stages: int, stale: int):
    rank_0_output = ["nothing"] * (schedule == "roundpipe")  # all weights are at home on the other rank
    assert pair.run(differences_on_rank, schedule, stages, stale) == [rank_0_output, []]


def test_verify_compares_steps_with_a_loop_and_names_mistakes():
    model, params, _ = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
    batches = make_batches(2)
    program = program_of(model, fpipe.schedules.one_f_one_b(2), fpipe.steps(2), clip=0.05)
    report = fpipe.verify(program, model, params, batches, lr=[0.1, 0.2])
    assert report.bitwise
    assert {leaf.name.partition("[")[0] for leaf in report.leaves} == {"loss", "params", "opt", "norm"}
    text = str(program)
    with pytest.raises(fpipe.ProgramError, match=r"0B5 reads params\[0\], 0F5 params\[0,3\]"):
        fpipe.Program.parse(text.replace("B[0,5] params[0,3]", "B[0,5] params[0]"))
    for correct_line, wrong_line, path in (
        ("sum[1,7] norm[,7] lr:1", "sum[1,7] norm[,3] lr:1", r"params\[1\]"),
        ("opt[0,3] sum[0,7] norm[,7] lr:1", "opt[0,3] sum[0,7] norm[,7] lr", r"params\[0\]"),
    ):
        assert correct_line in text
        with pytest.raises(fpipe.GradientMismatch, match=path):
            fpipe.verify(
                fpipe.Program.parse(text.replace(correct_line, wrong_line)), model, params, batches, lr=[0.1, 0.2]
            )
    stale_program = program_of(model, fpipe.schedules.pipedream_2bw(2, steps=3))
    assert (
        "behind by steps: stage 0 by 1, stage 1 by 1"
        in fpipe.verify(stale_program, model, params, make_batches(3)).undivided
    )
    with pytest.raises(ValueError, match=r"without fpipe.update\(\) a program takes no opt="):
        fpipe.verify(fpipe.program(model), model, params, batches[0], lr=0.1)


@pytest.mark.parametrize("options", [{}, {"trace": False}, {"runtime": "threads"}], ids=repr)
def test_each_step_uses_its_own_key(options: dict[str, Any]):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    batches, keys = make_batches(3), [5, 6, 7]
    program = program_of(model, fpipe.schedules.zb_h1(2), fpipe.steps(3))
    opt = fpipe.optimizer_state(program, params)
    result = fpipe.build(program, model, **options)(params, batches, key=keys, opt=opt, lr=0.1)
    single_program = program_of(model, fpipe.schedules.gpipe(2))
    step, values = fpipe.build(single_program, model), (params, fpipe.optimizer_state(single_program, params))
    for batch, key, loss in zip(batches, keys, result.loss, strict=True):
        single_result = step(values[0], batch, key=key, opt=values[1], lr=0.1)
        assert torch.equal(single_result.loss, loss)
        values = single_result.params, single_result.opt
    assert all(map(torch.equal, join_stages(result.params).values(), join_stages(values[0]).values()))
    assert fpipe.verify(program, model, params, batches, key=keys).bitwise
    with pytest.raises(ValueError, match="key is a list of 3 whole numbers"):
        fpipe.build(program, model)(params, batches, key=5, opt=opt, lr=0.1)
    with pytest.raises(ValueError, match="of one training step there are no several"):
        fpipe.reference(model, params, batches[0], key=keys)


def test_steps_are_recorded_and_watched():
    model, params, _ = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
    program = program_of(model, fpipe.schedules.one_f_one_b(2), fpipe.steps(2))
    opt = fpipe.optimizer_state(program, params)
    result = fpipe.build(program, model, record=True)(params, make_batches(2), opt=opt, lr=0.1)
    assert sum(event.op.kind == "UPDATE" for event in result.timeline.events) == 4
    watched_step = fpipe.build(program, model, check_finite=True)
    with pytest.raises(FloatingPointError, match=r"UPDATE\(params\[.,3\]\) wrote params"):
        watched_step(params, make_batches(2), opt=fpipe.tree.tree_map(lambda leaf: leaf + torch.inf, opt), lr=0.1)


def test_an_order_that_cannot_repeat_a_step_is_refused_by_its_transform():
    """The build used to refuse it, with a circle in a table that has none."""
    table = fpipe.schedules.from_table("0F0 0F1 0F2 0F3 0B2 0B0 0B1 0B3 \n 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    validated = fpipe.update("SGD", clip=1.0, validate="after")
    parts = fpipe.split(2), fpipe.merge(), validated, fpipe.steps(2, stale=1)
    with pytest.raises(
        fpipe.ProgramError, match=r"^validate='after' runs steps again .* leave validate= out, or change"
    ):
        fpipe.chain(fpipe.split(2), fpipe.merge(), validated, fpipe.steps(2, stale="stash"), table)(fpipe.program(2))
    assert fpipe.chain(*parts, table)(fpipe.program(2)).ranks == 2
