"""Run a program in this process: prepared once for each signature of a step's arguments, then run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.tracing.trace_cache import LRUCache
from fpipe.meaning.devices import drop_duplicate_homes
from fpipe.meaning.inputs_and_results import example_key
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable, dispatch_modes, in_fake_mode
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Step, StepInputs, StepOptions
from fpipe.meaning.walk import walk
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Program, Value
from fpipe.runtimes.audit.audits import run_audited
from fpipe.runtimes.capture.captured_step import CapturedStep, with_device_numbers
from fpipe.runtimes.capture.device_graph import GraphStreams
from fpipe.runtimes.capture.refusals import NEEDS_TRACES
from fpipe.runtimes.in_process.threads import ThreadedStep, Workers
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.signature import TRACED_VISIT, Signatures
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import UNDER_AUTOGRAD, UntracedStages
from fpipe.runtimes.lowering.untraced_stages import UnexpectedValue
from fpipe.torch_internals import has_hooks_on_all_modules, warn
from fpipe.transforms.communicate import with_transfers


def build_local_step(
    program: Program,
    model: Model,
    options: StepOptions,
    *,
    example: tuple[Any, ...] | None = None,
    compiles_first: bool = True,
    workers: Workers | None = None,
    devices: Sequence[torch.device] = (),
    see: Callable[[Value, Any], None] | None = None,
) -> Step:
    """Build a pure step that runs in this thread, or with workers in a thread for each rank.

    Args:
        program, model, options: as of `build`.
        example: params, batch and state to trace for at once.
        compiles_first: whether to compile the first signature at once, and not when it comes a second time.
        workers: threads of the ranks.
        devices: the device of each rank.
        see: is called with each value and its leaves.
    """
    # 1. Bring the program into the form that runs. `walk` is the definition, for what cannot be traced.
    recorded = program if options.record else None
    program = drop_duplicate_homes(program, devices) if devices else program
    program = with_transfers(program) if options.record or workers else program
    reference_step = walk(program, model, options, recorded=recorded, see=see, devices=devices)
    graph_streams = GraphStreams()
    process = ProcessContext(devices=devices)

    def prepare(inputs: StepInputs, untraced: UntracedStages) -> PreparedStep:
        arguments = program, model, inputs, untraced, options, process
        if workers is not None:
            return ThreadedStep(workers, *arguments)
        if not options.graph:
            return PreparedStep(*arguments)
        return CapturedStep(graph_streams, *arguments)

    signatures = Signatures(model)
    # 2. Keep a lowered step for each signature; None for one that runs by the definition.
    net_stages = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    has_graphs = any(not stage.modules for stage in net_stages)
    has_only_graphs = model.loss is None and sum(not stage.modules for stage in net_stages) == len(model.stages)
    step_by_signature: LRUCache[Any, PreparedStep | None] = LRUCache(_MAX_SIGNATURES)
    # Lengths that change in each step would fill memory with steps that never come back.
    # A compiled or captured step takes far longer to make than to keep.
    is_costly = options.compile or options.graph
    filled_steps: LRUCache[Any, PreparedStep] = LRUCache(_MAX_SIGNATURES if is_costly else _MAX_FILLED)
    latest = list[PreparedStep]()  # the step that was prepared last
    # Sizes that cannot share a trace may never come back: each runs by the definition until it has.
    has_closed_sizes = False
    visits_by_signature: LRUCache[int, int] = LRUCache(_MAX_UNTRACED)

    def waits_for_trace(signature: Any) -> bool:
        visits = visits_by_signature[hash(signature)] = visits_by_signature.get(hash(signature), 0) + 1
        return has_closed_sizes and visits < TRACED_VISIT

    def find_step(signature: Any) -> Any:
        prepared = step_by_signature.get(signature, _UNKNOWN)
        return filled_steps.get(signature, _UNKNOWN) if prepared is _UNKNOWN else prepared

    if example is not None:
        # What cannot be traced is no error yet: the first step will warn of it.
        with _TRACE_LOCK, suppress(Untraceable):
            params, batch, state = example
            inputs = StepInputs(params, batch, state, example_optim(program, params), example_key(program))
            inputs = with_device_numbers(inputs) if options.graph else inputs
            prepared = prepare(inputs, UntracedStages())
            prepared.compile()
            compiles_first = False
            step_by_signature[signatures.of(*tree.flatten(inputs.trees), homes=prepared.leaf_devices)] = prepared

    def run(inputs: StepInputs) -> Result:
        nonlocal compiles_first, has_closed_sizes
        for mode in dispatch_modes() if workers else ():
            raise RuntimeError(
                f"a TorchDispatchMode is on ({type(mode).__name__}), which sees the ops of one thread alone; say "
                "runtime='local' for a step under it."
            )
        # A trace that was made under one FakeTensorMode has tensors of that mode, which no other step can use.
        if in_fake_mode():
            return reference_step.run(inputs)
        inputs = with_device_numbers(inputs) if options.graph else inputs
        # a. Look the signature up. Parameters of a net that have moved since the build are refused first.
        if any(stage.moved_params() for stage in net_stages):
            check_params(model, inputs.params)
        leaves, containers = tree.flatten(inputs.trees)
        try:
            signature = signatures.of(leaves, containers)
            prepared = find_step(signature)
        except (TypeError, Untraceable) as error:
            if has_graphs and has_hooks_on_all_modules():
                raise StepChanged(
                    "there are hooks on all modules, and no graph of a net calls them: remove them, or use "
                    "from_sequential."
                ) from None
            reason = f"a leaf cannot be compared ({error})" if isinstance(error, TypeError) else str(error)
            if options.graph:
                raise ValueError(NEEDS_TRACES.format(reason)) from error
            result = reference_step.run(inputs)
            warn(f"this step runs every stage under autograd: {reason}", stacklevel=3)
            return result
        # b. Lower a new signature. Its first step may have run by the definition on the way.
        if prepared is _UNKNOWN:
            with _TRACE_LOCK:
                # Another thread may have traced it while this one waited for the lock.
                prepared = find_step(signature)
                # A step on the meta device computes nothing, so a trace would not pay.
                if prepared is _UNKNOWN and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                    prepared = step_by_signature[signature] = None
                if prepared is _UNKNOWN:
                    start_time = time.perf_counter()
                    run_reference, lower = partial(reference_step.run, inputs), partial(prepare, inputs)
                    waits = waits_for_trace(signature)
                    traces_now = has_only_graphs and not waits
                    result, prepared = _prepare_first_step(run_reference, lower, traces_now, waits, options.graph)
                    if waits and prepared is None and result is not None:
                        return result
                    if prepared is not None and compiles_first:
                        prepared.compile()
                        compiles_first = False
                    if prepared is not None and prepared.lowered.is_filled:
                        filled_steps[signature] = prepared
                        if not is_costly:
                            prepared.continue_audits(latest)
                    else:
                        step_by_signature[signature] = prepared
                        if prepared is not None and not is_costly:
                            has_closed_sizes = has_closed_sizes or prepared.lowered.is_closed
                        seconds = time.perf_counter() - start_time
                        signatures.note_trace(signature, inputs.trees, seconds, has_closed_sizes)
                    latest[:] = [] if prepared is None else [prepared]
                    if result is not None:
                        return result
        # c. Run the instructions; None stands for a signature that runs by the definition.
        if not isinstance(prepared, PreparedStep):
            return reference_step.run(inputs)
        if prepared.is_compile_due:
            with _TRACE_LOCK:
                prepared.compile()
        try:
            return run_audited(prepared, leaves, inputs, recorded=recorded, see=see, has_whole_net=True)
        except UnexpectedValue as error:
            # The definition raises the stage's own error, if it has one.
            result = reference_step.run(inputs)
            step_by_signature[signature] = None
            warn(f"steps run every stage under autograd from now on: {error}", stacklevel=3)
            return result

    return Step(program, model, run)


_MAX_SIGNATURES = 128
_MAX_FILLED = 8
_MAX_UNTRACED = 4096
_UNKNOWN = object()
_TRACE_LOCK = threading.RLock()


def _prepare_first_step(
    run_reference: Callable[[], Result],
    prepare: Callable[[UntracedStages], PreparedStep],
    traces_now: bool,
    waits: bool,
    needs_traces: bool,
) -> tuple[Result | None, PreparedStep | None]:
    """Lower a first step, after a run by the definition if its stages are new; None for a part that is skipped.

    A step that `waits` is lowered only if all its traces are there.
    """
    # If all stages are graphs, or traced before, no Python of a user runs that could be wrong, or fill a cache.
    with suppress(Untraceable):
        return None, prepare(UntracedStages(existing_traces_only=not traces_now))
    untraced = UntracedStages()
    # Run the definition first: its errors are the clearest, and what stages cache is real before they are traced.
    result, reference_result = run_reference(), None
    if waits:
        return result, None
    # Each round finds one more stage that cannot be traced, and lets it run under autograd in the next.
    while True:
        try:
            prepared = prepare(untraced)
            break
        except Untraceable as error:
            reference_result = result
            if error.stage is None or error.stage in untraced.stages:
                reason = "; ".join([*untraced.stages.values(), str(error)])
                if needs_traces:
                    raise ValueError(NEEDS_TRACES.format(reason)) from error
                warn(f"this step runs every stage under autograd, without a trace: {reason}", stacklevel=5)
                return result, None
            untraced.stages[error.stage] = str(error)
    for _, reason in untraced.unexpected_reasons():
        warn(f"{UNDER_AUTOGRAD}: {reason}", stacklevel=5)
    return reference_result, prepared
