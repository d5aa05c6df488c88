"""Bind a program to a model: the step that trains.

Each runtime is imported when it is asked for: `trace=False` needs the definition alone, and the runtimes of one process
work on a torch that is built without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from fpipe.limits import argument_error, checked, is_allowed, is_transform
from fpipe.meaning.devices import check_devices
from fpipe.meaning.inputs_and_results import check_example, check_match, refuse_meta_constants
from fpipe.meaning.optimizers.optimizer_state import find_update
from fpipe.meaning.purity.attributes import warn_of_compiled
from fpipe.meaning.step import Step, StepOptions, check_autocast_dtype, repeat_if_invalid, under_autocast
from fpipe.meaning.step_by_count import ProgramOfCount, build_by_count, count_microbatches, program_of_count
from fpipe.meaning.walk import walk
from fpipe.model import Model, in_current_mode
from fpipe.program import Program, Value, require_program
from fpipe.transforms.communicate import with_transfers
from fpipe.transforms.update import with_waiting_updates

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from fpipe.runtimes.audit.audits import AuditSchedule
    from fpipe.runtimes.in_process.threads import Workers
    from fpipe.runtimes.processes.distributed import CheckBatch


def _report_refusal(error: Exception, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Tell all ranks that `build` refuses the arguments of this rank, for which they are about to wait."""
    program, model, *_ = (*args, None, None)
    if options.get("runtime") != "distributed" or not isinstance(program, Program) or not isinstance(model, Model):
        return
    from fpipe.runtimes.processes.distributed import ProcessOptions, build_rank_step

    def refuse() -> Any:
        raise error

    timeout = options.get("timeout")
    timeout = timeout if timeout is not None and is_allowed(timeout, float) and timeout > 0 else None
    process_options = ProcessOptions(options.get("mesh"), None, timeout, broadcast=False, check_batch="never")
    build_rank_step(program, model, refuse, StepOptions(), process_options)


@partial(checked, report=_report_refusal)
def build(
    program: Program | ProgramOfCount,
    model: Model,
    *,
    runtime: Literal["local", "threads", "distributed"] = "local",
    compile: bool = False,
    trace: bool = True,
    example: tuple[Any, ...] | None = None,
    record: bool = False,
    check_finite: bool = False,
    loss_scale: float = 1.0,
    mesh: DeviceMesh | None = None,
    timeout: float | None = None,
    broadcast: bool = False,
    check_batch: CheckBatch = "first",
    devices: Sequence[torch.device | str] | None = None,
    donate: bool = False,
    autocast: torch.dtype | None = None,
    audit: AuditSchedule = "first",
    hoist: bool = True,
    graph: bool = False,
) -> Step:
    """Build a pure step from a program and a model.

    Args:
        program: what to do, in which order; or a function of the number of microbatches that returns a program, such
            as `lambda m: chain(split(m, presplit=True), ..)(program(model))`. A step then takes a list of any length,
            and each number's program is built at its first call.
        model: the stages it is about.
        runtime: "local" runs the program in this process, one op after the other; "threads" in a thread for each rank,
            each with as many intra-op threads as the caller has, so `torch.set_num_threads(cores // ranks)` is a good
            number, and stages that run under autograd, without a trace, take turns; "distributed" one rank in this
            process, and the others in those of a gloo or NCCL group of torch.distributed.
        compile: let torch's inductor make machine code of each stage's F, R, B, I and W: gradients are the same to
            rounding, and no longer the same bits. Equal stages are compiled once, and what was compiled is kept in
            inductor's cache on disk. A line on stderr says how long it took. Needs a C++ compiler on the CPU. Lengths
            other than the first ones are compiled when they come a second time.
        trace: trace each stage once per signature (shapes, dtypes, strides), so that its Python runs no more, and cut
            its gradient into F, I and W. A stage that cannot be traced runs under autograd, with a warning; its I then
            computes what W hands over, and a run on zeros tells the shapes that it hands on. False runs every stage so.
        example: `(params, batch)` or `(params, batch, state)` to trace for at once, tensors or on the meta device;
            without it the first step of each signature does. In processes None will do for the parameters of other
            ranks' stages, where these are a net's.
        record: also return when each op ran and the most bytes each rank held, as `Result.timeline`;
            of runtime="distributed" on all ranks, put on one clock.
        check_finite: raise `FloatingPointError` at the first op that writes NaN or an infinite number.
        loss_scale: what the cotangent of the loss is multiplied by, so that small gradients do not vanish in float16.
            The gradients come multiplied by it; look for infinite ones and divide, as torch's GradScaler does and
            `update(loss_scale=)` in the program. The loss itself stays as it is.
        mesh: of runtime="distributed", the DeviceMesh whose dimension "pp" has a process for each rank, and that of
            `data_parallel` one for each replica; without it torch.distributed's default group. Each process passes and
            gets only what is its own (`local_params`), and None for other ranks' stages; all of a replica pass its
            batch, or None for the side of it that is at home elsewhere, whatever its lengths. Its other dimensions are
            of processes that share stages, whose parameters may be DTensors over them.
        timeout: of runtime="distributed", seconds to wait for another rank; without it the group's own.
        broadcast: of runtime="distributed", whether every rank gets the loss, and not only rank 0 and the one that
            computes it.
        check_batch: of runtime="distributed", when the ranks of a replica compare a hash of the batches that they were
            handed: "first" in the first 10 steps and every 100th, "always" or "never". Replicas that were handed the
            same rows are warned of.
        devices: of runtime="threads", the device of each rank, `["cuda:0", "cuda:1"]`, where the parameters and the
            state of its stages are; the batch may be anywhere. Each rank computes on a stream of its own, and values
            are copied between devices on others. Without it all ranks compute where the tensors are, on the caller's
            stream.
        donate: of a program with an `update`, whether a step may overwrite the parameters and optimizer state that it
            is handed, which are the next ones then, in the same memory. Without it there is one more copy of both. A
            step that fails does not undo what it has overwritten, and its error says so.
        autocast: what ops compute in that may be less precise, torch.bfloat16 or torch.float16: steps are built and run
            under `torch.autocast` to it, but for backwards, as torch advises. Parameters, gradients and the optimizer's
            state stay as they are. Without it steps are as the context around them says.
        audit: when a step proves itself: each rank takes one stage and one microbatch of the step that it just ran, and
            runs it again by its definition, the modules and functions of now under plain autograd. Outputs and
            gradients are compared bit by bit (of compiled code to rounding), and hooks and children of modules with the
            cut; of a net from `from_module` or `from_loss`, in one process, every other audit is of the whole net.
            "first" does so in the first 3 steps of a signature and every 100th (each 200th .. 3,200th
            of a step so short that it would take more than half a percent of the time), a number n in every n-th,
            "always" in each, "never" in none.
        hoist: whether each version of the parameters of a stage is cast, transposed and normed once for all
            microbatches. So is whatever else depends on parameters and constants alone, unless it is larger than these
            and no backward reads it. It is kept from its first reader to its last. False computes it in each F, which
            hands it to B as a residual.
        graph: on an accelerator, whether the whole step is captured as one graph of the device, once
            for each signature behind two steps without it. Later steps copy the batch in, replay the graph and copy the
            results out. Parameters, state and optimizer state that come at the same address are read where they are,
            and others are copied in; with `donate` they are updated in place. Rules of torch.optim run with
            capturable=True, and lr is a 0-d tensor on the device. Audits compare its replay with its ops. With NCCL
            each process captures its part; not for runtime="threads".

    Returns:
        `step(params, batch, *, state=None, key=None, opt=None, lr=None, scale=None) -> Result`, which changes nothing
        that it is given, but what is donated. Of a program with an `update` it takes `opt`, as `optimizer_state` makes
        it, a learning rate, and with a loss scale that.

    Raises:
        RuntimeError: of compile=True, inductor cannot compile a stage; why.
        ValueError: the program is not one of this model, the example is not what a step takes, the runtime or
            check_batch is not known, a switch is no bool, graph=True
            comes with an option that looks at single ops, the loss scale or the timeout is no number above 0, or
            autocast is to no half precision. Of runtime="distributed" also: there is no group of that size, a stage can
            neither be traced nor run on zeros, or the ranks are about to do different things. Its step raises one too
            where ranks were handed different batches, or replicas different parameters or learning rates.
        StepChanged: in a step, an audit finds something else than its trace does; what, and by how much.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(1), fpipe.merge())(fpipe.program(model))
    >>> step = fpipe.build(program, model)
    >>> result = step(({"w": torch.tensor(3.0)},), (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])))
    >>> result.loss.item(), result.grads[0]["w"].item()
    (22.5, 15.0)
    """
    if is_transform(program):
        raise argument_error("program", Program, program)
    is_timeout_valid = timeout is None or timeout > 0
    model = in_current_mode(model)
    make_program = None if isinstance(program, Program) or not callable(program) else program
    example_count = 0 if make_program is None or example is None else count_microbatches(example[1])
    if compile is not True:
        warn_of_compiled([*(stage.forward for stage in model.stages), model.loss], 2)

    # 1. Check the arguments. In processes this runs inside of the runtime, which reports an error to the other ranks.
    def check_arguments(program: Program) -> Any:
        if graph:
            from fpipe.runtimes.capture.refusals import refuse_graph_options

            refuse_graph_options(runtime, trace=trace, record=record, check_finite=check_finite)
        if runtime == "threads" and not trace:
            raise ValueError("threads need traces: say runtime='local' with trace=False.")
        if compile and not trace:
            raise ValueError("compile=True compiles traces; say trace=True.")
        if check_batch not in ("first", "always", "never"):
            raise ValueError(f"check_batch is 'first', 'always' or 'never'; found {check_batch!r}.")
        if audit not in ("first", "always", "never") and (type(audit) is not int or audit < 1):
            raise ValueError(f"audit is 'first', 'always', 'never' or a number above 0; found {audit!r}.")
        if runtime != "distributed" and (
            mesh is not None or timeout is not None or broadcast or check_batch != "first"
        ):
            raise ValueError("mesh=, timeout=, broadcast= and check_batch= are of runtime='distributed'.")
        if not is_timeout_valid:
            raise ValueError(f"timeout is a number of seconds above 0; found {timeout!r}.")
        if devices is not None and runtime != "threads":
            raise ValueError("devices= is of runtime='threads' only.")
        if not isfinite(loss_scale) or loss_scale <= 0:
            raise ValueError(f"loss_scale is a finite number above 0; found {loss_scale!r}.")
        check_autocast_dtype(autocast)
        if loss_scale != 1.0 and any(value == Value("scale") for value, _ in require_program(program).inputs):
            raise ValueError("steps of this program take a scale: leave loss_scale= out.")
        if donate and find_update(program) is None:
            raise ValueError("donate= needs a program with fpipe.update().")
        check_match(program, model)
        refuse_meta_constants(model)
        if model.fingerprint is not None:
            model.fingerprint.refuse_changed()
        if example is None and runtime == "distributed":
            raise ValueError(_NEEDS_EXAMPLE)
        return None if example is None else check_example(example)

    # 2. Choose what builds the step of a program on this runtime.
    options = StepOptions(
        trace, compile, record, check_finite, float(loss_scale), audit=audit, hoist=hoist, graph=graph
    )
    if runtime == "distributed":
        from fpipe.runtimes.processes.distributed import ProcessOptions, build_rank_step

        process_options = ProcessOptions(mesh, example, timeout if is_timeout_valid else None, broadcast, check_batch)
        if make_program is not None:
            if example is None:
                raise ValueError(_NEEDS_EXAMPLE)
            program = program_of_count(make_program, example_count)
        first_program = program

        def build_step(program: Program, donate: bool) -> Step:
            # The second step of validate="after" comes with another program: its updates wait, for any count.
            waits = program is not first_program
            make = None if make_program is None else partial(_make_waiting if waits else program_of_count, make_program)
            check = partial(check_arguments, program)
            step_options = replace(options, donate=donate)
            return build_rank_step(program, model, check, step_options, replace(process_options, make_program=make))

    else:
        # Before autocast is on, where torch would warn of it.
        check_autocast_dtype(autocast)

        @cache
        def workers_of(ranks: int) -> Workers:
            from fpipe.runtimes.in_process.threads import Workers

            return Workers(ranks)

        built_counts = set[int]()

        def build_step(program: Program, donate: bool) -> Step:
            step_example = check_arguments(program)
            compiles_first = not built_counts - {program.microbatches}
            built_counts.add(program.microbatches)
            if make_program is not None and program.microbatches != example_count:
                step_example = None
            rank_devices = () if devices is None else check_devices(devices, program.ranks)
            if not trace:
                # A timeline shows transfers too.
                transferred = with_transfers(program) if record else program
                return walk(transferred, model, options, recorded=program if record else None)
            from fpipe.runtimes.in_process.local import build_local_step

            return build_local_step(
                program,
                model,
                replace(options, donate=donate),
                example=step_example,
                compiles_first=compiles_first,
                workers=workers_of(program.ranks) if runtime == "threads" else None,
                devices=rank_devices,
            )

    # 3. Build. With validate="after" these are two steps: a second one, whose updates wait, repeats a clipped call.
    def build_program(program: Program) -> Step:
        return repeat_if_invalid(program, build_step, donate)

    if make_program is not None and runtime != "distributed":
        return under_autocast(autocast, lambda: build_by_count(make_program, build_program, example_count))
    return under_autocast(autocast, lambda: build_program(require_program(program)))


_NEEDS_EXAMPLE = (
    "runtime='distributed' needs example=(params, batch), for which meta tensors will do: each rank must know the "
    "shapes of all."
)


def _make_waiting(make_program: ProgramOfCount, count: int) -> Program:
    return with_waiting_updates(program_of_count(make_program, count))
