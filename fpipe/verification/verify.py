"""Prove a program right: its gradients against plain autograd, leaf by leaf, bit by bit.

On a mismatch the program is walked down op by op, by its definition, and the first value that differs is named: the op
that wrote it is at fault. Where no value differs, the step that ran the program is.

    program      x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]* ...        1F0 read what was right and wrote what is wrong
    reference    x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]

The reference has what SPLIT cuts, what passes between stages, losses, and each microbatch's gradients. A transfer hands
on what it reads, an ADD adds it up; residuals and joined results are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import Inputs, Residuals
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.meaning import summed
from fpipe.meaning.optimizers.optimizer_state import update_of
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.params_and_state import refuse_meta, refuse_spread, streams
from fpipe.meaning.single_device.reference import counted_replicas, one_key, parts_of_replicas
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.meaning.walk import lockstep, place_of, refuse_without, walk
from fpipe.model import Model, in_mode
from fpipe.program import Program, Value, the_program
from fpipe.transforms.merge import merge
from fpipe.verification.cross_checks import check_function, undivided
from fpipe.verification.reference_settings import (
    StepArguments,
    added_by,
    computed,
    joined_by,
    like_params,
    microbatches_of,
    settings_of,
    sliced_by,
    spec_of_split,
)
from fpipe.verification.report import (
    Close,
    GradientMismatch,
    Leaf,
    Report,
    WrongValue,
    compared,
    is_finite,
    largest,
    listed,
)
from fpipe.verification.trained_steps import check_training


def verify(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *_spread: Any,
    step: Callable[..., Result] | None = None,
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
        step: the function to prove, which is called as `build`'s step and returns a `Result`; without it
            `build(program, model)`. `build(.., trace=False)` is the definition, which needs no runtime.
        rtol, atol: relative and absolute tolerance. Without either every bit must agree.
        replicas: of a program with replicas, run so many in one process, in lockstep, each on its share of the batch's
            rows; loss, gradients and the first one's state are compared. Of a program with replicas along two axes a
            pair: (2, 3) are 2 groups across, each of 3 that share parameters out. Fused rules of shards are compared to
            rounding, and the report says so.
        opt, lr, scale: of a program with an `update`, as for its step: without them the state before the first step,
            0.01, and where the loss is scaled 2.0**16. Parameters, optimizer state and norms, scales and skipped steps
            are compared with those of a plain loop with torch.optim and torch.amp.GradScaler.

    Returns:
        A `Report`, which also says whether the undivided batch gives the same; params, batch, random state and module
        are as before.

    Raises:
        ValueError: a tolerance that is no number from 0; a step whose result lacks what the program gives.
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
    count, within = counted_replicas(replicas)
    refuse_without(the_program(program), replicas)
    if step is not None and count > 1:
        raise ValueError("step= is of one replica; replicas= are walked in lockstep, by the program's definition.")
    arguments = StepArguments(params, batch, state, key, opt, lr, scale)
    if update_of(program) is not None:
        run = partial(_run, program, model, step)
        return check_training(program, model, arguments, run, (count, within), partial(compare, close=close))
    key = one_key(key)
    if opt is not None or lr is not None or scale is not None:
        raise ValueError("this program updates no parameters, and takes no opt=, lr= or scale=; fpipe.update() does.")
    if any(end.name.microbatch is not None and end.name.name == "grads" for end in program.outputs):
        program = merge(grads="rows" if model.per_example else "sum")(program)
    is_presplit = "presplit" in settings_of(program, "SPLIT")
    if is_presplit and count > 1:
        raise ValueError("presplit=True hands in one replica's microbatches; leave replicas= out.")
    batches = [batch] if is_presplit else parts_of_replicas(batch, count, model, spec_of_split(program))
    parts = microbatches_of(program, batches)
    cast_params = computed(program, params)
    reference = partial(over_parts, model, cast_params, parts, count, state=state, key=key, sliced=sliced_by(program))
    if count > 1:
        result = lockstep(program, model, StepInputs(params, batch, state, key=key), batches, within=within)
        expected = reference(added_by=added_by(program, within))
        return compare(result, replace(expected, grads=like_params(params, expected.grads)), close)
    result = _run(program, model, step, arguments)
    joined = joined_by(program, streams(batch, len(parts)) if is_presplit else batch)
    expected = reference(joined=joined, added_by=added_by(program, within))
    typed = replace(expected, grads=like_params(params, expected.grads))
    try:
        report = compare(result, typed, close)
    except GradientMismatch as error:
        values = _ReferenceValues()
        reference(joined=joined, see=values.see)
        walked, first = _first_wrong(program, model, arguments, values, close)
        words = _first_words(program, first, _mismatch(walked, typed, close))
        raise GradientMismatch(f"{error}\n{words}", error.report, first) from None
    if len(expected.losses) == len(parts):
        check_function(model, cast_params, parts, expected, key, state)
    if len(expected.losses) == 1:
        return report
    if is_presplit:
        return replace(report, undivided="The batch came cut, so there is no undivided one to compare with.")
    arguments = replace(arguments, params=cast_params)
    return undivided(report, model, arguments, [size for _, size in parts], expected, outputs=joined.outputs)


def _run(program: Program, model: Model, step: Callable[..., Result] | None, arguments: StepArguments) -> Result:
    """The result of the step that is proved."""
    if step is None:
        from fpipe.runtimes.build import build  # a step that is handed in is proved without any runtime

        built = build(program, model, audit="never")
        built.warns = False  # the report says it
        return arguments.call(built)
    check_match(program, model)
    result = arguments.call(step)
    names = {end.name.name for end in program.outputs}
    missing = sorted(name for name in names if getattr(result, name, None) is None)
    if missing:
        raise ValueError(f"the step returns a Result with {listed(sorted(names))}; there is no {missing[0]} in it.")
    return result


class _ReferenceValues(dict[Value, list[Any]]):
    """Plain autograd's values, as lists of leaves under the names that programs have for them."""

    def see(self, value: Value, pytree: Any) -> None:
        """Note a value while the reference runs."""
        self[value] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree.leaves(pytree)]


def _first_wrong(
    program: Program, model: Model, arguments: StepArguments, expected: _ReferenceValues, close: Close
) -> tuple[Result, WrongValue | None]:
    """Walk a program beside the reference, and return its result and the first value that differs."""
    watch = _ValueWatch(program, model, expected, close)
    return arguments.call(walk(program, model, StepOptions(), see=watch.see)), watch.first


class _ValueWatch:
    """Compares each value as it is written, until one is wrong."""

    def __init__(self, program: Program, model: Model, expected: _ReferenceValues, close: Close) -> None:
        self.program, self.model, self.expected, self.close = program, model, expected, close
        self.first: WrongValue | None = None

    def see(self, value: Value, pytree: Any) -> None:
        right = None if self.first is not None or isinstance(pytree, Residuals | Inputs) else self.right(value)
        if right is None:
            return
        leaves = tree.leaves(pytree)
        pairs = zip(leaves, right, strict=False)
        differences = [found for pair in pairs if (found := self.difference(*pair)) is not None]
        if len(leaves) != len(right):
            differences = [(float("inf"), f"has {len(leaves)} leaves, and not {len(right)}")]
        if differences:
            op = self.program.ops[self.program.writer[value]]
            self.first = WrongValue(op, value, place_of(op, self.model), *max(differences))

    def difference(self, leaf: Any, right: Any) -> tuple[float, str] | None:
        """How far a leaf is off, and in words; None where it agrees."""
        if not isinstance(leaf, Tensor) and not isinstance(right, Tensor):
            return None
        leaf = torch.zeros_like(right) if leaf is None else leaf  # no gradient is one of zeros
        right = torch.zeros_like(leaf) if right is None else right
        if (kind := _kind(leaf)) != (right_kind := _kind(right)):
            return float("inf"), f"is {kind}, and not {right_kind}"
        if self.close(leaf, right):
            return None
        error = largest(leaf, right)
        return error, f"is off by up to {error:.3g}"

    def right(self, value: Value) -> list[Any] | None:
        """The right leaves of a value, if they are known: an ADD's from what it reads."""
        value = value._replace(at="")
        position = self.program.writer.get(value)
        if value not in self.expected and position is not None and self.program.ops[position].kind == "ADD":
            addends = [self.right(read) for read in self.program.ops[position].reads]
            known = [addend for addend in addends if addend is not None]
            if len(known) == len(addends):
                self.expected[value] = summed(known)
        return self.expected.get(value)


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _mismatch(result: Result, expected: Result, close: Close) -> GradientMismatch | None:
    try:
        compare(result, expected, close)
    except GradientMismatch as error:
        return error
    return None


def _first_words(program: Program, first: WrongValue | None, mismatch: GradientMismatch | None) -> str:
    """Which value is wrong first, or which ops join right values to wrong results."""
    if first is not None:
        return f"The first wrong value: {first}."
    if mismatch is None:
        return "The program is right, walked down op by op; the step that ran it is not."
    report = mismatch.report
    names = [leaf.name for leaf in report.leaves if not leaf.bitwise] if report is not None else [""]
    wrong = [end.value for end in program.outputs if any(name.startswith(str(end.name)) for name in names)]
    ends = {program.ops[program.writer[value]] for value in wrong}
    joins = listed(sorted(op.cell for op in ends if op.kind in ("ADD", "MERGE", "SCALE")))
    return f"What the stages compute for each microbatch is right; what joins it is not: {joins}."


def _one_sided(name: str, found: Tensor | None, expected: Tensor | None) -> Leaf:
    """A gradient that is missing on one side. A stage without a trace writes zeros where its data give it none."""
    grad = expected if found is None else found
    assert grad is not None
    zero = torch.zeros_like(grad)
    return Leaf(name, found is not None and bool(torch.equal(found, zero)), largest(grad, zero))


def compare(result: Result, expected: Result, close: Close) -> Report:
    """Compare two results leaf by leaf; the second is the one to trust.

    Raises:
        GradientMismatch: a leaf that is not close to the expected one.
    """
    leaves: list[Leaf] = []
    wrong: Leaf | None = None
    infinite: list[str] = []
    zeros: list[str] = []
    for part in ("loss", "grads", "outputs", "state", "aux", "input_grads", "params", "opt", "norm", "valid", "scale"):
        pytree, right = getattr(result, part), getattr(expected, part)
        if pytree is None or (part in ("state", "valid") and right is None):
            continue
        for (name, a), (_, b) in zip(tree.paths(pytree), tree.paths(right), strict=True):
            if part == "grads" and (a is None) != (b is None):
                leaves.append(_one_sided(part + name, a, b))
                wrong = leaves[-1] if wrong is None and not leaves[-1].bitwise else wrong
                zeros += [part + name] * leaves[-1].bitwise
            elif isinstance(b, Tensor):
                leaves.append(compared(part + name, a, b))
                wrong = leaves[-1] if wrong is None and not leaves[-1].bitwise and not close(a, b) else wrong
                infinite += [part + name] if part in ("loss", "grads") and not is_finite(a) else []
    notes = [f"NaN or infinite numbers in {listed(infinite)}."] * bool(infinite)
    notes += [f"Plain autograd has no gradient, and these are zeros: {listed(zeros)}."] * bool(zeros)
    report = Report(tuple(leaves), notes=tuple(notes))
    if wrong is not None:
        names = [leaf.name for leaf in leaves if not leaf.bitwise]
        raise GradientMismatch(
            f"{wrong.name} differs from plain autograd by up to {wrong.error:.3g} ({close}); {len(names)} of "
            f"{len(leaves)} leaves differ: {listed(names)}.",
            report,
        )
    return report
