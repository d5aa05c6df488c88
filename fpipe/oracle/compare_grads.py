"""Judge gradients that were made elsewhere, by another pipeline or a loop of one's own, against plain autograd.

{"0.weight": dw, "1.weight": dv}        --> compare_grads -->        a Report, or the mistake by its name
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.limits import whole
from fpipe.meaning.single_device.microbatch import cut, rows
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.params_and_state import (
    check_all_state,
    check_batch,
    check_params,
    rows_of_each,
    streams,
    train,
)
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model, the_model
from fpipe.models.parameters.params import join_params
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

_MOST = 16
_SHOWN = 5


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
    found = _gradients(the_model(model), params, grads)
    check_all_state(model, state, "compare_grads")
    trials = [_Trial(model, params, parts, state, key) for parts in _ways(batch, microbatches)]
    judged: list[_Judged] = []
    for trial in trials:
        judged.append(trial.judged(found))
        if judged[-1].bitwise:
            break
    best = min(judged, key=_Judged.order)
    if not best.clear:
        best = min((trial.judged(found, apart=True) for trial in trials), key=_Judged.order)
    if close:
        wrong = [(one, verdict) for one, verdict in best.rows if not close(one.found, one.expected)]
    else:
        wrong = [(one, verdict) for one, verdict in best.rows if verdict.kind in ("mistake", "unknown")]
    report = best.report
    if wrong:
        raise GradientMismatch(_message(wrong, len(best.rows)), report)
    if len(best.trial.parts) == 1 or isinstance(batch, list):
        return report
    sizes = [size for _, size in best.trial.parts]
    arguments = StepArguments(params, batch, state, key)
    return undivided(report, model, arguments, sizes, best.trial.result)


Parts = list[tuple[tuple[Any, Any], int]]


def _ways(batch: Any, microbatches: int | None) -> list[Parts]:
    """How the batch may have been cut: for each way the microbatches, with their rows."""
    if isinstance(batch, list):
        pairs = streams(batch, len(batch))  # pyright: ignore[reportUnknownArgumentType]
        return [[*zip(zip(*pairs, strict=True), rows_of_each(pairs), strict=True)]]
    check_batch(batch)
    if microbatches is not None:
        whole("microbatches", microbatches)
    count = rows(batch)
    ways = [m for m in range(1, _MOST + 1) if count % m == 0] if microbatches is None else [microbatches]
    return [[cut(batch, index, m) for index in range(m)] for m in ways]


def _gradients(model: Model, params: Sequence[Any], grads: Any) -> dict[str, tuple[int, Tensor]]:
    """The gradients by name: which leaf of the params each is of, and itself."""
    leaves, numbered = numbered_leaves(model, params)
    if isinstance(grads, tuple | list) and len(grads) == len(params) and not isinstance(numbered, tuple | list):  # pyright: ignore[reportUnknownArgumentType]
        grads = join_params(model, grads)  # pyright: ignore[reportUnknownArgumentType]
    places = by_name(numbered)
    found = {name: leaf for name, leaf in by_name(grads).items() if leaf is not None}
    odd = next((name for name in found if name not in places), None)
    if odd is not None and not isinstance(grads, Mapping):
        of = f"{len(grads)} in a {type(grads).__name__}" if isinstance(grads, tuple | list) else type(grads).__name__
        raise ValueError(
            "grads is a dict by name, such as {name: p.grad for name, p in net.named_parameters()}, or one tree for "
            f"each of the {len(params)} stages; found {of}."
        )
    if odd is not None:
        raise ValueError(f"there is no parameter {odd!r} in the model, which has {listed([*places])}.")
    trains = [one for number, own in enumerate(params) for one in train(model, number, own)]
    known = {places[name] for name in found}
    missing = next((name for name, at in places.items() if trains[at] and at not in known), None)
    if missing is not None:
        raise ValueError(f"there is no gradient of {missing!r}; a parameter that trains has one, of zeros if need be.")
    for name, leaf in found.items():
        parameter = leaves[places[name]]
        wanted = tuple(parameter.shape)
        if not is_comparable(leaf) or leaf.is_complex() != parameter.is_complex():
            raise ValueError(
                f"the gradient of {name!r} is {in_words(leaf)}; wanted is a tensor of {parameter.dtype}, or of another "
                "precision."
            )
        if tuple(leaf.shape) != wanted:
            raise ValueError(f"the gradient of {name!r} has the shape {tuple(leaf.shape)}, the parameter {wanted}.")
    return {name: (places[name], leaf.detach()) for name, leaf in found.items() if trains[places[name]]}


def numbered_leaves(model: Model, params: Sequence[Any]) -> tuple[list[Any], Any]:
    """The parameters, and the pytree that they are joined to, with the number of each in its place."""
    leaves, containers = tree.flatten(tuple(check_params(model, params)))
    return leaves, join_params(model, tree.unflatten(containers, range(len(leaves))))


def by_name(pytree: Any) -> dict[str, Any]:
    """Leaves by their places, as a state_dict would call them.

    >>> by_name({"0.weight": 1, "blocks": [{"w": 2}]})
    {'0.weight': 1, 'blocks.0.w': 2}
    """
    return {
        place.replace("['", ".").replace("[", ".").replace("']", "").replace("]", "").removeprefix("."): leaf
        for place, leaf in tree.paths(pytree)
    }


class _Trial:
    """The reference for one way to cut the batch."""

    def __init__(self, model: Model, params: Any, parts: Parts, state: Any, key: int | None) -> None:
        self.model, self.params, self.parts = model, params, parts
        self.run = partial(over_parts, model, params, parts, state=state, key=key)

    @cached_property
    def result(self) -> Result:
        """Loss and gradients."""
        return self.run()

    def judged(self, found: Mapping[str, tuple[int, Tensor]], apart: bool = False) -> _Judged:
        """A verdict of each gradient; `apart`: with those of each microbatch and use."""
        noted: dict[Value, Any] = {}
        if apart:
            self.run(see=lambda value, made: noted.update({value: made} if value.name in ("g", "count") else {}))
        counts = [0.0] * len(self.parts)
        for value, made in noted.items():
            if value.name == "count" and value.microbatch is not None and made is not None:
                counts[value.microbatch] += float(made)
        divisor = sum(counts) or 1
        uses = _uses(self.model, self.params)
        right = tree.leaves(self.result.grads)
        gradients: list[Gradient] = []
        for name, (at, leaf) in found.items():
            each = [(index, *use) for index in range(len(self.parts)) for use in uses[at]] if apart else []
            own = {(i, stage): noted[Value("g", stage, i, port=bundle)][k] for i, stage, bundle, k in each}
            parts = {place: part / divisor for place, part in own.items() if part is not None}
            moved = leaf.to(right[at].device)
            alike = moved.dtype == right[at].dtype
            bitwise = alike and Close()(moved, right[at])
            gradients.append(Gradient(name, moved, right[at], bitwise, parts))
        weights = counts if any(counts) else [size for _, size in self.parts]
        return _Judged(self, [*zip(gradients, judge(gradients, weights, self.model.reduction), strict=True)])


def _uses(model: Model, params: Sequence[Any]) -> list[list[tuple[int, int, int]]]:
    """Where each leaf is used: the stage, which of its parameter bundles it is in, and which leaf of that."""
    leaves, containers = tree.flatten(tuple(params))
    numbered = tree.unflatten(containers, range(len(leaves)))
    uses: list[list[tuple[int, int, int]]] = [[] for _ in leaves]
    for tied in model.tied_uses:
        uses[numbered[tied[0].owner][tied[0].owner_name]] = [(leaf.stage, leaf.bundle, 0) for leaf in tied]
    for number, own in enumerate(numbered):
        names = {leaf.name for leaf in model.owned(number)}
        rest = {name: leaf for name, leaf in own.items() if name not in names} if names else own
        for k, at in enumerate(tree.leaves(rest)):
            uses[at] = [(number, 0, k)]
    return uses


@dataclass(frozen=True)
class _Judged:
    """The verdicts on the gradients beside one trial."""

    trial: _Trial
    rows: list[tuple[Gradient, Verdict]]

    @property
    def bitwise(self) -> bool:
        """Whether every bit agrees."""
        return all(one.bitwise for one, _ in self.rows)

    @property
    def clear(self) -> bool:
        """Whether there is no need to look at microbatches and uses one by one."""
        return all(v.mistake.plain if v.mistake else v.kind != "unknown" and is_sure(g) for g, v in self.rows)

    def order(self) -> tuple[int, int, int, int, int]:
        """The best explains all with the fewest mistakes, and agrees in the most bits."""
        kinds = Counter(verdict.kind for _, verdict in self.rows)
        mistakes = {verdict.mistake for _, verdict in self.rows if verdict.mistake}
        return kinds["unknown"], len(mistakes), kinds["mistake"], -kinds["bitwise"], len(self.trial.parts)

    @property
    def report(self) -> Report:
        """The report for a reader."""
        leaves = [
            Leaf(one.name, one.bitwise, 0.0 if one.bitwise else largest(one.found, one.expected), verdict.words)
            for one, verdict in self.rows
        ]
        m = len(self.trial.parts)
        how = "the undivided batch" if m == 1 else f"{m} microbatches, one after the other"
        odd = [one.name for one, _ in self.rows if not is_finite(one.found)]
        rounded = sum(verdict.kind == "rounding" for _, verdict in self.rows)
        words = f"Compared with {how}" + (f"; {rounded} equal to rounding." if rounded else ".")
        return Report(tuple(leaves), notes=(words, *([f"NaN or infinite numbers in {listed(odd)}."] if odd else [])))


def _message(wrong: Sequence[tuple[Gradient, Verdict]], count: int) -> str:
    """Which mistakes explain which gradients; those of most first."""
    groups: dict[str, list[str]] = {}
    for one, verdict in wrong:
        groups.setdefault(verdict.words, []).append(one.name)
    lines = [f"{len(wrong)} of {count} gradients are not those of plain autograd."]
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    for words, names in ordered[:_SHOWN]:
        lines += [words, f"  {listed(names)}"]
    if len(ordered) > _SHOWN:
        lines.append(f"and {sum(len(names) for _, names in ordered[_SHOWN:])} more, each in a way of its own")
    return "\n".join(lines)
