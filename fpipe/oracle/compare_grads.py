"""Judge gradients that were made elsewhere, by another pipeline or a loop of one's own, against plain autograd.

{"0.weight": dw, "1.weight": dv}        --> compare_grads -->        a Report, or the mistake by its name
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
from fpipe.limits import whole
from fpipe.meaning.single_device.microbatch import cut, rows
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.params_and_state import check_all_state, check_batch, rows_of_each, streams, train
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model, the_model
from fpipe.models.parameters.params import join_params
from fpipe.oracle.named_leaves import by_name, numbered_leaves, without_wrappers
from fpipe.oracle.verdict import Gradient, Verdict, is_sure, judge
from fpipe.program import Value
from fpipe.verification.cross_checks import undivided
from fpipe.verification.reference_settings import StepArguments
from fpipe.verification.report import (
    Close,
    GradientMismatch,
    Leaf,
    Report,
    in_words,
    is_comparable,
    is_finite,
    largest,
    listed,
)

_MOST_MICROBATCHES = 16
_MOST_SHOWN = 5


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
    """Compare gradients that were made elsewhere with those of plain autograd, and name the mistake that explains them.

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
    close = None if rtol is None and atol is None else Close(rtol, atol)
    gradients = _checked_grads(the_model(model), params, grads)
    check_all_state(model, state, "compare_grads")
    trials = [_Trial(model, params, parts, state, key) for parts in _divisions(batch, microbatches)]
    _refuse_missing(trials[0], gradients)
    judgements: list[_Judgement] = []
    for trial in trials:
        judgements.append(trial.judge(gradients))
        if judgements[-1].bitwise:
            break
    best = min(judgements, key=_Judgement.order)
    if not best.clear:
        best = min((trial.judge(gradients, by_part=True) for trial in trials), key=_Judgement.order)
    if close:
        wrong = [(gradient, verdict) for gradient, verdict in best.rows if not close(gradient.found, gradient.expected)]
    else:
        wrong = [(gradient, verdict) for gradient, verdict in best.rows if verdict.kind in ("mistake", "unknown")]
    report = best.report
    if wrong:
        raise GradientMismatch(_message(wrong, len(best.rows)), report)
    if len(best.trial.parts) == 1 or isinstance(batch, list):
        return report
    sizes = [size for _, size in best.trial.parts]
    return undivided(report, model, StepArguments(params, batch, state, key), sizes, best.trial.result)


Parts = list[tuple[tuple[Any, Any], int]]
"""Microbatches, each with its rows."""


def _divisions(batch: Any, microbatches: int | None) -> list[Parts]:
    """Return the microbatches that the batch may have been cut into, of each number that is tried."""
    if isinstance(batch, list):
        pairs = streams(batch, len(batch))  # pyright: ignore[reportUnknownArgumentType]
        return [[*zip(zip(*pairs, strict=True), rows_of_each(pairs), strict=True)]]
    check_batch(batch)
    if microbatches is not None:
        whole("microbatches", microbatches)
        counts = [microbatches]
    else:
        counts = [count for count in range(1, _MOST_MICROBATCHES + 1) if rows(batch) % count == 0]
    return [[cut(batch, index, count) for index in range(count)] for count in counts]


def _checked_grads(model: Model, params: Sequence[Any], grads: Any) -> dict[str, tuple[int, Tensor]]:
    """Return the number of its leaf and the gradient of each parameter that trains, by name."""
    leaves, numbered = numbered_leaves(model, params)
    if isinstance(grads, tuple | list) and len(grads) == len(params) and not isinstance(numbered, tuple | list):  # pyright: ignore[reportUnknownArgumentType]
        grads = join_params(model, grads)  # pyright: ignore[reportUnknownArgumentType]
    numbers = by_name(numbered)
    tensors = {name: leaf for name, leaf in by_name(grads).items() if leaf is not None}
    named = without_wrappers(tensors, numbers)
    unknown = next((name for name in named if name not in numbers), None)
    if unknown is not None and not isinstance(grads, Mapping):
        kind = f"{len(grads)} in a {type(grads).__name__}" if isinstance(grads, tuple | list) else type(grads).__name__
        raise ValueError(
            "grads is a dict by name, such as {name: p.grad for name, p in net.named_parameters()}, or one tree for "
            f"each of the {len(params)} stages; found {kind}."
        )
    if unknown is not None:
        raise ValueError(f"there is no parameter {unknown!r} in the model, which has {listed([*numbers])}.")
    trains = [is_trained for stage, leaf in enumerate(params) for is_trained in train(model, stage, leaf)]
    for name, gradient in named.items():
        _check_beside(name, gradient, leaves[numbers[name]])
    return {name: (numbers[name], gradient.detach()) for name, gradient in named.items() if trains[numbers[name]]}


def _refuse_missing(trial: _Trial, gradients: Mapping[str, tuple[int, Tensor]]) -> None:
    """Raise ValueError for a parameter that only plain autograd has a gradient of."""
    present, right = {number for number, _ in gradients.values()}, tree.leaves(trial.result.grads)
    for name, number in by_name(numbered_leaves(trial.model, trial.params)[1]).items():
        if right[number] is not None and number not in present:
            raise ValueError(f"there is no gradient of {name!r}, and plain autograd has one.")


def _check_beside(name: str, gradient: Any, parameter: Tensor) -> None:
    if not is_comparable(gradient) or gradient.is_complex() != parameter.is_complex():
        raise ValueError(
            f"the gradient of {name!r} is {in_words(gradient)}; wanted is a tensor of {parameter.dtype}, or of another "
            "precision."
        )
    if gradient.shape != parameter.shape:
        shapes = f"{tuple(gradient.shape)}, the parameter {tuple(parameter.shape)}"
        raise ValueError(f"the gradient of {name!r} has the shape {shapes}.")


class _Trial:
    """The reference for one way to cut the batch."""

    def __init__(self, model: Model, params: Any, parts: Parts, state: Any, key: int | None) -> None:
        self.model, self.params, self.parts = model, params, parts
        self.run = partial(over_parts, model, params, parts, state=state, key=key)

    @cached_property
    def result(self) -> Result:
        return self.run()

    def judge(self, gradients: Mapping[str, tuple[int, Tensor]], by_part: bool = False) -> _Judgement:
        """Judge each gradient; `by_part`: beside those of each microbatch and use, too."""
        values: dict[Value, Any] = {}
        if by_part:
            self.run(see=lambda value, tensor: values.update({value: tensor} if value.name in ("g", "count") else {}))
        counts = [0.0] * len(self.parts)
        for value, count in values.items():
            if value.name == "count" and value.microbatch is not None and count is not None:
                counts[value.microbatch] += float(count)
        divisor = sum(counts) or 1
        uses = _uses(self.model, self.params)
        pairs = zip(tree.leaves(tuple(self.params)), tree.leaves(self.result.grads), strict=True)
        right = [torch.zeros_like(param) if grad is None else grad for param, grad in pairs]
        compared: list[Gradient] = []
        for name, (number, leaf) in gradients.items():
            parts: dict[tuple[int, int], Tensor] = {}
            for index, (stage, bundle, position) in product(range(len(self.parts)), uses[number]) if by_part else ():
                part = values[Value("g", stage, index, port=bundle)][position]
                if part is not None:
                    parts[index, stage] = part / divisor
            moved = leaf.to(right[number].device)
            bitwise = moved.dtype == right[number].dtype and Close()(moved, right[number])
            compared.append(Gradient(name, moved, right[number], bitwise, parts))
        weights = counts if any(counts) else [size for _, size in self.parts]
        return _Judgement(self, [*zip(compared, judge(compared, weights, self.model.reduction), strict=True)])


def _uses(model: Model, params: Sequence[Any]) -> list[list[tuple[int, int, int]]]:
    """Return the uses of each leaf: the stage, its bundle of parameters there, and the position in that."""
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
    """The verdicts on the gradients beside one trial."""

    trial: _Trial
    rows: list[tuple[Gradient, Verdict]]

    @property
    def bitwise(self) -> bool:
        return all(gradient.bitwise for gradient, _ in self.rows)

    @property
    def clear(self) -> bool:
        """Whether there is no need to look at microbatches and uses one by one."""
        return all(v.mistake.plain if v.mistake else v.kind != "unknown" and is_sure(g) for g, v in self.rows)

    def order(self) -> tuple[int, int, int, int, int]:
        """Sort first what explains all gradients with the fewest mistakes, and agrees in the most bits."""
        kinds = Counter(verdict.kind for _, verdict in self.rows)
        mistakes = {verdict.mistake for _, verdict in self.rows if verdict.mistake}
        return kinds["unknown"], len(mistakes), kinds["mistake"], -kinds["bitwise"], len(self.trial.parts)

    @property
    def report(self) -> Report:
        leaves: list[Leaf] = []
        for gradient, verdict in self.rows:
            error = 0.0 if gradient.bitwise else largest(gradient.found, gradient.expected)
            leaves.append(Leaf(gradient.name, gradient.bitwise, error, verdict.words))
        count = len(self.trial.parts)
        reference = "the undivided batch" if count == 1 else f"{count} microbatches, one after the other"
        rounded = sum(verdict.kind == "rounding" for _, verdict in self.rows)
        notes = [f"Compared with {reference}" + (f"; {rounded} equal to rounding." if rounded else ".")]
        not_finite = [gradient.name for gradient, _ in self.rows if not is_finite(gradient.found)]
        if not_finite:
            notes.append(f"NaN or infinite numbers in {listed(not_finite)}.")
        return Report(tuple(leaves), notes=tuple(notes))


def _message(wrong: Sequence[tuple[Gradient, Verdict]], count: int) -> str:
    """Say which mistakes explain which gradients, those of most gradients first."""
    names_by_words: dict[str, list[str]] = {}
    for gradient, verdict in wrong:
        names_by_words.setdefault(verdict.words, []).append(gradient.name)
    lines = [f"{len(wrong)} of {count} gradients are not those of plain autograd."]
    ordered = sorted(names_by_words.items(), key=lambda group: -len(group[1]))
    for words, names in ordered[:_MOST_SHOWN]:
        lines += [words, f"  {listed(names)}"]
    if len(ordered) > _MOST_SHOWN:
        rest = sum(len(names) for _, names in ordered[_MOST_SHOWN:])
        lines.append(f"and {rest} more, each in a way of its own")
    return "\n".join(lines)
