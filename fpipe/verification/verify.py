"""Prove a program right: its gradients against plain autograd, leaf by leaf, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.meaning.lockstep import lockstep, refuse_without
from fpipe.meaning.optimizers.op_words import update_of
from fpipe.meaning.single_device.batches import refuse_meta, refuse_spread, streams
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.reference import counted_replicas, one_key, parts_of_replicas
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs
from fpipe.model import Model, in_mode
from fpipe.program import Program, the_program
from fpipe.runtimes.build import build
from fpipe.transforms.merge import merge
from fpipe.verification.first_wrong import Expected, first_wrong
from fpipe.verification.loss_function import check_function
from fpipe.verification.report import Close, GradientMismatch, Leaf, Report, WrongValue, compared, is_finite, listed
from fpipe.verification.trained_steps import trained, versions
from fpipe.verification.undivided import undivided
from fpipe.verification.ways import (
    added_by,
    computed,
    how_of,
    joined_by,
    like_params,
    microbatches_of,
    sliced_by,
    spec_of_split,
)


def verify(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *_spread: Any,
    state: Sequence[Any] | None = None,
    key: int | Sequence[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    replicas: int | tuple[int, int] = 1,
    opt: Sequence[Any] | None = None,
    lr: Any = None,
    scale: Any = None,
) -> Report:
    """Run a program and compare loss, gradients, outputs and state with `reference`; of a model that `from_loss` made,
    loss and gradients with the function itself, too.

    Args:
        program, model, params, batch, state, key: as for `build` and its step. What a program leaves per microbatch is
            merged first.
        rtol, atol: relative and absolute tolerance. Without either every bit must agree.
        replicas: of a program with replicas, run so many in one process, in lockstep, each on its share of the batch's
            rows; loss, gradients and the first one's state are compared. Of a program with replicas along two axes a
            pair: (2, 3) are 2 groups across, each of 3 that share parameters out.
        opt, lr, scale: of a program with an `update`, as for its step: without them the state before the first step,
            0.01, and where the loss is scaled 2.0**16. Parameters, optimizer state and norms, scales and skipped steps
            are compared with those of a plain loop with torch.optim and torch.amp.GradScaler.

    Returns:
        A `Report`, which also says whether the undivided batch gives the same; params, batch, random state and module
        are as before.

    Raises:
        ValueError: a tolerance that is no number from 0.
        GradientMismatch: a leaf that differs, by name, with the size of the error, and the first value of the program
            that is wrong, with the op that wrote it.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    >>> print(fpipe.verify(program, model, ({"w": torch.tensor(3.0)},), batch))
    3 of 3 leaves bitwise equal to plain autograd, largest error 0
    The undivided batch gives the same loss and gradients, to rounding.
    """
    refuse_spread(_spread, "verify(program, model, params, {})")
    close, model = Close(rtol, atol), in_mode(model)
    refuse_meta("there is nothing to compare", batch=batch)
    if update_of(the_program(program)) is not None:
        more: Any = {"state": state, "key": key, "opt": opt, "lr": lr, "scale": scale}
        return _of_training(program, model, params, batch, replicas, close, **more)
    key = one_key(key)
    if opt is not None or lr is not None or scale is not None:
        raise ValueError("this program updates no parameters, and takes no opt=, lr= or scale=; fpipe.update() does.")
    if any(end.name.microbatch is not None and end.name.name == "grads" for end in the_program(program).outputs):
        program = merge(grads="rows" if model.per_example else "sum")(program)
    count, within = counted_replicas(replicas)
    refuse_without(program, replicas)
    presplit = "presplit" in how_of(program, "SPLIT")
    if presplit and count > 1:
        raise ValueError("presplit=True hands in one replica's microbatches; leave replicas= out.")
    each = [batch] if presplit else parts_of_replicas(batch, count, model, spec_of_split(program))
    parts = microbatches_of(program, each)
    own = computed(program, params)
    reference = partial(over_parts, model, own, parts, count, state=state, key=key, sliced=sliced_by(program))
    if count > 1:
        found = lockstep(program, model, StepInputs(params, batch, state, key=key), each, within=within)
        expected = reference(added_by=added_by(program, within))
        return compare(found, replace(expected, grads=like_params(params, expected.grads)), close)
    found = build(program, model)(params, batch, state=state, key=key)
    joined = joined_by(program, streams(batch, len(parts)) if presplit else batch)
    expected = reference(joined=joined, added_by=added_by(program, within))
    try:
        report = compare(found, replace(expected, grads=like_params(params, expected.grads)), close)
    except GradientMismatch as error:
        noted = Expected()
        reference(joined=joined, see=noted.see)
        first = first_wrong(program, model, params, batch, state=state, key=key, expected=noted, close=close)
        raise GradientMismatch(f"{error}\n{_first_words(program, first, error.report)}", error.report, first) from None
    if len(expected.losses) == len(parts):
        check_function(model, own, parts, expected, key)
    if len(expected.losses) == 1:
        return report
    if presplit:
        return replace(report, undivided="The batch came cut, so there is no undivided one to compare with.")
    sizes = [size for _, size in parts]
    return undivided(report, model, own, batch, sizes, expected, outputs=joined.outputs, state=state, key=key)


def _of_training(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: Any,
    replicas: int | tuple[int, int],
    close: Close,
    **more: Any,
) -> Report:
    """The report on a program that updates parameters."""
    count, within = counted_replicas(replicas)
    refuse_without(program, replicas)
    report = compare(*trained(program, model, params, batch, replicas=count, within=within, **more), close)
    known = versions(program)
    behind = {stage: max(step - made for (step, at), made in known.items() if at == stage) for _, stage in known}
    words = ", ".join(f"stage {stage} by {steps}" for stage, steps in sorted(behind.items()) if steps)
    told = "The undivided batch is compared for programs that end at the gradients: leave fpipe.update() out."
    return replace(report, undivided=told + f" Parameters that are read are behind by steps: {words}." * bool(words))


def _first_words(program: Program, first: WrongValue | None, report: Report | None) -> str:
    """Which value is wrong first, or which ops join right ones to wrong results."""
    if first is not None:
        return f"The first wrong value: {first}."
    differ = [leaf.name for leaf in report.leaves if not leaf.bitwise] if report is not None else [""]
    wrong = [end.value for end in program.outputs if any(name.startswith(str(end.name)) for name in differ)]
    ends = {program.ops[program.writer[value]] for value in wrong}
    joins = listed(sorted(op.cell for op in ends if op.kind in ("ADD", "MERGE", "SCALE")))
    return f"What the stages compute for each microbatch is right; what joins it is not: {joins}."


def compare(found: Result, expected: Result, close: Close) -> Report:
    """Compare two results leaf by leaf; the second is the one to trust.

    Raises:
        GradientMismatch: a leaf that is not close to the other's.
    """
    leaves: list[Leaf] = []
    wrong: Leaf | None = None
    odd: list[str] = []
    for part in ("loss", "grads", "outputs", "state", "aux", "input_grads", "params", "opt", "norm", "valid", "scale"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        if ours is None or (part in ("state", "valid") and theirs is None):
            continue
        for (name, a), (_, b) in zip(tree.paths(ours), tree.paths(theirs), strict=True):
            if isinstance(b, Tensor):
                leaves.append(compared(part + name, a, b))
                wrong = leaves[-1] if wrong is None and not leaves[-1].bitwise and not close(a, b) else wrong
                odd += [part + name] if part in ("loss", "grads") and not is_finite(a) else []
    report = Report(tuple(leaves), notes=(f"NaN or infinite numbers in {listed(odd)}.",) if odd else ())
    if wrong is not None:
        names = listed([leaf.name for leaf in leaves if not leaf.bitwise])
        count = sum(not leaf.bitwise for leaf in leaves)
        raise GradientMismatch(
            f"{wrong.name} differs from plain autograd by up to {wrong.error:.3g} ({close}); {count} of {len(leaves)} "
            f"leaves differ: {names}.",
            report,
        )
    return report
