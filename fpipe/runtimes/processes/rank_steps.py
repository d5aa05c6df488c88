"""Run the steps of one rank: find or lower the step of a signature, agree with other ranks, run, and vote.

step(params, batch)        --> signature --> agree if it is new --> run --> vote -->        Result
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.tracing.trace_cache import LRUCache
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.attributes import quote_user_line
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.purity.write_guard import is_strided
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Keys, StepInputs, StepOptions
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Program, Value, parts_of
from fpipe.runtimes.audit.audits import run_audited
from fpipe.runtimes.capture.captured_step import with_device_numbers
from fpipe.runtimes.capture.device_graph import GraphStreams
from fpipe.runtimes.faults.agreement import (
    Claims,
    claims_of_batch,
    claims_of_settings,
    claims_of_start,
    claims_of_update,
    digest_claims,
)
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import Watchdog
from fpipe.runtimes.lowering.prepared_step import DONATED_PARAMS_OVERWRITTEN
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.lowering.stage_calls import UNDER_AUTOGRAD, UntracedStages
from fpipe.runtimes.processes.captured_rank_step import CapturedRankStep
from fpipe.runtimes.processes.rank_step import RankLinks, RankStep, RemoteLoss
from fpipe.runtimes.processes.replicas import Voters
from fpipe.torch_internals import warn

CheckBatch = Literal["first", "always", "never"]
_FIRST_STEPS, _INTERVAL = 10, 100


def is_compared(check_batch: CheckBatch, step: int) -> bool:
    """Return whether ranks compare the batches that they are handed in this step.

    >>> [step for step in range(1, 301) if is_compared("first", step)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 100, 200, 300]
    """
    return check_batch == "always" or (check_batch == "first" and (step <= _FIRST_STEPS or step % _INTERVAL == 0))


@dataclass
class RankSteps:
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
        step_by_signature: lowered steps, by signature and the index of the first microbatch, if replicas tell it.
        latest: the step that was prepared last, if any; shared, as the steps before, by all programs.
        has_one_signature: whether all steps have one signature, which a header has told.
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
    has_one_signature: bool = False
    step_by_signature: LRUCache[Any, RankStep] = field(default_factory=lambda: LRUCache(MAX_SIGNATURES))
    latest: list[RankStep] = field(default_factory=list[RankStep])
    graph_streams: GraphStreams | None = None

    def __post_init__(self) -> None:
        self._single_step: RankStep | None = None
        loss_outputs = [output for output in self.program.outputs if output.name == Value("loss")]
        self.loss_ranks = [home for output in loss_outputs for home in output.homes]
        self.net_stages = [s.forward for s in self.model.stages if isinstance(s.forward, PositionalStage)]
        if self.step_options.graph and self.graph_streams is None:
            self.graph_streams = GraphStreams()

    def prepare(self, inputs: StepInputs) -> RankStep:
        """Lower the step of a signature; what cannot be traced runs on zeros."""
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
                warn(f"{UNDER_AUTOGRAD}: {reason}", stacklevel=4)
        # The Python of a trace that is filled with other sizes was audited with the sizes before.
        if prepared.lowered.is_filled and not (self.step_options.compile or self.graph_streams):
            prepared.continue_audits(self.latest)
        self.latest[:] = [prepared]
        return prepared

    def agree(self, sync_point: str, input_name: str, prepared: RankStep, key: Keys, more_claims: Claims) -> None:
        """Compare the signature of a step between the ranks of the pipeline, and compile the example's step."""
        # In this order, since an error names the first claim that differs.
        claims: dict[str, str | Sequence[str]] = {**claim_of_count(self.program), input_name: prepared.input_lines}
        claims |= {**more_claims, "key": str(key), **prepared.stage_claims, "messages": prepared.message_lines}
        self.meeting.agree(sync_point, claims)
        # The example's signature is compiled at once, and further ones when they come a second time.
        if self.step_options.compile and not self.begun:
            self.compile(sync_point, prepared)
        prepared.signature_number = prepared.signature_number or self.links.transfers.add_signature(prepared.layouts)

    def compile(self, sync_point: str, prepared: RankStep) -> None:
        """Compile the kernels of a step on all ranks of the pipeline."""
        # Compilers take minutes, and longer on some ranks: this agreement waits with more patience.
        prepared.compile()
        self.meeting.agree(f"{sync_point}, compiled", {}, patience=COMPILE_SECONDS)

    def run(self, local_inputs: StepInputs) -> Result:
        """Run one step; all ranks call it."""
        # 1. Find the lowered step of this signature, or lower it.
        step_number, key = self.begun, local_inputs.key
        inputs = _with_example_shapes(local_inputs, self.shapes)
        inputs = inputs if self.graph_streams is None else with_device_numbers(inputs, self.device)
        if any(stage.moved_params() for stage in self.net_stages):
            check_params(self.model, inputs.params)
        leaves, containers = tree.flatten(inputs.trees)
        prepared, signature = self._single_step, None
        if prepared is None:
            signature = self.signatures.of(leaves, containers, homes=repeat(self.device)), self.links.first_microbatch
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
            # Text of all graphs, as large as the rest of a lowered step.
            prepared.stage_claims = {}
        if self.has_one_signature:
            self._single_step = prepared
        prepared.refuse_missing(leaves)
        if prepared.is_compile_due:
            self.compile(f"step {step_number}", prepared)
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
        with end_run_on_error(watchdog, DONATED_PARAMS_OVERWRITTEN if self.step_options.donate else None):
            yield


@contextmanager
def end_run_on_error(watchdog: Watchdog, note: str | None = None) -> Generator[None]:
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


COMPILE_SECONDS = 1800.0
MAX_SIGNATURES = 128


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


def claim_of_count(program: Program) -> dict[str, str]:
    """Return the claim of a program's number of microbatches, which is compared before what follows from it."""
    return {"number of microbatches": str(program.microbatches)}


def as_meta(leaf: Any) -> Any:
    """Return a leaf without its data."""
    if not isinstance(leaf, Tensor) or is_sharded(leaf) or not is_strided(leaf):
        return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf
    # `.to("meta")` makes a view with gaps, such as a shard, contiguous, and the signature has strides.
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
