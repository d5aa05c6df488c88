"""Run one rank of a program in this process: the others run in processes of their own, on `torch.distributed`.

    process 0: 0F0 SEND(y)        -- gloo -->        process 1: RECV(y) 1F0

Each process has the whole program and knows the shapes of all values, so no rank asks another while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.meaning.inputs_and_results import check_match, example_key
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.step import Step, StepInputs, StepOptions
from fpipe.meaning.step_by_count import ProgramOfCount
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Output, Program
from fpipe.runtimes.capture.captured_step import with_device_numbers
from fpipe.runtimes.faults.agreement import (
    claims_of_build,
)
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import watchdog_of_process
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.processes.captured_rank_step import refuse_uncapturable_messages
from fpipe.runtimes.processes.exchange_lane import ExchangeLane, bind_exchanges
from fpipe.runtimes.processes.message_order import messages_of, with_results_last
from fpipe.runtimes.processes.rank_step import RankLinks
from fpipe.runtimes.processes.rank_steps import (
    COMPILE_SECONDS,
    CheckBatch,
    RankSteps,
    as_meta,
    claim_of_count,
    end_run_on_error,
)
from fpipe.runtimes.processes.replicas import Voters, group_of, refuse_wrong_size, replicas_of, with_reduced_last
from fpipe.runtimes.processes.step_header import (
    StepsByHeader,
    claims_by_count,
    merge_sides,
    refuse_other_exchanges,
    refuse_varying_counts,
    sides_of,
)
from fpipe.runtimes.processes.transfers import Transfers
from fpipe.torch_private.processes import timeout_of
from fpipe.transforms.communicate import with_transfers
from fpipe.verification.placements import check_placements


@dataclass(frozen=True)
class ProcessOptions:
    """Options of `build` that only processes have.

    Attributes:
        mesh: the processes, in named dimensions; None for the default group.
        example: params, batch and state, whose shapes all ranks know.
        timeout: seconds to wait for another rank; None for the group's.
        broadcast: whether every rank gets the loss.
        check_batch: when the ranks of a replica compare their batches.
        make_program: returns the program for a number of microbatches, if it follows from the batch.
    """

    mesh: DeviceMesh | None
    example: Any
    timeout: float | None
    broadcast: bool
    check_batch: CheckBatch
    make_program: ProgramOfCount | None = None


def build_rank_step(
    program: Program,
    model: Model,
    check_arguments: Callable[[], tuple[Any, Any, Any]],
    step_options: StepOptions,
    process_options: ProcessOptions,
) -> Step:
    """Build the step of one rank; all ranks call it with the same program and model.

    Many calls below wait for other ranks, and these for them: all ranks must make them in the same order.

    Args:
        program, model: of all ranks.
        check_arguments: returns the checked example, or raises. It is called once errors reach the other ranks.
        step_options: options of every runtime.
        process_options: options of this runtime.
    """
    # 1. Find this process's rank, and start to watch, so that an error from here on reaches the other ranks.
    mesh, make_program = process_options.mesh, process_options.make_program
    group = group_of(program, mesh)
    rank, processes = group.rank(), dist.get_process_group_ranks(group)
    device = next(
        (leaf.device for leaf in tree.leaves(process_options.example) if isinstance(leaf, Tensor) and not leaf.is_meta),
        torch.get_default_device(),
    )
    watchdog = watchdog_of_process()
    watchdog.refuse_after_end()
    names = [f"rank {number}" for number in range(len(processes))]
    meeting = Meeting(watchdog, processes, names)
    seconds = timeout_of(group).total_seconds() if process_options.timeout is None else process_options.timeout
    # The watchdog reads this list, which grows as the build makes groups.
    groups: list[Any] = [group, *(mesh.get_all_groups() if mesh is not None else ())]
    watchdog.faults.names = dict(zip(processes, names, strict=True))
    watchdog.begin(meeting.key, 0, seconds, groups)
    with end_run_on_error(watchdog):
        # 2. Connect to replicas and exchanges, and check the arguments.
        replicas = replicas_of(program, mesh, group, device, watchdog)
        model, axes = bind_exchanges(model, mesh)
        lane = ExchangeLane(axes, device, watchdog)
        signatures = Signatures(model)
        watchdog.faults.write_name()
        params, batch, state = check_arguments()
        if make_program is not None:
            sides = sides_of(batch)
            batch = merge_sides([sides], sides, program.microbatches)
            refuse_varying_counts(lane, step_options, replicas)
        groups += [*lane.groups.values(), *([] if replicas is None else replicas.groups)]
        shapes = StepInputs(*tree.tree_map(as_meta, (_fill_params(model, params), batch, state)))
        shapes = replace(shapes, optim=example_optim(program, shapes.params), key=example_key(program))
        shapes = with_device_numbers(shapes, device) if step_options.graph else shapes
        if step_options.graph:
            refuse_uncapturable_messages(program, group, device)
        # 3. Transform the program.
        recorded = program if step_options.record else None
        refuse_wrong_size(group, program, mesh)
        program = _lay_out(program, process_options.broadcast)
        # 4. Compare programs before any connection is made: ranks of other programs would wait for different messages.
        options = vars(step_options) | {"check_batch": process_options.check_batch}
        # A step in processes always runs.
        del options["runs"]
        all_ranks = meeting if replicas is None else replicas.meeting
        claims = claims_of_build(program, shapes.params, options)
        all_ranks.agree(_BUILDING, claims if make_program is None else claims_by_count(program, claims))

        # 5. Connect to the other ranks of the pipeline.
        def connect(program: Program, connected: Transfers | None = None) -> Transfers:
            link_options = meeting, device, timedelta(seconds=seconds), connected
            transfers = Transfers(messages_of(program), rank, group, watchdog, *link_options)
            groups.extend(new_group for new_group in transfers.groups if new_group not in groups)
            return transfers

        transfers = connect(program)
        links = RankLinks(rank, group, watchdog, transfers, replicas, lane)
        voters = Voters(group, "rank", watchdog, transfers.carrier_device)
        watch = partial(watchdog.begin, meeting.key, seconds=seconds, groups=groups)
        check_batch = process_options.check_batch
        steps = RankSteps(
            program,
            model,
            recorded,
            shapes,
            step_options,
            check_batch,
            links,
            meeting,
            voters,
            signatures,
            device,
            watch,
        )
        # 6. Lower the step for the example's signature.
        example_step = steps.prepare(shapes)
        lane.agree(_TRACED, example_step.exchange_lines)
        steps.agree(_TRACED, "example", example_step, None, {})
        if replicas is not None:
            all_ranks.agree(_TRACED, example_step.stage_claims, patience=COMPILE_SECONDS * step_options.compile)
    example_signature = signatures.of(*tree.flatten(shapes.trees), homes=repeat(device))
    steps.step_by_signature[example_signature, None] = example_step

    # 7. Programs of other numbers of microbatches join later, when all ranks of this replica come to their first step.
    def add_program(other_program: Program, step_number: int) -> RankSteps:
        check_match(other_program, model)
        refuse_wrong_size(group, other_program, mesh)
        laid_out = _lay_out(other_program, process_options.broadcast)
        refuse_other_exchanges(program, laid_out)
        program_claims = claim_of_count(laid_out) | {"program": str(laid_out).splitlines()}
        meeting.agree(f"step {step_number}", program_claims)
        other_links = links._replace(transfers=connect(laid_out, transfers))
        other_recorded = other_program if step_options.record else None
        return replace(steps, program=laid_out, recorded=other_recorded, links=other_links)

    steps_by_header = StepsByHeader(steps, make_program, add_program)
    return Step(program, model, steps_by_header.run, steps.report_errors)


_BUILDING = "building the step"
_TRACED = "building the step, after the trace"


def _lay_out(program: Program, broadcast: bool) -> Program:
    """Return the program with its messages, in the order in which a rank runs it."""
    check_placements(program)
    return with_reduced_last(with_results_last(with_transfers(_with_loss_ranks(program, broadcast))))


def _with_loss_ranks(program: Program, broadcast: bool) -> Program:
    """Return the program with the loss at home on rank 0 too, or on every rank if `broadcast`.

    Whether a step is valid, and its loss scale, all ranks get.
    """
    ranks = tuple(range(program.ranks))
    is_merged = sum(output.name.name == "loss" for output in program.outputs) <= program.steps

    def homes(output: Output) -> tuple[int, ...]:
        if output.name.name in ("valid", "scale") or (broadcast and output.name.name in ("loss", "aux")):
            return ranks
        return tuple(sorted({0, *output.homes})) if output.name.name == "loss" and is_merged else output.homes

    outputs = tuple(output._replace(homes=homes(output)) for output in program.outputs)
    return Program.trusted(program.inputs, program.ops, outputs)


def _fill_params(model: Model, params: Any) -> Any:
    """Return an example's parameters, with the net's own in place of None, for stages at home on other ranks."""
    if not isinstance(params, tuple | list) or len(params) != len(model.stages):
        return params
    nets = [stage.forward if isinstance(stage.forward, PositionalStage) else None for stage in model.stages]
    return tuple(
        {param_names[0]: getattr(*net.home_of(param_names[0])) for param_names in model.owned_param_names(stage)}
        if stage_params is None and net
        else stage_params
        for stage, (stage_params, net) in enumerate(zip(params, nets, strict=True))
    )
