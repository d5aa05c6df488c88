"""Run one rank of a program in this process: the others run in processes of their own, on `torch.distributed`.

    process 0: 0F0 SEND(y)        -- gloo -->        process 1: RECV(y) 1F0

Each process has the whole program and knows the shapes of all of it, so nothing is asked while a step runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import repeat
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe import tree
from fpipe.graphs.tracing.trace_cache import LRUCache
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import line_of
from fpipe.meaning.purity.own_memory import is_strided
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Keys, Step, StepInputs, StepOptions
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Output, Program, Value, parts_of
from fpipe.runtimes.audit.audits import run_audited
from fpipe.runtimes.faults.agreement import About, around, digest, of_batch, of_build, of_optim, of_start
from fpipe.runtimes.faults.fault_store import RankError
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import Watchdog, watchdog_of_run
from fpipe.runtimes.lowering.prepared import GONE
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.lowering.stage_calls import UNDER_AUTOGRAD, Untraced
from fpipe.runtimes.processes.exchange_lane import ExchangeLane, over_mesh
from fpipe.runtimes.processes.message_order import messages, results_last
from fpipe.runtimes.processes.prepared_rank import Elsewhere, PreparedRank, RankLinks
from fpipe.runtimes.processes.replicas import Voters, group_of, reduced_last, refuse_other_size, replicas_of
from fpipe.runtimes.processes.transfers import Transfers
from fpipe.torch_private.processes import timeout_of
from fpipe.transforms.communicate import with_transfers

CheckBatch = Literal["first", "always", "never"]
_FIRST, _EVERY = 10, 100


def is_compared(check: CheckBatch, step: int) -> bool:
    """Whether ranks compare the batches that they are handed in this step.

    >>> [step for step in range(1, 301) if is_compared("first", step)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 100, 200, 300]
    """
    return check == "always" or (check == "first" and (step <= _FIRST or step % _EVERY == 0))


@dataclass(frozen=True)
class ProcessOptions:
    """Options of `build` that only processes have.

    Attributes:
        mesh: the processes, by the names of their dimensions; None for the default group.
        example: params, batch and state, of which the shapes are known everywhere.
        timeout: seconds to wait for another rank; None for the group's.
        broadcast: whether every rank gets the loss.
        check_batch: when the ranks of a replica compare what they were handed.
    """

    mesh: DeviceMesh | None
    example: Any
    timeout: float | None
    broadcast: bool
    check_batch: CheckBatch


def distributed(
    program: Program,
    model: Model,
    checked: Callable[[], tuple[Any, Any, Any]],
    step_options: StepOptions,
    links: ProcessOptions,
) -> Step:
    """Make the step of one rank, which all ranks call alike.

    `checked` refuses the arguments of `build`, or returns the example. It is called once there is a way to report an
    error to the other ranks.
    """
    mesh, compile, record, donate = links.mesh, step_options.compile, step_options.record, step_options.donate
    group = group_of(program, mesh)
    rank, processes = group.rank(), dist.get_process_group_ranks(group)
    device = next(
        (leaf.device for leaf in tree.leaves(links.example) if isinstance(leaf, Tensor) and not leaf.is_meta),
        torch.get_default_device(),
    )
    watchdog = watchdog_of_run()
    refuse_over(watchdog)
    names = [f"rank {number}" for number in range(len(processes))]
    meeting = Meeting(watchdog, processes, names)
    seconds = timeout_of(group).total_seconds() if links.timeout is None else links.timeout
    groups: list[Any] = [group, *(mesh.get_all_groups() if mesh is not None else ())]
    watchdog.faults.names = dict(zip(processes, names, strict=True))
    watchdog.begin(meeting.key, 0, seconds, groups)
    known, steps_begun = LRUCache[Any, PreparedRank](_MOST), 0

    def prepare(inputs: StepInputs) -> PreparedRank:
        untraced = Untraced({} if step_options.trace else dict.fromkeys(range(len(model.stages)), "trace=False"))
        links = RankLinks(rank, group, watchdog, transfers, replicas, lane)
        while True:
            try:
                prepared = PreparedRank(links, program, model, inputs, untraced, step_options)
                break
            except Untraceable as error:
                if error.stage is None and isinstance(error.__cause__, ValueError):  # refused, whoever runs it
                    raise error.__cause__ from None
                if error.stage is None or error.stage in untraced.stages:
                    why = untraced.with_words(error)
                    place = f"\n  {line}" if (line := line_of(error)) else ""
                    raise ValueError(
                        f"{why}. In processes a stage is traced, or runs on zeros first: write it so that one of the "
                        f"two works, or say runtime='threads' or 'local'.{place}"
                    ) from error
                untraced.stages[error.stage] = str(error)
        here = {op.stage for op in parts_of(program.ops) if op.kind == "F" and op.rank == rank}
        for stage, why in untraced.surprises() if step_options.trace else ():
            if stage in here:
                warnings.warn(f"{UNDER_AUTOGRAD}: {why}", stacklevel=4)
        return prepared

    def agree(where: str, what: str, prepared: PreparedRank, key: Keys, more: About) -> None:
        about = {what: prepared.given_as, **more, "key": str(key), **prepared.stages, "messages": prepared.messages}
        meeting.agree(where, about)
        if compile:
            prepared.compile()
            meeting.agree(f"{where}, compiled", {}, patience=_COMPILING)
        prepared.number = prepared.number or transfers.know(prepared.layouts)

    def run(local: StepInputs) -> Result:
        number, key = steps_begun, local.key
        inputs = _with_shapes(local, shapes)
        if any(stage.moved() for stage in of_nets):
            check_params(model, inputs.params)
        leaves, containers = tree.flatten(inputs.trees)
        signature = signatures.of(leaves, containers, homes=repeat(device))
        prepared = known.get(signature)
        is_new = prepared is None or number == 1  # at the first step the key is new
        prepared = prepared or prepare(inputs)
        batch_facts = of_batch(local.batch) if is_compared(links.check_batch, number) else {}
        facts = {**around(), **batch_facts}
        optim_state = local.optim and local.optim[0]
        start = of_start(program, model, rank, local.params, optim_state, share) if number == 1 else {}
        if is_new:
            agree(f"step {number}", "arguments", prepared, key, facts | (start if replicas is None else {}))
            known[signature] = prepared
        elif is_compared(links.check_batch, number):
            meeting.agree(f"step {number}", facts)
        if number == 1:
            lane.agree("step 1", prepared.exchanged)
        if number == 1 and replicas is not None:
            replicas.meeting.agree("step 1", {"key": str(key), **start})
        prepared.refuse_missing(leaves)
        prepared.step, prepared.step_key = number, hash(key) if isinstance(key, tuple) else key
        result = run_audited(prepared, leaves, inputs, recorded=recorded)
        # Whoever gets a result knows that all ranks of all replicas have theirs: when those of this replica are done,
        # and then this rank in each of the others, none is left that could fail.
        numbers = of_optim(local.optim)
        if local.optim is not None and group.size() > 1:
            voters.vote((), numbers)
        if replicas is not None:
            replicas.vote(prepared.step_key, digest(batch_facts), numbers)
        if result.loss is None and loss_ranks:
            result = replace(result, loss=Elsewhere(loss_ranks[0]))
        return result if local.state is None else replace(result, state=_local_state(result.state, local.state))

    @contextmanager
    def reported() -> Generator[None]:
        nonlocal steps_begun
        refuse_over(watchdog)
        steps_begun += 1
        watchdog.begin(meeting.key, steps_begun, seconds, groups)
        try:
            yield
        except BaseException as error:
            raised = watchdog.end_run(error)
            if donate:
                raised.add_note(GONE)
            if raised is error:
                raise
            raise raised from error
        finally:
            watchdog.finish()

    try:
        replicas = replicas_of(program, mesh, group, device, watchdog)
        model, axes = over_mesh(model, mesh)
        lane, signatures = ExchangeLane(axes, device, watchdog), Signatures(model)
        watchdog.faults.write_name()
        params, *more = checked()
        groups += [*lane.groups.values(), *([] if replicas is None else replicas.groups)]
        shapes = StepInputs(*tree.tree_map(_without_data, (_params_of_all(model, params), *more)))
        shapes = replace(shapes, optim=example_optim(program, shapes.params))
        recorded = program if record else None
        refuse_other_size(group, program, mesh)
        program = reduced_last(results_last(with_transfers(_with_results_for_all(program, links.broadcast))))
        loss_ranks = [rank for end in program.outputs if end.name == Value("loss") for rank in end.homes]
        of_nets = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
        options = vars(step_options) | {"check_batch": links.check_batch}
        del options["runs"]  # always true here
        everyone = meeting if replicas is None else replicas.meeting
        share = None if replicas is None else replicas.share
        everyone.agree(_BUILDING, of_build(program, shapes.params, options))
        transfers = Transfers(messages(program), rank, group, watchdog, meeting, device, timedelta(seconds=seconds))
        groups += transfers.groups
        voters = Voters(group, "rank", watchdog, transfers.carried)
        first = prepare(shapes)
        lane.agree(_TRACED, first.exchanged)
        agree(_TRACED, "example", first, None, {})
        if replicas is not None:
            everyone.agree(_TRACED, first.stages, patience=_COMPILING * compile)
    except BaseException as error:
        raised = watchdog.end_run(error)
        if raised is error:
            raise
        raise raised from error
    finally:
        watchdog.finish()
    known[signatures.of(*tree.flatten(shapes.trees), homes=repeat(device))] = first
    return Step(program, model, run, reported)


def refuse_over(watchdog: Watchdog) -> None:
    """Raise RankError if the run is over."""
    if watchdog.ended:
        raise RankError(f"the run is over, start all ranks again from a checkpoint: {watchdog.ended}")


_BUILDING = "building the step"
_TRACED = "building the step, after the trace"
_COMPILING = 1800.0
_MOST = 128


def _with_results_for_all(program: Program, broadcast: bool) -> Program:
    """Hand the loss to rank 0 too, or with `broadcast` to every rank, and to all whether their step is valid."""
    ranks = tuple(range(program.ranks))
    merged = sum(end.name.name == "loss" for end in program.outputs) <= program.steps

    def homes(end: Output) -> tuple[int, ...]:
        if end.name.name in ("valid", "scale") or (broadcast and end.name.name in ("loss", "aux")):
            return ranks
        return tuple(sorted({0, *end.homes})) if end.name.name == "loss" and merged else end.homes

    ends = tuple(end._replace(homes=homes(end)) for end in program.outputs)
    return Program.trusted(program.inputs, program.ops, ends)


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or is_sharded(leaf) or not is_strided(leaf):
        return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")  # a shard may be a view


def _params_of_all(model: Model, params: Any) -> Any:
    """Return an example's parameters, with those of the net in place of None: of stages at home on other ranks."""
    if not isinstance(params, tuple | list) or len(params) != len(model.stages):
        return params
    nets = [stage.forward if isinstance(stage.forward, PositionalStage) else None for stage in model.stages]
    return tuple(
        {names[0]: getattr(*net.home_of(names[0])) for names in model.living(stage)}
        if params_of is None and net
        else params_of
        for stage, (params_of, net) in enumerate(zip(params, nets, strict=True))
    )


def _with_shapes(local: StepInputs, shapes: StepInputs) -> StepInputs:
    """Put the example's shapes in place of None: arguments that are at home on other ranks."""

    def filled(per_stage: Any, example: Any) -> Any:
        if per_stage is None or not isinstance(per_stage, tuple | list) or len(per_stage) != len(example or ()):
            return example if per_stage is None else per_stage
        pairs = zip(per_stage, example, strict=True)
        return type(example)(shape if stage is None else stage for stage, shape in pairs)

    optim = local.optim
    if optim is not None and shapes.optim is not None:
        optim = (filled(optim[0], shapes.optim[0]), *optim[1:])
    params, batch = filled(local.params, shapes.params), filled(local.batch, shapes.batch)
    return StepInputs(params, batch, filled(local.state, shapes.state), optim, local.key)


def _local_state(state: Any, local: Sequence[Any]) -> Any:
    """Return the state, with None where this rank was handed none."""
    return None if state is None else tuple(a if b is not None else None for a, b in zip(state, local, strict=True))
