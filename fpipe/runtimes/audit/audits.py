"""Audit steps: run a part of some steps again by its definition, and compare.

    step 0  1  2  ..  100  ..        -->        step + audit of one stage a rank and one microbatch

From the hundredth step on, each 100th, 200th, 400th .. step is audited, at least each 3,200th: as often as half a
percent of the time allows.

A trace repeats what Python did when it was traced. An audit runs the user's Python of now, under plain autograd, and so
notices whatever has changed since: numbers in closures and globals, hooks, modules, random numbers of Python; and a
kernel that computes wrongly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from fpipe import tree
from fpipe.meaning.inputs_and_results import bind_inputs
from fpipe.meaning.meaning import RULES, check_and_measure_batch
from fpipe.meaning.purity.attributes import AttributeSnapshot, CallCounter, modules_of
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.microbatch_sums import sum_over_microbatches
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs
from fpipe.positional_stage import net_stage_of
from fpipe.program import Program
from fpipe.runtimes.audit.net_outline import NetOutline
from fpipe.runtimes.audit.stage_audit import (
    StageAudit,
    choose_forwards,
    describe_counters,
    follows_from,
    refuse_failed_rerun,
)
from fpipe.runtimes.lowering.lane import See
from fpipe.runtimes.lowering.prepared_step import PreparedStep, synchronize
from fpipe.verification.cross_checks import check_function
from fpipe.verification.report import GradientMismatch

AuditSchedule = Literal["first", "always", "never"] | int
_FIRST_STEPS, _INTERVAL, _MOST_DOUBLINGS = 3, 100, 5
_STEPS_PER_AUDIT = 200
"""As many steps, each as long as an audit, keep audits at half a percent of the time."""
_ADVICE = (
    " A trace repeats what it saw: put it back, cut the model anew, hand what changes in as a tensor, or say "
    'audit="never" to go on with the trace.'
)


def run_audited(
    prepared: PreparedStep,
    leaves: Sequence[Any],
    inputs: StepInputs,
    *,
    recorded: Program | None,
    see: See | None = None,
    has_whole_net: bool = False,
) -> Result:
    """Run a step, and audit it if that is due.

    Args:
        prepared, leaves, inputs, recorded, see: as of `PreparedStep.run`.
        has_whole_net: whether this process has the parameters of all stages.

    Raises:
        StepChanged: the definition now gives other numbers, or modules have other hooks or children than at the cut.
    """
    # 1. Decide whether to audit. A recorded step counts its own work, and copies for an audit would count too.
    step_number, prepared.steps = prepared.steps, prepared.steps + 1
    schedule = prepared.options.audit
    counts_work = recorded is not None and schedule == "first"
    if counts_work or not _is_due(prepared, step_number):
        return prepared.run(leaves, inputs, recorded=recorded, see=see)
    # 2. Run and audit.
    run_seconds = 0.0

    # Kernels may still run when a step returns, and audits wait for their results: so does the clock.
    def run(**options: Any) -> Result:
        nonlocal run_seconds
        synchronize(leaves)
        run_start = time.perf_counter()
        result = prepared.run(leaves, inputs, recorded=recorded, see=see, **options)
        synchronize(leaves)
        # An audited replay runs its instructions too, which count as the audit's.
        run_seconds = prepared.replay_seconds or time.perf_counter() - run_start
        return result

    # An audit that raises is repeated in the next step, until whoever goes on has put things right.
    start = time.perf_counter()
    result = _run_and_compare(prepared, run, leaves, inputs, has_whole_net)
    # 3. Choose the next step to audit. An audit takes as long as several steps of a millisecond, mostly Python's time.
    steps_of_time = (time.perf_counter() - start) / run_seconds - 1
    # Intervals are doubled, so that ranks, which choose without each other, audit in the same steps: each audit holds
    # the whole pipeline up.
    longest = _INTERVAL << _MOST_DOUBLINGS
    interval = longest if prepared.audits_by_number else _INTERVAL
    while interval < min(_STEPS_PER_AUDIT * steps_of_time, longest):
        interval *= 2
    if step_number + 1 < _FIRST_STEPS:
        prepared.next_audit = step_number + 1
    elif step_number < _INTERVAL:
        prepared.next_audit = _INTERVAL
    else:
        prepared.next_audit = (step_number // interval + 1) * interval
    return result


def _run_and_compare(
    prepared: PreparedStep, run: Callable[..., Result], leaves: Sequence[Any], inputs: StepInputs, has_whole_net: bool
) -> Result:
    """Audit the step that `run` runs: the whole net or, every other time, one stage of each rank."""
    audit_number, prepared.audits = prepared.audits, prepared.audits + 1
    # Without any trace the step ran the Python of now itself.
    if {*prepared.untraced.stages} >= {*range(len(prepared.model.stages))}:
        return run()
    # 1. Compare hooks and children of modules with the cut. A new hook that a trace does not call may change no number,
    # and still not do its work, so it is refused at once; other changes explain numbers that differ.
    model_snapshot = prepared.model.fingerprint
    changes: list[tuple[str, str, bool]] = (
        [] if model_snapshot is None else model_snapshot.changes(_live_modules(prepared))
    )
    for attribute, _, is_plain in changes:
        if not is_plain:
            raise StepChanged(f"{attribute} has changed since the model was cut.{_ADVICE}")
    named = (f" Since the model was cut, {attribute}{values} has changed." for attribute, values, _ in changes[:3])
    explanation = "".join(named) + _ADVICE
    is_cut_net = has_whole_net and _is_cut_net(prepared, inputs)
    # Graphs do not run the net's Python: where the net cannot run whole, its ops on fake tensors still show changes.
    if prepared.model.function is not None and not is_cut_net:
        _check_outline(prepared, inputs, explanation)
    # 2. Audit the whole net and single stages in turn, since each costs as much as the other.
    stage_audits = list[StageAudit]()
    if is_cut_net and audit_number % 2 == 0:
        _check_net(prepared, inputs, audit_number // 2, explanation)
        # A graph compares its replay in a step that has a tap.
        if not prepared.options.graph:
            return run()
    else:
        forwards = choose_forwards(prepared, audit_number // 2 if is_cut_net else audit_number)
        stage_audits = [StageAudit(prepared, op, leaves, inputs) for op in forwards]

    def tap(op: Any, function: Any) -> Any:
        for stage_audit in stage_audits:
            function = stage_audit.tap(op, function)
        return function

    try:
        result = run(tap=tap)
        for stage_audit in stage_audits:
            stage_audit.check(explanation)
    except StepChanged as error:
        if prepared.options.donate and prepared.lowered.donated_storages:
            error.add_note("params and opt were donated to this step, and have been updated by its gradients.")
        raise
    return result


def _live_modules(prepared: PreparedStep) -> set[nn.Module]:
    """Return the modules that only stages without a trace run, which follow their present Python."""
    live, traced = set[nn.Module](), set[nn.Module]()
    for stage_index, stage in enumerate(prepared.model.stages):
        modules = live if stage_index in prepared.untraced.stages else traced
        modules.update(module for _, module in modules_of(net_stage_of(stage.forward) or stage.forward))
    if len(prepared.model.stages) - 1 not in prepared.untraced.stages:  # the loss is in the trace of the last stage
        traced.update(module for _, module in modules_of(prepared.model.loss))
    return live - traced


def _is_due(prepared: PreparedStep, step_number: int) -> bool:
    schedule = prepared.options.audit
    if isinstance(schedule, str):
        return schedule == "always" or (schedule == "first" and step_number >= prepared.next_audit)
    return step_number % schedule == 0


def _is_cut_net(prepared: PreparedStep, inputs: StepInputs) -> bool:
    """Return whether the model was cut from a net or a function that this process can run whole."""
    tensors = [leaf for leaf in tree.leaves((inputs.params, inputs.state)) if isinstance(leaf, Tensor)]
    is_local = len({tensor.device for tensor in tensors}) < 2 and not any(map(is_sharded, tensors))
    model = prepared.model
    nets = [net for net in (net_stage_of(stage.forward) for stage in model.stages) if net is not None]
    # A net on the meta device has no values: these were loaded into params only.
    if any(tensor.is_meta for net in nets for _, tensor in net.named_tensors()):
        return False
    # A GATHER may round, so that stages compute with other numbers than the parameters that are handed in.
    casts = any(op.kind == "GATHER" for op in prepared.program.ops)
    is_plain = prepared.program.slices == 1 and not model.per_example and not casts
    return model.function is not None and is_plain and is_local


def _check_outline(prepared: PreparedStep, inputs: StepInputs, explanation: str) -> None:
    """Compare the ops that the Python of a net calls with the first audit's."""
    model, batch = prepared.model, _microbatch(prepared, inputs, 0)
    outline = NetOutline(model, inputs.params, batch)
    prepared.net_outline = prepared.net_outline or outline
    difference = outline.difference_from(prepared.net_outline)
    if difference is None and follows_from(
        outline.counters, lambda: NetOutline(model, inputs.params, batch).difference_from(outline) is None
    ):
        difference = describe_counters(outline.counters)
    if difference is not None:
        assert model.function is not None
        raise StepChanged(f"{model.function.who}: {difference}{explanation}")


def _microbatch(prepared: PreparedStep, inputs: StepInputs, index: int) -> tuple[Any, Any]:
    program, model = prepared.program, prepared.model
    values = bind_inputs(program, model, replace(inputs, batch=check_and_measure_batch(program, inputs.batch)[0]))
    microbatch_values = {value.name: tensor for value, tensor in values.items() if value.name in ("inputs", "target")}
    for op in program.ops:
        if op.kind == "SPLIT" and op.microbatch == index % program.microbatches:
            split_values = RULES["SPLIT"](op, [values[value] for value in op.reads], prepared.context)
            names = {"x": "inputs", "t": "target"}
            microbatch_values |= {
                names[value.name]: leaves
                for value, leaves in zip(op.writes, split_values, strict=True)
                if value.name in names
            }
    return microbatch_values["inputs"], microbatch_values["target"]


def _check_net(prepared: PreparedStep, inputs: StepInputs, audit_number: int, explanation: str) -> None:
    # The stages are graphs, and do not run the net's Python again.
    model, function = prepared.model, prepared.model.function
    assert function is not None
    key = inputs.key if isinstance(inputs.key, int | None) else inputs.key[0]
    microbatches = [(_microbatch(prepared, inputs, audit_number), 1)]
    attributes = AttributeSnapshot([] if model.fingerprint is None else model.fingerprint.modules, with_containers=True)
    # A mismatch is raised outside of the rerun, which would report it as an error of the net.
    mismatch, counters = "", list[CallCounter]()
    with refuse_failed_rerun(function.who, attributes, explanation):
        result = sum_over_microbatches(model, inputs.params, microbatches, state=inputs.state, key=key)

        def find_mismatch() -> str:
            try:
                counters[:] = check_function(model, inputs.params, microbatches, result, key, inputs.state)
            except GradientMismatch as error:
                return str(error)
            return ""

        mismatch = find_mismatch()
        if not mismatch and follows_from([*counters], lambda: not find_mismatch()):
            mismatch = f"{function.who}: {describe_counters(counters)}"
    if mismatch:
        raise StepChanged(f"{mismatch}{explanation}")
