# pyright: strict
"""A user's script that uses every public name, which pyright reads in its strict mode: no name of ours may be untyped.

`make lint` checks its types and tests/test_imports.py that no name is missing; nobody runs it.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fpipe
from fpipe import callbacks, interop, schedules, testing
from fpipe.interop import torch_pipelining

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def layer(params: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def loss(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).mean()


def whole_loss(params: Params, batch: Batch) -> Tensor:
    x: Tensor = fpipe.boundary(layer(params, batch[0]))
    return loss(layer(params, x), batch[1])


def models(net: nn.Sequential, params: Params, batch: Batch) -> list[fpipe.Model]:
    of_functions = fpipe.from_functions([layer, fpipe.exchange("all_to_all", "ep"), layer], loss=loss)
    of_layers, per_stage, state = fpipe.from_sequential(net, stages=2, loss=loss, batch=batch)
    of_module, _, _ = fpipe.from_module(net, stages=2, loss=loss, batch=batch[0])
    of_loss, _ = fpipe.from_loss(whole_loss, params, batch)
    print(of_layers.stages[0].name, len(per_stage), len(state))
    frozen = fpipe.freeze(fpipe.evaluating(of_layers), 0)
    spread = fpipe.spread_vocabulary(of_functions, 2, vocabulary=8)
    return [of_functions, of_module, of_loss, frozen, fpipe.deferred_batch_norm(of_layers), spread]


def with_skips() -> nn.Sequential:
    return nn.Sequential(fpipe.Stash("x"), nn.Linear(8, 8), fpipe.Pop("x"))


def custom_stage() -> Callable[[Params, Tensor], Tensor]:
    def forward(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ params["w"], x

    def backward_input(params: Params, x: Tensor, dy: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return dy @ params["w"].T, (x, dy)

    def backward_weight(params: Params, saved: tuple[Tensor, Tensor]) -> Params:
        return {"w": fpipe.keep(saved[0].T @ saved[1])}

    return fpipe.custom_stage(forward, backward_input, backward_weight)


def make_program(model: fpipe.Model) -> fpipe.Program:
    pipeline = fpipe.chain(
        fpipe.split(8, (fpipe.Chunk(0), fpipe.Chunk(0))),
        fpipe.checkpoint("except_last"),
        fpipe.split_backward(),
        schedules.one_f_one_b(ranks=2),
        fpipe.merge(),
        fpipe.identity(),
    )
    program = pipeline(fpipe.program(model))
    fpipe.check(program)
    placements = fpipe.check_placements(program, model, mesh=("dp", "pp"))
    print(placements["dp"][program.ops[0].writes[0]])
    return program


def transform_all(program: fpipe.Program) -> list[fpipe.Program]:
    transforms: list[Callable[[fpipe.Program], fpipe.Program]] = [
        fpipe.merge_backward(),
        fpipe.place("looped", ranks=2),
        fpipe.reorder([["0F0"], ["1F0"]]),
        fpipe.offload("always"),
        fpipe.data_parallel("dp"),
        fpipe.shard("dp"),
        fpipe.slice_sequence(2),
        fpipe.forward_only(),
        fpipe.steps(2),
        fpipe.update("AdamW", clip=1.0),
        fpipe.communicate(cast=torch.bfloat16),
        fpipe.free(),
    ]
    return [transform(program) for transform in transforms]


def read_program(program: fpipe.Program) -> list[str]:
    first_op: fpipe.Op = program.ops[0]
    value: fpipe.Value = first_op.writes[0]
    program_input: fpipe.Input = program.inputs[0]
    output: fpipe.Output = program.outputs[0]
    pair = fpipe.pair(first_op, program.ops[1])
    return [first_op.cell, str(value), str(program_input.value), str(output.name), pair.cell, program.to_csv()]


def simulate_and_plot(program: fpipe.Program, file: Path) -> float:
    costs = fpipe.Costs(1.0, 1.0, [0.5, 1.0], transfer=0.1, bytes={"y": 8})
    cluster = fpipe.Cluster.parse("1 x 2\nin 1us 100GB/s")
    timeline: fpipe.Timeline = fpipe.simulate(program, costs, cluster=cluster)
    limits: fpipe.Bounds = fpipe.bounds(program, costs)
    side_by_side: fpipe.Comparison = fpipe.compare(["gpipe", "zb_h1"], 2, 8, costs)
    fpipe.plot(program, timeline, file=file, style=fpipe.Style(width_mm=84, font_pt=7))
    print(fpipe.balance([1, 2, 3], 2), side_by_side.rows[0])
    plans: fpipe.Plan | tuple[fpipe.Plan, ...] = fpipe.plan(costs, 2)
    print(plans, max(timeline.peak), [event.start for event in timeline.events])
    return timeline.makespan - limits.makespan


def search_plans(model: fpipe.Model, params: Sequence[Params], batch: Batch, program: fpipe.Program) -> fpipe.RunPlan:
    bytes_held: fpipe.Sizes = fpipe.sizes(program, model, params, batch)
    costs = fpipe.profile(program, model, params, batch)
    fitted: fpipe.LengthCosts = fpipe.fit_lengths({64: costs, 128: costs})
    print(fpipe.simulate(program, fitted, lengths=[64] * 8).makespan, fitted.at([64, 32]).forward)
    result: fpipe.SearchResult = fpipe.search(program, costs, ranks=2, microbatches=8, memory_cap=max(bytes_held.peak))
    print(
        result.schedule, result.gap, result.timeline.makespan, fpipe.estimate(program, model, params, batch, flops=1e12)
    )
    return fpipe.plan_run(model, fpipe.Machine(2), fpipe.Candidates([4, 8]), example=(params, batch))


def train_two_steps(program: fpipe.Program, model: fpipe.Model, params: Sequence[Params], batch: Batch) -> float:
    built: fpipe.Step = fpipe.build(program, model, runtime="threads", record=True)
    workload = callbacks.Workload(tokens=1024, flops=1e12, peak_flops=1e15)
    files: list[callbacks.StepWriter] = [callbacks.CSV("a.csv"), callbacks.TensorBoard("runs"), callbacks.WandB(None)]
    progress: callbacks.Callback = callbacks.Progress(2, workload)
    step = callbacks.track(built, progress, *files)
    opt = fpipe.optimizer_state(program, params)
    result: fpipe.Result = step(params, batch, key=fpipe.fold_in(0, 1), opt=opt, lr=1e-3)
    second_result = step(result.params, batch, opt=result.opt, lr=torch.tensor(1e-3))
    print(callbacks.measure(result, 0.1, workload)["loss"])
    print(result.timeline.makespan, [gradient["w"] for gradient in second_result.grads], second_result.norm.item())
    return result.loss.item()


def train_on_documents(model: fpipe.Model, params: Sequence[Params], rows: Sequence[Batch]) -> float:
    step: fpipe.Step = fpipe.build(lambda count: fpipe.split(count, presplit=True)(fpipe.program(model)), model)
    microbatches, mask, waste = fpipe.pad(fpipe.pack(rows, tokens=4096, multiple=2), to=2**0.5)
    print(waste, len(mask))
    return step(params, microbatches).loss.item()


def by_torch_optim(step: fpipe.Step, params: Sequence[Params], batch: Batch, mesh: DeviceMesh) -> float:
    result = step(params, batch)
    grads, norm = fpipe.clip_grads(fpipe.add_grads(result.grads, result.grads), 1.0, mesh=mesh)
    fpipe.assign_grads(params, grads)
    return float(norm - fpipe.global_norm(grads))


def record_and_judge(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> str:
    with fpipe.record_run("run", net=net, optimizer=optimizer) as record, record.step(batch, clip=1.0):
        with record.microbatch(batch):
            torch.autograd.backward(loss(net(batch[0]), batch[1]))
        record.reduced()
        record.clipped(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()
    report = fpipe.compare_run(net, "run", loss=loss)
    return f"{report.where} {report.phase} {report.mistake}"


def verify_all(program: fpipe.Program, model: fpipe.Model, params: Sequence[Params], batch: Batch) -> str:
    try:
        report: fpipe.Report = fpipe.verify(program, model, params, batch)
        plain = fpipe.reference(model, params, batch, microbatches=8)
        fpipe.compare_grads(model, params, batch, plain.grads)
        fpipe.compare_step(model, params, batch, params, rule="SGD", lr=0.1)
    except fpipe.GradientMismatch as mismatch:
        return str(mismatch.report)
    except (fpipe.ProgramError, fpipe.RankError, fpipe.StepChanged) as error:
        return str(error)
    return f"{report.bitwise} {report.max_error} {[leaf.name for leaf in report.leaves]}"


def derivatives(model: fpipe.Model, params: Params, x: Tensor) -> list[fpipe.Model]:
    dual: fpipe.Dual = fpipe.make_dual(params, params)
    print(fpipe.unpack_dual(dual))
    cut: fpipe.Linearized = fpipe.linearize(layer, params, x)
    print(cut)
    return [fpipe.jvp(model), fpipe.per_example(model)]


def use_parts(model: fpipe.Model, program: fpipe.Program, folder: Path, mesh: DeviceMesh) -> Sequence[Params | None]:
    params: Sequence[Params | None] = fpipe.init_params(model, program, rank=0, seed=1)
    local_params = fpipe.shard_params(fpipe.local_params(program, params, rank=0), mesh)
    fpipe.save(folder, program, local_params, mesh=mesh, step=3)
    loaded = fpipe.load(folder, program, local_params, mesh=mesh)
    everything = fpipe.gather_state_dict(program, loaded.params, mesh=mesh)
    joined = fpipe.join_params(model, params)
    print(everything, fpipe.split_params(model, joined))
    return fpipe.load_params(model, program, joined)


def seconds(op: fpipe.Op) -> float:
    return 0.0 if op.stage else 1.0


def sgd(weight: Tensor, gradient: Tensor, state: Params, *, lr: float) -> tuple[Tensor, Params]:
    return weight - lr * gradient, state


def register_all(rule: Callable[..., Sequence[Tensor]]) -> fpipe.Stage:
    fpipe.register_kind("NOTE", fpipe.Kind("after"))
    fpipe.register_cost("NOTE", seconds)
    fpipe.register_meaning("NOTE", rule)
    fpipe.register_update("plain", sgd)
    fpipe.register_spec("rows", fpipe.Chunk(0))
    print(fpipe.Replicate(), fpipe.Sum())
    return fpipe.Stage(layer)


def smallest_first(op: fpipe.Op, state: schedules.RankState) -> tuple[float, int]:
    return state.time, op.microbatch or 0


def in_order(rank: int, ranks: int, microbatches: int) -> Iterator[str]:
    for index in range(microbatches):
        yield f"{rank}F{index}"
        yield f"{rank}B{index}"


def custom_schedules(ranks: int) -> list[Callable[[fpipe.Program], fpipe.Program]]:
    schedules.register("of_mine", schedules.gpipe)
    facts: schedules.Schedule = schedules.about("zbv")
    print(facts.source, schedules.names(), schedules.get("gpipe")(2))
    return [
        schedules.from_generator(in_order, ranks),
        schedules.from_priority(smallest_first, ranks),
        schedules.from_table("0F0 0B0"),
        schedules.hanayo(ranks, waves=2),
        schedules.pipedream(ranks, steps=4),
        schedules.pipedream_2bw(ranks, steps=4),
    ]


def exchange_with_torch(program: fpipe.Program, model: fpipe.Model, params: Sequence[Params]) -> fpipe.Program:
    table = torch_pipelining.to_csv(program, format="compute_comms")
    ours = torch_pipelining.from_csv(table)
    placed = torch_pipelining.schedule(table)(ours), torch_pipelining.gathers(table)
    stages = torch_pipelining.stages(program, model, params)
    print(placed, torch_pipelining.runtime(program, model, stages), torch_pipelining.grads(stages))
    tables: list[str] = [interop.to_megatron(ours), interop.to_primus(ours)]
    assert all(tables)
    return interop.from_json(interop.to_json(ours))


def check_laws() -> testing.Checked:
    try:
        return testing.check_schedule(schedules.gpipe, ranks=(2,), microbatches=(4,))
    except testing.BrokenLaw as broken:
        raise SystemExit(str(broken)) from broken
