"""Run a program in this process: prepared once for each signature of a step's arguments, then run."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.tracing.trace_cache import LRUCache
from fpipe.meaning.devices import on_devices
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable, dispatch_modes, in_fake_mode
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Step, StepInputs, StepOptions
from fpipe.meaning.walk import walk
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Program, Value
from fpipe.runtimes.audit.audits import run_audited
from fpipe.runtimes.in_process.threads import OnThreads, Workers
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import UNDER_AUTOGRAD, Untraced
from fpipe.runtimes.lowering.untraced import UnexpectedValue
from fpipe.transforms.communicate import with_transfers


def local(
    program: Program,
    model: Model,
    options: StepOptions,
    *,
    example: tuple[Any, ...] | None = None,
    workers: Workers | None = None,
    devices: Sequence[torch.device] = (),
    see: Callable[[Value, Any], None] | None = None,
) -> Step:
    """Make a pure step that runs in this thread, or on workers of the ranks; `see` is called with each value."""
    recorded = program if options.record else None
    program = on_devices(program, devices) if devices else program
    program = with_transfers(program) if options.record or workers else program
    walked = walk(program, model, options, recorded=recorded, see=see, devices=devices)
    prepared_class = Prepared if workers is None else partial(OnThreads, workers)
    process = ProcessContext(devices=devices)

    def prepare(inputs: StepInputs, untraced: Untraced) -> Prepared:
        return prepared_class(program, model, inputs, untraced, options, process)

    signatures = Signatures(model)
    of_nets = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    graphs = model.loss is None and sum(not stage.modules for stage in of_nets) == len(model.stages)
    known: LRUCache[Any, Prepared | None] = LRUCache(_MOST)

    if example is not None:
        with _TRACING, suppress(Untraceable):  # the first step will say so
            params, batch, state = example
            inputs = StepInputs(params, batch, state, example_optim(program, params))
            prepared = prepare(inputs, Untraced())
            prepared.compile()
            known[signatures.of(*tree.flatten(inputs.trees), homes=prepared.at_home)] = prepared

    def run(inputs: StepInputs) -> Result:
        for mode in dispatch_modes() if workers else ():
            raise RuntimeError(
                f"a TorchDispatchMode is on ({type(mode).__name__}), which sees the ops of one thread alone; say "
                "runtime='local' for a step under it."
            )
        if in_fake_mode():  # what is made for tensors of one mode does for no others
            return walked.run(inputs)
        if any(stage.moved() for stage in of_nets):
            check_params(model, inputs.params)
        leaves, containers = tree.flatten(inputs.trees)
        try:
            signature = signatures.of(leaves, containers)
            lowered = known.get(signature, _NEW)
        except (TypeError, Untraceable) as error:
            result = walked.run(inputs)
            why = f"a leaf cannot be compared ({error})" if isinstance(error, TypeError) else str(error)
            warnings.warn(f"this step runs every stage under autograd: {why}", stacklevel=3)
            return result
        if lowered is _NEW:
            with _TRACING:
                lowered = known.get(signature, _NEW)  # another thread may have come first
                if lowered is _NEW and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                    lowered = known[signature] = None  # a step without data has nothing to win
                if lowered is _NEW:
                    began = time.perf_counter()
                    result, lowered = _first(partial(walked.run, inputs), partial(prepare, inputs), graphs)
                    if lowered is not None:
                        lowered.compile()
                    known[signature] = lowered
                    signatures.count(signature, inputs.trees, time.perf_counter() - began)
                    if result is not None:
                        return result
        if not isinstance(lowered, Prepared):
            return walked.run(inputs)
        try:
            return run_audited(lowered, leaves, inputs, recorded=recorded, see=see, has_whole_net=True)
        except UnexpectedValue as error:
            result = walked.run(inputs)  # raises what the stage does
            known[signature] = None
            warnings.warn(f"steps run every stage under autograd from now on: {error}", stacklevel=3)
            return result

    return Step(program, model, run)


_MOST = 128
_NEW = object()
_TRACING = threading.RLock()


def _first(
    walked: Callable[[], Result], prepare: Callable[[Untraced], Prepared], graphs: bool
) -> tuple[Result | None, Prepared | None]:
    """Lower the program of a first step; where a stage cannot be traced, return the result of that step too.

    Where all stages are `graphs`, no Python of a user runs that could be wrong, or cache something.
    """
    with suppress(Untraceable):
        return None, prepare(Untraced(known_only=not graphs))
    untraced = Untraced()
    # By hand first: it knows best what is wrong, if something is, and what stages cache is real before they are traced.
    result, wanted = walked(), None
    while True:
        try:
            prepared = prepare(untraced)
            break
        except Untraceable as error:
            wanted = result
            if error.stage is None or error.stage in untraced.stages:
                why = "; ".join([*untraced.stages.values(), str(error)])
                warnings.warn(f"this step runs every stage under autograd, without a trace: {why}", stacklevel=5)
                return result, None
            untraced.stages[error.stage] = str(error)
    for _, why in untraced.surprises():
        warnings.warn(f"{UNDER_AUTOGRAD}: {why}", stacklevel=5)
    return wanted, prepared
