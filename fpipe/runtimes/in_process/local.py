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
from fpipe.graphs.tracing.lru_cache import LRUCache
from fpipe.meaning.devices import on_devices
from fpipe.meaning.inputs_and_results import check_call, optim_of
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable, dispatch_modes, in_fake_mode, refuse_odd_modes
from fpipe.meaning.single_device.params_and_state import check_params
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.walk import Step, walk
from fpipe.model import Model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Program, Value
from fpipe.runtimes.in_process.threads import OnThreads, Workers
from fpipe.runtimes.lowering.instructions import UnexpectedValue
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.signature import Signatures
from fpipe.runtimes.lowering.untraced import UNDER_AUTOGRAD, Untraced
from fpipe.transforms.communicate import with_transfers


def local(
    program: Program,
    model: Model,
    *,
    trace: bool = True,
    example: tuple[Any, ...] | None = None,
    record: bool = False,
    check_finite: bool = False,
    loss_scale: float = 1.0,
    compile: bool = False,
    donate: bool = False,
    workers: Workers | None = None,
    devices: Sequence[torch.device] = (),
    see: Callable[[Value, Any], None] | None = None,
) -> Step:
    """A pure step in this thread, or on workers of the ranks; `see` is handed each value that is written."""
    told = program if record else None
    program = on_devices(program, devices) if devices else program
    program = with_transfers(program) if record or workers else program
    prepare = Prepared if workers is None else partial(OnThreads, workers, devices=devices)
    how: Any = {"record": told, "check_finite": check_finite, "loss_scale": loss_scale, "devices": devices}
    by_hand = walk(program, model, see=see, **how)
    if not trace:
        return by_hand
    signatures = Signatures(model)
    of_nets = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    graphs = model.loss is None and sum(not stage.modules for stage in of_nets) == len(model.stages)
    known: LRUCache[Any, Prepared | None] = LRUCache(_MOST)

    if example is not None:
        with _TRACING, suppress(Untraceable):  # the first step will say so
            params, batch, state = example
            optim = example_optim(program, params)
            made = prepare(
                program, model, params, batch, state, optim, None, Untraced(), loss_scale, compile, donate=donate
            )
            made.compile()
            known[signatures.of(*tree.flatten((params, batch, state, optim)), homes=made.at_home)] = made

    def step(
        params: Sequence[Any],
        batch: tuple[Any, Any],
        *more: Any,
        state: Sequence[Any] | None = None,
        key: Any = None,
        opt: Sequence[Any] | None = None,
        lr: Any = None,
        scale: Any = None,
    ) -> Result:
        refuse_odd_modes()
        walked = partial(by_hand, params, batch, state=state, key=key, opt=opt, lr=lr, scale=scale)
        for mode in dispatch_modes() if workers else ():
            raise RuntimeError(
                f"a TorchDispatchMode is on ({type(mode).__name__}), which sees the ops of one thread alone; say "
                "runtime='local' for a step under it."
            )
        keys = check_call(program, more, key)
        if in_fake_mode():  # what is made for tensors of one mode does for no others
            return walked()
        if any(stage.moved() for stage in of_nets):
            check_params(model, params)
        optim = optim_of(program, opt, lr, scale)
        given = params, batch, state, optim
        leaves, containers = tree.flatten(given)
        try:
            signature = signatures.of(leaves, containers)
            lowered = known.get(signature, _NEW)
        except (TypeError, Untraceable) as error:
            made = walked()
            why = f"a leaf cannot be compared ({error})" if isinstance(error, TypeError) else str(error)
            warnings.warn(f"this step runs every stage under autograd: {why}", stacklevel=2)
            return made
        if lowered is _NEW:
            with _TRACING:
                lowered = known.get(signature, _NEW)  # another thread may have come first
                if lowered is _NEW and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                    lowered = known[signature] = None  # a step without data has nothing to win
                if lowered is _NEW:
                    began = time.perf_counter()
                    options = {"loss_scale": loss_scale, "compile": compile, "watch_saved": record, "donate": donate}
                    prepared = partial(prepare, program, model, *given, keys, **options)
                    result, lowered = _first(walked, prepared, graphs)
                    if lowered is not None:
                        lowered.compile()
                    known[signature] = lowered
                    signatures.count(signature, given, time.perf_counter() - began)
                    if result is not None:
                        return result
        if not isinstance(lowered, Prepared):
            return walked()
        try:
            return lowered.run(leaves, state, keys, record=told, check_finite=check_finite, see=see)
        except UnexpectedValue as error:
            made = walked()  # raises what the stage does
            known[signature] = None
            warnings.warn(f"steps run every stage under autograd from now on: {error}", stacklevel=2)
            return made

    return step


_MOST = 128
_NEW = object()
_TRACING = threading.RLock()


def _first(
    by_hand: Callable[[], Result], prepared: Callable[..., Prepared], graphs: bool
) -> tuple[Result | None, Prepared | None]:
    """The first step of a signature: a program lowered, or, where a stage cannot be traced, the step's result too.
    Where all stages are `graphs`, no Python of anybody runs that could be wrong, or cache something."""
    with suppress(Untraceable):
        return None, prepared(untraced=Untraced(known_only=not graphs))
    untraced = Untraced()
    # By hand first: it knows best what is wrong, if something is, and what stages cache is real before they are traced.
    result, wanted = by_hand(), None
    while True:
        try:
            made = prepared(untraced=untraced)
            break
        except Untraceable as error:
            wanted = result
            if error.stage is None or error.stage in untraced.stages:
                why = "; ".join([*untraced.stages.values(), str(error)])
                warnings.warn(f"this step runs every stage under autograd, without a trace: {why}", stacklevel=4)
                return result, None
            untraced.stages[error.stage] = str(error)
    for _, why in untraced.surprises():
        warnings.warn(f"{UNDER_AUTOGRAD}: {why}", stacklevel=4)
    return wanted, made
