"""Compare gradients that another pipeline or a hand-written loop computed with plain autograd.

{"0.weight": dw, "1.weight": dv}        --> compare_grads -->        a Report, or the mistake by its name

How the batch was cut is often unknown, so a reference is computed for each likely number of microbatches. First each
gradient is compared as a whole; only where that leaves doubt is it compared as a sum over microbatches and uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.limits import check_whole_number
from fpipe.meaning.single_device.microbatch import count_batch_rows, cut
from fpipe.meaning.single_device.microbatch_sums import sum_over_microbatches
from fpipe.meaning.single_device.params_and_state import (
    as_streams,
    check_all_state,
    check_batch,
    rows_per_microbatch,
    trainable_leaves,
)
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model, require_loss
from fpipe.models.parameters.params import join_params
from fpipe.oracle.named_leaves import leaves_by_name, numbered_leaves, strip_wrapper_names
from fpipe.oracle.verdict import Gradient, Verdict, is_sure, judge
from fpipe.program import Value
from fpipe.verification.cross_checks import compare_undivided
from fpipe.verification.reference_settings import StepArguments
from fpipe.verification.report import (
    Close,
    GradientMismatch,
    Leaf,
    Report,
    describe_tensor,
    is_comparable,
    is_finite,
    largest_difference,
    list_names,
)

_MAX_MICROBATCHES = 16
_MAX_SHOWN = 5


def compare_grads(
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any] | list[tuple[Any, Any]],
    grads: Any,
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    microbatches: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Compare gradients of another pipeline with plain autograd, and name the mistake that explains a difference.

    Args:
        model, params, state, key: as for `reference`.
        batch: (inputs, target), the whole batch of the step that made the gradients; or a list of its microbatches.
        grads: as `join_params` has them: of a model made from a module a dict by the names of its state_dict (one name
            of a tied parameter is enough), of `from_loss` the pytree it was given, or a flat dict with names such as
            blocks.0.w; or one tree for each stage, like params.
        microbatches: how many parts the batch was cut into. None tries those from 1 to 16 that divide its rows, and
            takes the one that explains most.
        rtol, atol: relative and absolute tolerance. Without either a gradient must be equal to rounding: the norm of
            the difference at most the root of its machine epsilon times its own (3.5e-4 in float32).

    Returns:
        A `Report`, whose leaves have a verdict each: equal bit by bit, or to rounding, by how many ulps.

    Raises:
        ValueError: a name too many or too few, or a gradient of another shape; a tolerance that is no number from 0.
        GradientMismatch: a gradient that is another one, with the mistake, if one explains it: all scaled by a number,
            a microbatch or a use of a tied parameter missing or counted twice, microbatches of different rows or
            counts that count the same.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> loss = torch.nn.functional.mse_loss
    >>> model, params, state = fpipe.from_sequential(net, stages=2, loss=loss)
    >>> batch = (torch.randn(8, 3), torch.randn(8, 1))
    >>> for inputs, target in zip(batch[0].split(2), batch[1].split(2)):
    ...     loss(net(inputs), target).backward()
    >>> fpipe.compare_grads(model, params, batch, {name: p.grad for name, p in net.named_parameters()})
    Traceback (most recent call last):
    fpipe.verification.report.GradientMismatch: 4 of 4 gradients are not those of plain autograd.
    4 x: summed over 4 microbatches or ranks instead of averaged?
      0.weight, 0.bias, 2.weight, 2.bias
    """
    # 1. Check what was handed in.
    close = None if rtol is None and atol is None else Close(rtol, atol)
    require_loss(model, "there are no gradients to compare")
    gradients = _checked_grads(model, params, grads)
    check_all_state(model, state, "compare_grads")
    trials = [_Trial(model, params, parts, state, key) for parts in _divisions(batch, microbatches)]
    _refuse_missing(trials[0], gradients)
    # 2. Judge against each way to cut the batch, until one agrees bitwise; take the one that explains most.
    judgements: list[_Judgement] = []
    for trial in trials:
        judgements.append(trial.judge(gradients))
        # Every further trial costs a run of the whole batch.
        if judgements[-1].bitwise:
            break
    best = min(judgements, key=_Judgement.sort_key)
    if not best.is_clear:
        best = min((trial.judge(gradients, by_part=True) for trial in trials), key=_Judgement.sort_key)
    # 3. Report, or raise with the mistakes.
    if close:
        wrong = [(grad, verdict) for grad, verdict in best.judged if not close(grad.actual, grad.expected)]
    else:
        wrong = [(grad, verdict) for grad, verdict in best.judged if verdict.kind in ("mistake", "unknown")]
    report = best.report
    if wrong:
        raise GradientMismatch(_describe_mistakes(wrong, len(best.judged)), report)
    if len(best.trial.parts) == 1 or isinstance(batch, list):
        return report
    sizes = [size for _, size in best.trial.parts]
    return compare_undivided(report, model, StepArguments(params, batch, state, key), sizes, best.trial.result)


Parts = list[tuple[tuple[Any, Any], int]]
"""Microbatches, each with its number of rows."""


def _divisions(batch: Any, microbatches: int | None) -> list[Parts]:
    if isinstance(batch, list):
        pairs = as_streams(batch, len(batch))  # pyright: ignore[reportUnknownArgumentType]
        return [[*zip(zip(*pairs, strict=True), rows_per_microbatch(pairs), strict=True)]]
    check_batch(batch)
    if microbatches is not None:
        check_whole_number("microbatches", microbatches)
        counts = [microbatches]
    else:
        counts = [count for count in range(1, _MAX_MICROBATCHES + 1) if count_batch_rows(batch) % count == 0]
    return [[cut(batch, index, count) for index in range(count)] for count in counts]


def _checked_grads(model: Model, params: Sequence[Any], grads: Any) -> dict[str, tuple[int, Tensor]]:
    """Return, for each trained parameter by name, the number of its leaf and its gradient."""
    leaves, numbered = numbered_leaves(model, params)
    if isinstance(grads, tuple | list) and len(grads) == len(params) and not isinstance(numbered, tuple | list):  # pyright: ignore[reportUnknownArgumentType]
        grads = join_params(model, grads)  # pyright: ignore[reportUnknownArgumentType]
    numbers = leaves_by_name(numbered)
    tensors = {name: leaf for name, leaf in leaves_by_name(grads).items() if leaf is not None}
    named = strip_wrapper_names(tensors, numbers)
    unknown = next((name for name in named if name not in numbers), None)
    if unknown is not None and not isinstance(grads, Mapping):
        kind = f"{len(grads)} in a {type(grads).__name__}" if isinstance(grads, tuple | list) else type(grads).__name__
        raise ValueError(
            f"grads is a dict of p.grad by name, or one tree for each of the {len(params)} stages; found {kind}."
        )
    if unknown is not None:
        raise ValueError(f"there is no parameter {unknown!r} in the model, which has {list_names([*numbers])}.")
    trains = [is_trained for stage, leaf in enumerate(params) for is_trained in trainable_leaves(model, stage, leaf)]
    for name, gradient in named.items():
        _check_gradient(name, gradient, leaves[numbers[name]])
    return {name: (numbers[name], gradient.detach()) for name, gradient in named.items() if trains[numbers[name]]}


def _refuse_missing(trial: _Trial, gradients: Mapping[str, tuple[int, Tensor]]) -> None:
    present, right = {number for number, _ in gradients.values()}, tree.leaves(trial.result.grads)
    for name, number in leaves_by_name(numbered_leaves(trial.model, trial.params)[1]).items():
        if right[number] is not None and number not in present:
            raise ValueError(f"there is no gradient of {name!r}, and plain autograd has one.")


def _check_gradient(name: str, gradient: Any, parameter: Tensor) -> None:
    if not is_comparable(gradient) or gradient.is_complex() != parameter.is_complex():
        raise ValueError(
            f"the gradient of {name!r} is {describe_tensor(gradient)}; expected a tensor of {parameter.dtype}, "
            "or of another precision."
        )
    if gradient.shape != parameter.shape:
        shapes = f"{tuple(gradient.shape)}, the parameter {tuple(parameter.shape)}"
        raise ValueError(f"the gradient of {name!r} has the shape {shapes}.")


class _Trial:
    """The reference gradients for one way to cut the batch."""

    def __init__(self, model: Model, params: Any, parts: Parts, state: Any, key: int | None) -> None:
        self.model, self.params, self.parts = model, params, parts
        self.run = partial(sum_over_microbatches, model, params, parts, state=state, key=key)

    @cached_property
    def result(self) -> Result:
        return self.run()

    def judge(self, gradients: Mapping[str, tuple[int, Tensor]], by_part: bool = False) -> _Judgement:
        """Judge each gradient against this reference.

        Args:
            gradients: by name the number of the leaf, and the gradient.
            by_part: whether to compare with the gradients of each microbatch and use, which costs another run.
        """
        values: dict[Value, Any] = {}
        if by_part:
            self.run(
                observe=lambda value, tensor: values.update({value: tensor} if value.name in ("g", "count") else {})
            )
        # A loss with reduction "count" is a sum over what it counts: parts are divided by the whole batch's count.
        counts = [0.0] * len(self.parts)
        for value, count in values.items():
            if value.name == "count" and value.microbatch is not None and count is not None:
                counts[value.microbatch] += float(count)
        divisor = sum(counts) or 1
        uses = _uses_by_leaf(self.model, self.params)
        pairs = zip(tree.leaves(tuple(self.params)), tree.leaves(self.result.grads), strict=True)
        right = [torch.zeros_like(param) if grad is None else grad for param, grad in pairs]
        compared_gradients: list[Gradient] = []
        for name, (number, leaf) in gradients.items():
            parts: dict[tuple[int, int], Tensor] = {}
            for index, (stage, bundle, position) in product(range(len(self.parts)), uses[number]) if by_part else ():
                part = values[Value("g", stage, index, port=bundle)][position]
                if part is not None:
                    parts[index, stage] = part / divisor
            actual = leaf.to(right[number].device)
            bitwise = actual.dtype == right[number].dtype and Close()(actual, right[number])
            compared_gradients.append(Gradient(name, actual, right[number], bitwise, parts))
        weights = counts if any(counts) else [size for _, size in self.parts]
        return _Judgement(
            self, [*zip(compared_gradients, judge(compared_gradients, weights, self.model.reduction), strict=True)]
        )


def _uses_by_leaf(model: Model, params: Sequence[Any]) -> list[list[tuple[int, int, int]]]:
    """Return the uses of each leaf: the stage, the bundle of parameters there, and its index in the bundle."""
    leaves, containers = tree.flatten(tuple(params))
    numbered = tree.unflatten(containers, range(len(leaves)))
    uses: list[list[tuple[int, int, int]]] = [[] for _ in leaves]
    for tied in model.tied_uses:
        uses[numbered[tied[0].owner][tied[0].owner_name]] = [(leaf.stage, leaf.bundle, 0) for leaf in tied]
    for stage, numbers in enumerate(numbered):
        tied_names = {leaf.name for leaf in model.owned(stage)}
        untied = {name: number for name, number in numbers.items() if name not in tied_names} if tied_names else numbers
        for position, number in enumerate(tree.leaves(untied)):
            uses[number] = [(stage, 0, position)]
    return uses


@dataclass(frozen=True)
class _Judgement:
    """The verdicts on all gradients against the reference of one trial."""

    trial: _Trial
    judged: list[tuple[Gradient, Verdict]]

    @property
    def bitwise(self) -> bool:
        return all(gradient.bitwise for gradient, _ in self.judged)

    @property
    def is_clear(self) -> bool:
        return all(v.mistake.is_plain if v.mistake else v.kind != "unknown" and is_sure(g) for g, v in self.judged)

    def sort_key(self) -> tuple[int, int, int, int, int]:
        """Return a key that sorts first the trial with the fewest unexplained gradients, then the fewest mistakes."""
        kinds = Counter(verdict.kind for _, verdict in self.judged)
        mistakes = {verdict.mistake for _, verdict in self.judged if verdict.mistake}
        return kinds["unknown"], len(mistakes), kinds["mistake"], -kinds["bitwise"], len(self.trial.parts)

    @property
    def report(self) -> Report:
        leaves: list[Leaf] = []
        for gradient, verdict in self.judged:
            error = 0.0 if gradient.bitwise else largest_difference(gradient.actual, gradient.expected)
            leaves.append(Leaf(gradient.name, gradient.bitwise, error, verdict.sentence))
        count = len(self.trial.parts)
        reference = "the undivided batch" if count == 1 else f"{count} microbatches, one after the other"
        rounded = sum(verdict.kind == "rounding" for _, verdict in self.judged)
        notes = [f"Compared with {reference}" + (f"; {rounded} equal to rounding." if rounded else ".")]
        not_finite = [gradient.name for gradient, _ in self.judged if not is_finite(gradient.actual)]
        if not_finite:
            notes.append(f"NaN or infinite numbers in {list_names(not_finite)}.")
        return Report(tuple(leaves), notes=tuple(notes))


def _describe_mistakes(wrong: Sequence[tuple[Gradient, Verdict]], count: int) -> str:
    """List the mistakes with the gradients that they explain, the most frequent mistake first."""
    names_by_words: dict[str, list[str]] = {}
    for gradient, verdict in wrong:
        names_by_words.setdefault(verdict.sentence, []).append(gradient.name)
    lines = [f"{len(wrong)} of {count} gradients are not those of plain autograd."]
    ordered = sorted(names_by_words.items(), key=lambda group: -len(group[1]))
    for sentence, names in ordered[:_MAX_SHOWN]:
        lines += [sentence, f"  {list_names(names)}"]
    if len(ordered) > _MAX_SHOWN:
        hidden_count = sum(len(names) for _, names in ordered[_MAX_SHOWN:])
        lines.append(f"and {hidden_count} more, each in a way of its own")
    return "\n".join(lines)
