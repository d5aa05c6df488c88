"""Audit steps: now and then, run a part of the step that just ran again by its definition, and compare.

    step 0  1  2  ..  100  ..        -->        step + audit of one stage a rank and one microbatch

A trace repeats what Python did when it was made. An audit runs the Python of now, under plain autograd, and so sees
whatever has changed since: numbers in closures and globals, hooks, modules, random numbers of Python; and a kernel that
computes wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from fpipe import tree
from fpipe.meaning.inputs_and_results import bind_inputs
from fpipe.meaning.meaning import RULES, batch_of
from fpipe.meaning.purity.attributes import Attributes, modules_of
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs
from fpipe.positional_stage import of_net
from fpipe.program import Program
from fpipe.runtimes.audit.stage_audit import StageAudit, audited_ops, running_again
from fpipe.runtimes.lowering.lane import See
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.verification.cross_checks import check_function
from fpipe.verification.report import GradientMismatch

When = Literal["first", "always", "never"] | int
_FIRST, _EVERY = 3, 100
_GO_ON = (
    " A trace repeats what it saw: put it back, cut the model anew, hand what changes in as a tensor, or say "
    'audit="never" to go on with the trace.'
)


def run_audited(
    prepared: Prepared,
    leaves: Sequence[Any],
    inputs: StepInputs,
    *,
    recorded: Program | None,
    see: See | None = None,
    has_whole_net: bool = False,
) -> Result:
    """Run a step, and audit it if that is due; `has_whole_net` says that this process has the parameters of all stages.

    Raises:
        StepChanged: the definition gives something else now, or modules have other hooks or children than at the cut.
    """
    number, prepared.steps = prepared.steps, prepared.steps + 1
    when = prepared.options.audit
    if not _is_due(when, number) or (recorded is not None and when == "first"):  # copies would count as its work
        return prepared.run(leaves, inputs, recorded=recorded, see=see)
    audit, prepared.audits = prepared.audits, prepared.audits + 1
    if {*prepared.untraced.stages} >= {*range(len(prepared.model.stages))}:  # they run the Python of now
        return prepared.run(leaves, inputs, recorded=recorded, see=see)
    held = prepared.model.held
    changes: list[tuple[str, str, bool]] = [] if held is None else held.changes()
    for what, _, is_plain in changes:
        if not is_plain:  # a hook that a trace does not call may change no number, and yet do nothing
            raise StepChanged(f"{what} has changed since the model was cut.{_GO_ON}")
    named = (f" Since the model was cut, {what}{values} has changed." for what, values, _ in changes[:3])
    words = "".join(named) + _GO_ON
    is_cut_net = has_whole_net and _is_cut_net(prepared, inputs)
    if is_cut_net and audit % 2 == 0:  # in turn, since each costs as much
        _check_net(prepared, inputs, audit // 2, words)
        return prepared.run(leaves, inputs, recorded=recorded, see=see)
    stages = [
        StageAudit(prepared, op, leaves, inputs) for op in audited_ops(prepared, audit // 2 if is_cut_net else audit)
    ]

    def tap(op: Any, run: Any) -> Any:
        for stage in stages:
            run = stage.tap(op, run)
        return run

    result = prepared.run(leaves, inputs, recorded=recorded, see=see, tap=tap)
    try:
        for stage in stages:
            stage.check(words)
    except StepChanged as error:
        if prepared.options.donate and prepared.lowered.given_up:
            error.add_note("params and opt were donated to this step, and have been updated by its gradients.")
        raise
    return result


def _is_due(when: When, number: int) -> bool:
    if isinstance(when, str):
        return when == "always" or (when == "first" and (number < _FIRST or number % _EVERY == 0))
    return number % when == 0


def _is_cut_net(prepared: Prepared, inputs: StepInputs) -> bool:
    """Whether the model is a net, or a function, that was cut, and this process can run it whole."""
    tensors = [leaf for leaf in tree.leaves((inputs.params, inputs.state)) if isinstance(leaf, Tensor)]
    is_local = len({tensor.device for tensor in tensors}) < 2 and not any(map(is_sharded, tensors))
    model = prepared.model
    nets = [net for net in (of_net(stage.forward) for stage in model.stages) if net is not None]
    if any(tensor.is_meta for net in nets for _, tensor in net.named_tensors()):  # its values were loaded elsewhere
        return False
    casts = any(op.kind == "GATHER" for op in prepared.program.ops)  # stages compute with other numbers than are handed
    is_plain = prepared.program.slices == 1 and not model.per_example and not casts
    return model.function is not None and is_plain and is_local


def _check_net(prepared: Prepared, inputs: StepInputs, number: int, words: str) -> None:
    """Compare the stages of a net on one microbatch with the net itself, whose Python the stages do not have."""
    model, program, function = prepared.model, prepared.program, prepared.model.function
    assert function is not None
    values = bind_inputs(program, model, replace(inputs, batch=batch_of(program, inputs.batch)[0]))
    part = {value.name: tensor for value, tensor in values.items() if value.name in ("inputs", "target")}
    for op in program.ops:
        if op.kind == "SPLIT" and op.microbatch == number % program.microbatches:
            cut = RULES["SPLIT"](op, [values[value] for value in op.reads], prepared.context)
            names = {"x": "inputs", "t": "target"}
            part |= {names[value.name]: each for value, each in zip(op.writes, cut, strict=True) if value.name in names}
    key = inputs.key if isinstance(inputs.key, int | None) else inputs.key[0]
    parts = [((part["inputs"], part["target"]), 1)]
    attributes = Attributes(modules_of(function.call), contents=True)
    mismatch: GradientMismatch | None = None
    with running_again(function.who, attributes, words):
        result = over_parts(model, inputs.params, parts, state=inputs.state, key=key)
        try:
            check_function(model, inputs.params, parts, result, key, inputs.state)
        except GradientMismatch as error:
            mismatch = error
    if mismatch is not None:
        raise StepChanged(f"{mismatch}{words}") from mismatch
