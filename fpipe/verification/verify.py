"""Prove a program right: its gradients against plain autograd, leaf by leaf, bit by bit.

On a mismatch the program is walked op by op, by its definition, to the first value that differs: the op that wrote it
is at fault. If no value differs, the step that ran the program is.

    program      x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]* ...        1F0 read right values and wrote a wrong one
    reference    x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]

The reference has the values of SPLITs, of flows between stages, of losses, and of each microbatch's gradients. The
right values of transfers and ADDs follow from these; residuals and joined results are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import Residuals, StageInputs
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.meaning import sum_gradients
from fpipe.meaning.optimizers.optimizer_state import find_update
from fpipe.meaning.single_device.microbatch_sums import sum_over_microbatches
from fpipe.meaning.single_device.params_and_state import as_streams, refuse_extra_arguments, refuse_meta
from fpipe.meaning.single_device.reference import replica_counts, single_key, split_over_replicas
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.meaning.walk import check_replicas, describe_op, lockstep, walk
from fpipe.model import Model, in_current_mode
from fpipe.program import Program, Value
from fpipe.transforms.merge import merge
from fpipe.verification.cross_checks import check_function, compare_undivided
from fpipe.verification.reference_settings import (
    StepArguments,
    cast_like_params,
    cast_params_of,
    join_specs_of,
    microbatches_of,
    replica_order_of,
    settings_of_kind,
    slicing_of,
    spec_of_split,
)
from fpipe.verification.report import (
    Close,
    GradientMismatch,
    Leaf,
    Report,
    WrongValue,
    compare_leaf,
    is_finite,
    largest_difference,
    list_names,
)
from fpipe.verification.trained_steps import check_training


def verify(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any] | list[tuple[Any, Any]],
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
    """Run a program, and compare loss, gradients, outputs and state with `reference`.

    Of a model from `from_loss`, loss and gradients are compared with the function itself, too.

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
    # 1. Check the arguments.
    refuse_extra_arguments(_spread, "verify(program, model, params, {})")
    close, model = Close(rtol, atol), in_current_mode(model)
    refuse_meta("there is nothing to compare", batch=batch)
    count, inner_replicas = replica_counts(replicas)
    check_replicas(program, replicas)
    if step is not None and count > 1:
        raise ValueError("step= is of one replica; leave replicas= out.")
    arguments = StepArguments(params, batch, state, key, opt, lr, scale)
    if find_update(program) is not None:
        run = partial(_run_step, program, model, step)
        return check_training(program, model, arguments, run, (count, inner_replicas), partial(compare, close=close))
    key = single_key(key)
    if opt is not None or lr is not None or scale is not None:
        raise ValueError("without fpipe.update() a program takes no opt=, lr= or scale=.")
    if any(end.name.microbatch is not None and end.name.name == "grads" for end in program.outputs):
        program = merge(grads="rows" if model.per_example else "sum")(program)
    is_presplit = "presplit" in settings_of_kind(program, "SPLIT")
    if is_presplit and count > 1:
        raise ValueError("presplit=True hands in one replica's microbatches; leave replicas= out.")
    # 2. Run the reference and the program on the same microbatches.
    batches = [batch] if is_presplit else split_over_replicas(batch, count, model, spec_of_split(program))
    microbatches = microbatches_of(program, batches)
    cast_params = cast_params_of(program, params)
    slicing = slicing_of(program)
    reference = partial(
        sum_over_microbatches, model, cast_params, microbatches, count, state=state, key=key, slicing=slicing
    )
    if count > 1:
        inputs = StepInputs(params, batch, state, key=key)
        result = lockstep(program, model, inputs, batches, inner_replicas=inner_replicas)
        expected = reference(replica_order=replica_order_of(program, inner_replicas))
        return compare(result, replace(expected, grads=cast_like_params(params, expected.grads)), close)
    result = _run_step(program, model, step, arguments)
    join_specs = join_specs_of(program, as_streams(batch, len(microbatches)) if is_presplit else batch)
    expected = reference(join_specs=join_specs, replica_order=replica_order_of(program, inner_replicas))
    typed_expected = replace(expected, grads=cast_like_params(params, expected.grads))
    try:
        report = compare(result, typed_expected, close)
    except GradientMismatch as error:
        # 3. Find the first wrong value, by the program's definition and a second run of the reference.
        values = _ReferenceValues()
        reference(join_specs=join_specs, observe=values.note_value)
        walked_result, wrong_value = _find_first_wrong_value(program, model, arguments, values, close)
        diagnosis = _describe_fault(program, wrong_value, _mismatch_of(walked_result, typed_expected, close))
        raise GradientMismatch(f"{error}\n{diagnosis}", error.report, wrong_value) from None
    if not model.has_loss:
        return report
    # 4. Check the reference itself. A program of slices has more losses than microbatches.
    if len(expected.losses) == len(microbatches):
        check_function(model, cast_params, microbatches, expected, key, state)
    if len(expected.losses) == 1:
        return report
    if is_presplit:
        return replace(report, undivided="The batch came cut, so there is no undivided one to compare with.")
    arguments = replace(arguments, params=cast_params)
    sizes = [size for _, size in microbatches]
    return compare_undivided(report, model, arguments, sizes, expected, outputs=join_specs.outputs)


def _run_step(program: Program, model: Model, step: Callable[..., Result] | None, arguments: StepArguments) -> Result:
    if step is None:
        # Imported here: proving a step that is handed in needs no runtime.
        from fpipe.runtimes.build import build

        built_step = build(program, model, audit="never")
        # The report says what the step would warn of.
        built_step.warns = False
        return arguments.call(built_step)
    check_match(program, model)
    result = arguments.call(step)
    names = {end.name.name for end in program.outputs}
    missing_names = sorted(name for name in names if getattr(result, name, None) is None)
    if missing_names:
        raise ValueError(f"the step returns a Result with {list_names(sorted(names))}; found no {missing_names[0]}.")
    return result


class _ReferenceValues(dict[Value, list[Any]]):
    """The values of plain autograd as lists of leaves, by the names that programs give them."""

    def note_value(self, value: Value, pytree: Any) -> None:
        """Keep a value of the running reference."""
        self[value] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree.leaves(pytree)]


def _find_first_wrong_value(
    program: Program, model: Model, arguments: StepArguments, expected: _ReferenceValues, close: Close
) -> tuple[Result, WrongValue | None]:
    """Walk a program, and return its result and the first value that differs from the reference."""
    comparison = _ValueComparison(program, model, expected, close)
    return arguments.call(walk(program, model, StepOptions(), see=comparison.compare_value)), comparison.first


class _ValueComparison:
    """A comparison of each written value with the reference, up to the first wrong one."""

    def __init__(self, program: Program, model: Model, expected: _ReferenceValues, close: Close) -> None:
        self.program, self.model, self.expected, self.close = program, model, expected, close
        self.first: WrongValue | None = None

    def compare_value(self, value: Value, pytree: Any) -> None:
        if self.first is not None or isinstance(pytree, Residuals | StageInputs):
            return
        expected = self.expected_leaves(value)
        if expected is None:
            return
        leaves = tree.leaves(pytree)
        pairs = zip(leaves, expected, strict=False)
        differences = [difference for pair in pairs if (difference := self.describe_difference(*pair)) is not None]
        if len(leaves) != len(expected):
            differences = [(float("inf"), f"has {len(leaves)} leaves, and not {len(expected)}")]
        if differences:
            op = self.program.ops[self.program.writer[value]]
            self.first = WrongValue(op, value, describe_op(op, self.model), *max(differences))

    def describe_difference(self, leaf: Any, expected: Any) -> tuple[float, str] | None:
        """Return how far a leaf is off, as a number and in words; None if it agrees."""
        if not isinstance(leaf, Tensor) and not isinstance(expected, Tensor):
            return None
        # No gradient counts as one of zeros.
        leaf = torch.zeros_like(expected) if leaf is None else leaf
        expected = torch.zeros_like(leaf) if expected is None else expected
        if (kind := _describe_kind(leaf)) != (expected_kind := _describe_kind(expected)):
            return float("inf"), f"is {kind}, and not {expected_kind}"
        if self.close(leaf, expected):
            return None
        error = largest_difference(leaf, expected)
        return error, f"is off by up to {error:.3g}"

    def expected_leaves(self, value: Value) -> list[Any] | None:
        """Return the right leaves of a value; None if the reference has no such value."""
        # A copy on another rank equals its original, and an ADD's value follows from its operands.
        value = value._replace(location="")
        position = self.program.writer.get(value)
        if value not in self.expected and position is not None and self.program.ops[position].kind == "ADD":
            addends = [self.expected_leaves(operand) for operand in self.program.ops[position].reads]
            known_addends = [addend for addend in addends if addend is not None]
            if len(known_addends) == len(addends):
                self.expected[value] = sum_gradients(known_addends)
        return self.expected.get(value)


def _describe_kind(leaf: Any) -> str:
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _mismatch_of(result: Result, expected: Result, close: Close) -> GradientMismatch | None:
    try:
        compare(result, expected, close)
    except GradientMismatch as error:
        return error
    return None


def _describe_fault(program: Program, wrong_value: WrongValue | None, mismatch: GradientMismatch | None) -> str:
    """Say which value is wrong first, or else which ops join right values to wrong results."""
    if wrong_value is not None:
        return f"The first wrong value: {wrong_value}."
    # A step that was built may differ from the walk, which is the definition.
    if mismatch is None:
        return "The program is right, walked down op by op; the step that ran it is not."
    report = mismatch.report
    wrong_names = [leaf.name for leaf in report.leaves if not leaf.bitwise] if report is not None else [""]
    # A leaf is named by its output and its path in it.
    wrong_outputs = [end.value for end in program.outputs if any(n.startswith(str(end.name)) for n in wrong_names)]
    last_ops = {program.ops[program.writer[value]] for value in wrong_outputs}
    joining_cells = list_names(sorted(op.cell for op in last_ops if op.kind in ("ADD", "MERGE", "SCALE")))
    return f"What the stages compute for each microbatch is right; what joins it is not: {joining_cells}."


def _compare_with_zeros(name: str, actual: Tensor | None, expected: Tensor | None) -> Leaf:
    # Only zeros of the program are right: a stage without a trace writes them for a leaf that its data do not reach.
    grad = expected if actual is None else actual
    assert grad is not None
    zero = torch.zeros_like(grad)
    return Leaf(name, actual is not None and bool(torch.equal(actual, zero)), largest_difference(grad, zero))


_RESULT_NAMES = (
    *("loss", "grads", "outputs", "state", "aux", "input_grads"),
    *("params", "opt", "norm", "valid", "scale"),
)


def compare(result: Result, expected: Result, close: Close) -> Report:
    """Compare a result with the expected one, leaf by leaf.

    Raises:
        GradientMismatch: a leaf that is not close to the expected one.
    """
    leaves: list[Leaf] = []
    first_wrong: Leaf | None = None
    infinite_names: list[str] = []
    zero_names: list[str] = []
    for result_name in _RESULT_NAMES:
        pytree, expected_pytree = getattr(result, result_name), getattr(expected, result_name)
        if pytree is None or (result_name in ("state", "valid") and expected_pytree is None):
            continue
        for (name, actual), (_, expected_leaf) in zip(tree.paths(pytree), tree.paths(expected_pytree), strict=True):
            leaf_name = result_name + name
            if result_name == "grads" and (actual is None) != (expected_leaf is None):
                leaves.append(_compare_with_zeros(leaf_name, actual, expected_leaf))
                is_right = leaves[-1].bitwise
                zero_names += [leaf_name] * is_right
            elif isinstance(expected_leaf, Tensor):
                leaves.append(compare_leaf(leaf_name, actual, expected_leaf))
                is_right = leaves[-1].bitwise or first_wrong is not None or close(actual, expected_leaf)
                infinite_names += [leaf_name] * (result_name in ("loss", "grads") and not is_finite(actual))
            else:
                continue
            first_wrong = leaves[-1] if first_wrong is None and not is_right else first_wrong
    notes = [f"NaN or infinite numbers in {list_names(infinite_names)}."] * bool(infinite_names)
    notes += [f"Plain autograd has no gradient, and these are zeros: {list_names(zero_names)}."] * bool(zero_names)
    report = Report(tuple(leaves), notes=tuple(notes))
    if first_wrong is not None:
        names = [leaf.name for leaf in leaves if not leaf.bitwise]
        raise GradientMismatch(
            f"{first_wrong.name} differs from plain autograd by up to {first_wrong.error:.3g} ({close}); {len(names)} "
            f"of {len(leaves)} leaves differ: {list_names(names)}.",
            report,
        )
    return report
