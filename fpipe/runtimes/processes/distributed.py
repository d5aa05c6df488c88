"""Run one rank of a program in this process: the others run in processes of their own, on `torch.distributed`.

    process 0: 0F0 SEND(y)        -- gloo -->        process 1: RECV(y) 1F0

Each process has the whole program and knows the shapes of all values, so no rank asks another while a step runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
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
from fpipe.meaning.purity.attributes import quote_user_line
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.purity.write_guard import is_strided
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Keys, Step, StepInputs, StepOptions
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Output, Program, Value, parts_of
from fpipe.runtimes.audit.audits import run_audited
from fpipe.runtimes.capture.captured_step import with_device_numbers
from fpipe.runtimes.capture.device_graph import GraphStreams
from fpipe.runtimes.faults.agreement import (
    Claims,
    claims_of_batch,
    claims_of_build,
    claims_of_settings,
    claims_of_start,
    claims_of_update,
    digest_claims,
)
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import Watchdog, watchdog_of_process
from fpipe.runtimes.lowering.prepared_step import DONATED_PARAMS_OVERWRITTEN
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.lowering.stage_calls import UNDER_AUTOGRAD, UntracedStages
from fpipe.runtimes.processes.captured_rank_step import CapturedRankStep, refuse_uncapturable_messages
from fpipe.runtimes.processes.exchange_lane import ExchangeLane, bind_exchanges
from fpipe.runtimes.processes.message_order import messages_of, with_results_last
from fpipe.runtimes.processes.rank_step import RankLinks, RankStep, RemoteLoss
from fpipe.runtimes.processes.replicas import Voters, group_of, refuse_wrong_size, replicas_of, with_reduced_last
from fpipe.runtimes.processes.transfers import Transfers
from fpipe.torch_private.processes import timeout_of
from fpipe.transforms.communicate import with_transfers
from fpipe.verification.placements import check_placements

CheckBatch = Literal["first", "always", "never"]
_FIRST_STEPS, _INTERVAL = 10, 100


def is_compared(check_batch: CheckBatch, step: int) -> bool:
    """Return whether ranks compare the batches that they are handed in this step.

    >>> [step for step in range(1, 301) if is_compared("first", step)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 100, 200, 300]
    """
    return check_batch == "always" or (check_batch == "first" and (step <= _FIRST_STEPS or step % _INTERVAL == 0))


@dataclass(frozen=True)
class ProcessOptions:
    """Options of `build` that only processes have.

    Attributes:
        mesh: the processes, in named dimensions; None for the default group.
        example: params, batch and state, whose shapes all ranks know.
        timeout: seconds to wait for another rank; None for the group's.
        broadcast: whether every rank gets the loss.
        check_batch: when the ranks of a replica compare their batches.
    """

    mesh: DeviceMesh | None
    example: Any
    timeout: float | None
    broadcast: bool
    check_batch: CheckBatch


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
    mesh = process_options.mesh
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
    with _end_run_on_error(watchdog):
        # 2. Connect to replicas and exchanges, and check the arguments.
        replicas = replicas_of(program, mesh, group, device, watchdog)
        model, axes = bind_exchanges(model, mesh)
        lane = ExchangeLane(axes, device, watchdog)
        signatures = Signatures(model)
        watchdog.faults.write_name()
        params, *batch_and_state = check_arguments()
        groups += [*lane.groups.values(), *([] if replicas is None else replicas.groups)]
        shapes = StepInputs(*tree.tree_map(_on_meta, (_fill_params(model, params), *batch_and_state)))
        shapes = replace(shapes, optim=example_optim(program, shapes.params))
        shapes = with_device_numbers(shapes, device) if step_options.graph else shapes
        if step_options.graph:
            refuse_uncapturable_messages(program, group, device)
        # 3. Transform the program.
        recorded = program if step_options.record else None
        refuse_wrong_size(group, program, mesh)
        check_placements(program)
        program = with_transfers(_with_loss_ranks(program, process_options.broadcast))
        program = with_reduced_last(with_results_last(program))
        # 4. Compare programs before any connection is made: ranks of other programs would wait for different messages.
        options = vars(step_options) | {"check_batch": process_options.check_batch}
        # A step in processes always runs.
        del options["runs"]
        all_ranks = meeting if replicas is None else replicas.meeting
        all_ranks.agree(_BUILDING, claims_of_build(program, shapes.params, options))
        # 5. Connect to the other ranks of the pipeline.
        transfers = Transfers(messages_of(program), rank, group, watchdog, meeting, device, timedelta(seconds=seconds))
        groups += transfers.groups
        links = RankLinks(rank, group, watchdog, transfers, replicas, lane)
        voters = Voters(group, "rank", watchdog, transfers.carrier_device)
        watch = partial(watchdog.begin, meeting.key, seconds=seconds, groups=groups)
        check_batch = process_options.check_batch
        steps = _RankSteps(
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
            all_ranks.agree(_TRACED, example_step.stage_claims, patience=_COMPILE_SECONDS * step_options.compile)
    example_signature = signatures.of(*tree.flatten(shapes.trees), homes=repeat(device))
    steps.step_by_signature[example_signature] = example_step
    return Step(program, model, steps.run, steps.report_errors)


@dataclass
class _RankSteps:
    """The steps of one rank: a lowered one for each signature, and their common state.

    Attributes:
        program, model: with the transfers of the program, and the exchanges of the model.
        recorded: the program of the record that a step returns, if any.
        shapes: the example's arguments, of all ranks, without data.
        step_options, check_batch: options of `build`.
        links, meeting, voters: the connections to other ranks: to pass values, to compare claims and to end a step.
        signatures: computes the signatures of arguments.
        device: the device of the example.
        watch: begins to watch the step of a number.
        begun: how many steps have begun.
    """

    program: Program
    model: Model
    recorded: Program | None
    shapes: StepInputs
    step_options: StepOptions
    check_batch: CheckBatch
    links: RankLinks
    meeting: Meeting
    voters: Voters
    signatures: Signatures
    device: torch.device
    watch: Callable[[int], None]
    begun: int = 0

    def __post_init__(self) -> None:
        self.step_by_signature = LRUCache[Any, RankStep](_MAX_SIGNATURES)
        loss_outputs = [output for output in self.program.outputs if output.name == Value("loss")]
        self.loss_ranks = [home for output in loss_outputs for home in output.homes]
        self.net_stages = [s.forward for s in self.model.stages if isinstance(s.forward, PositionalStage)]
        self.graph_streams = GraphStreams() if self.step_options.graph else None

    def prepare(self, inputs: StepInputs) -> RankStep:
        traces = self.step_options.trace
        untraced = UntracedStages({} if traces else dict.fromkeys(range(len(self.model.stages)), "trace=False"))
        # Each round finds one more stage that cannot be traced, and runs it on zeros in the next.
        while True:
            try:
                arguments = self.links, self.program, self.model, inputs, untraced, self.step_options
                if self.graph_streams is None:
                    prepared = RankStep(*arguments)
                else:
                    all_ranks = self.meeting if self.links.replicas is None else self.links.replicas.meeting
                    prepared = CapturedRankStep(self.graph_streams, all_ranks, *arguments)
                break
            except Untraceable as error:
                # A ValueError is about the call itself, and every runtime raises it.
                if error.stage is None and isinstance(error.__cause__, ValueError):
                    raise error.__cause__ from None
                if error.stage is None or error.stage in untraced.stages:
                    reason = untraced.with_reasons(error)
                    line_note = f"\n  {line}" if (line := quote_user_line(error)) else ""
                    raise ValueError(
                        f"{reason}. In processes a stage must be traceable, or run on zeros; or say "
                        f"runtime='threads' or 'local'.{line_note}"
                    ) from error
                untraced.stages[error.stage] = str(error)
        forwards = [op for op in parts_of(self.program.ops) if op.kind == "F"]
        local_stages = {op.stage for op in forwards if op.rank == self.links.rank}
        for stage, reason in untraced.unexpected_reasons() if traces else ():
            if stage in local_stages:
                warnings.warn(f"{UNDER_AUTOGRAD}: {reason}", stacklevel=4)
        return prepared

    def agree(self, sync_point: str, input_name: str, prepared: RankStep, key: Keys, more_claims: Claims) -> None:
        """Compare the signature of a step between the ranks of the pipeline, and compile the step."""
        # In this order, since an error names the first claim that differs.
        claims: dict[str, str | Sequence[str]] = {input_name: prepared.input_lines, **more_claims, "key": str(key)}
        claims |= {**prepared.stage_claims, "messages": prepared.message_lines}
        self.meeting.agree(sync_point, claims)
        # Compilers take minutes, and longer on some ranks: the second agreement waits with more patience.
        if self.step_options.compile:
            prepared.compile()
            self.meeting.agree(f"{sync_point}, compiled", {}, patience=_COMPILE_SECONDS)
        prepared.signature_number = prepared.signature_number or self.links.transfers.add_signature(prepared.layouts)

    def run(self, local_inputs: StepInputs) -> Result:
        # 1. Find the lowered step of this signature, or lower it.
        step_number, key = self.begun, local_inputs.key
        inputs = _with_example_shapes(local_inputs, self.shapes)
        inputs = inputs if self.graph_streams is None else with_device_numbers(inputs, self.device)
        if any(stage.moved_params() for stage in self.net_stages):
            check_params(self.model, inputs.params)
        leaves, containers = tree.flatten(inputs.trees)
        signature = self.signatures.of(leaves, containers, homes=repeat(self.device))
        prepared = self.step_by_signature.get(signature)
        # At the first step the key is new to the other ranks.
        is_new = prepared is None or step_number == 1
        prepared = prepared or self.prepare(inputs)
        # 2. Compare with the other ranks what is new: a signature, settings, batches, and where training starts.
        compares_batch = is_compared(self.check_batch, step_number)
        batch_claims = claims_of_batch(local_inputs.batch) if compares_batch else None
        self.compare_step(step_number, local_inputs, prepared, is_new, batch_claims)
        if is_new:
            self.step_by_signature[signature] = prepared
        prepared.refuse_missing(leaves)
        # 3. Run the instructions.
        prepared.step = step_number
        prepared.key_number = hash(key) if isinstance(key, tuple) else key
        result = run_audited(prepared, leaves, inputs, recorded=self.recorded)
        # 4. Vote twice: the ranks of this replica, then this rank of all replicas. Only ranks whose replica is done
        # come to the second vote, so a process that passes both knows that no process can fail any more.
        update_claims = claims_of_update(local_inputs.optim)
        if local_inputs.optim is not None and self.links.group.size() > 1:
            self.voters.vote((), update_claims)
        if self.links.replicas is not None:
            self.links.replicas.vote(prepared.key_number, digest_claims(batch_claims or {}), update_claims)
        if result.loss is None and self.loss_ranks:
            result = replace(result, loss=RemoteLoss(self.loss_ranks[0]))
        if local_inputs.state is None:
            return result
        return replace(result, state=_local_state(result.state, local_inputs.state))

    def compare_step(
        self,
        step_number: int,
        local_inputs: StepInputs,
        prepared: RankStep,
        is_new: bool,
        batch_claims: Mapping[str, str] | None,
    ) -> None:
        """Compare the new facts of a step between ranks; `batch_claims` are None where batches are not compared.

        At the first step come the exchanges and the replicas, in this order.
        """
        replicas, start_claims = self.links.replicas, dict[str, str]()
        claims = {**claims_of_settings(), **(batch_claims or {})}
        if step_number == 1:
            share = None if replicas is None else replicas.share
            optim_state = local_inputs.optim and local_inputs.optim[0]
            start = local_inputs.params, optim_state, share
            start_claims = claims_of_start(self.program, self.model, self.links.rank, *start)
        if is_new:
            first_claims = start_claims if replicas is None else {}
            self.agree(f"step {step_number}", "arguments", prepared, local_inputs.key, claims | first_claims)
        elif batch_claims is not None:
            self.meeting.agree(f"step {step_number}", claims)
        if step_number == 1:
            self.links.lane.agree("step 1", prepared.exchange_lines)
            if replicas is not None:
                replicas.meeting.agree("step 1", {"key": str(local_inputs.key), **start_claims})

    @contextmanager
    def report_errors(self) -> Generator[None]:
        """Begin a step, and end the run for all ranks if it fails."""
        watchdog = self.links.watchdog
        watchdog.refuse_after_end()
        self.begun += 1
        self.watch(self.begun)
        with _end_run_on_error(watchdog, DONATED_PARAMS_OVERWRITTEN if self.step_options.donate else None):
            yield


@contextmanager
def _end_run_on_error(watchdog: Watchdog, note: str | None = None) -> Generator[None]:
    """End the run for all ranks if the build or step inside fails, and raise the error that tells why."""
    try:
        yield
    except BaseException as error:
        error_to_raise = watchdog.end_run(error)
        if note is not None:
            error_to_raise.add_note(note)
        if error_to_raise is error:
            raise
        raise error_to_raise from error
    finally:
        watchdog.finish()


_BUILDING = "building the step"
_TRACED = "building the step, after the trace"
_COMPILE_SECONDS = 1800.0
_MAX_SIGNATURES = 128


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


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or is_sharded(leaf) or not is_strided(leaf):
        return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf
    # `.to("meta")` makes a view with gaps, such as a shard, contiguous, and the signature has strides.
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


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


def _with_example_shapes(local_inputs: StepInputs, shapes: StepInputs) -> StepInputs:
    """Put the example's shapes in place of None, for arguments that are at home on other ranks."""

    def fill(per_stage: Any, example_stages: Any) -> Any:
        if per_stage is None or not isinstance(per_stage, tuple | list) or len(per_stage) != len(example_stages or ()):
            return example_stages if per_stage is None else per_stage
        pairs = zip(per_stage, example_stages, strict=True)
        return type(example_stages)(shape if stage is None else stage for stage, shape in pairs)

    optim = local_inputs.optim
    if optim is not None and shapes.optim is not None:
        optim = (fill(optim[0], shapes.optim[0]), *optim[1:])
    params, batch = fill(local_inputs.params, shapes.params), fill(local_inputs.batch, shapes.batch)
    state = fill(local_inputs.state, shapes.state)
    return replace(local_inputs, params=params, batch=batch, state=state, optim=optim)


def _local_state(state: Any, local_state: Sequence[Any]) -> Any:
    """Return the state, with None for stages whose state this rank was not handed."""
    if state is None:
        return None
    pairs = zip(state, local_state, strict=True)
    return tuple(None if given_state is None else stage_state for stage_state, given_state in pairs)
