"""Make gradients of a training step as they are when something is done wrong.

right gradients, and a way to those of some microbatches        --> scaled(4) -->        four times as large
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Reduction, TiedLeaf
from fpipe.program import Value
from fpipe.single_device.microbatch import cut
from fpipe.single_device.result import Result
from fpipe.single_device.training_loop import total_norm
from fpipe.verification.rank_pieces import Region
from fpipe.verification.row_orders import reordered

IGNORED = -100
"""The class that torch's losses do not count."""

Parts = Sequence[tuple[Any, int]]
"""The microbatches of a step, each with its rows."""

Change = Callable[[int, Parts, Result, Callable[..., Result]], Any]
"""The gradients of a step, given its number, its microbatches, what is right, and gradients of some microbatches."""


def scaled(by: float) -> Change:
    """Gradients times a number."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return _weighed(made.grads, by)

    return change


def last_alone(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
    """Gradients of the last microbatch alone, at the weight that it has among all."""
    return _weighed(of(parts[-1:]).grads, _share(parts, -1))


def counting(k: int, times: int) -> Change:
    """Gradients in which a microbatch counts so many times."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return _plus(made.grads, _weighed(of([parts[k]]).grads, _share(parts, k) * (times - 1)))

    return change


def in_bfloat16(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
    """Gradients that are rounded to bfloat16 whenever those of a microbatch are added."""

    def low(leaf: Any) -> Any:
        return leaf if leaf is None else leaf.to(torch.bfloat16)

    each = (tree.tree_map(low, _weighed(of([part]).grads, _share(parts, k))) for k, part in enumerate(parts))
    return tree.tree_map(_like, reduce(_plus, each), made.grads)


def _like(leaf: Any, other: Any) -> Any:
    return leaf if leaf is None else leaf.to(other.dtype)


def divided_again(size: int) -> Change:
    """Gradients that a round of so many microbatches divides, those of the rounds before among them."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        rounds, total = len(parts) // size, None
        for at in range(0, len(parts), size):
            own = _weighed(of(parts[at : at + size]).grads, size / rounds)
            total = _weighed(own if total is None else _plus(total, own), 1 / size)
        return total

    return change


def of_replica(replica: int, replicas: int) -> Change:
    """Gradients of the microbatches of one replica alone."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        size = len(parts) // replicas
        return of(parts[replica * size : (replica + 1) * size]).grads

    return change


def by_tokens(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
    """Gradients as a mean over what the loss does not ignore in all microbatches."""
    counts = [counts_of(target)[-1] for (_, target), _ in parts]
    each = [_weighed(of([part]).grads, count / max(sum(counts), 1)) for part, count in zip(parts, counts, strict=True)]
    return reduce(_plus, each)


def counts_of(target: Any) -> list[int]:
    """How many rows, numbers and valid numbers a target has: what a sum may run over."""
    leaf = next((one for one in tree.leaves(target) if isinstance(one, Tensor) and one.ndim), None)
    if leaf is None:
        return [1]
    return [len(leaf), leaf.numel(), int((leaf != IGNORED).sum())]


def of_uses(uses: Sequence[TiedLeaf], times: Sequence[int]) -> Change:
    """Gradients in which those of the uses of a tied leaf count so many times each."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        noted: dict[Value, Any] = {}

        def see(value: Value, found: Any) -> None:
            noted[value] = found

        of(parts, see=see)
        total: Any = 0
        for use, many in zip(uses, times, strict=True):
            for index in range(len(parts)) if many else ():
                total = total + many * noted[Value("g", use.stage, index, port=use.bundle)][0]
        stages, owner = [*made.grads], uses[0]
        stages[owner.owner] = {**stages[owner.owner], owner.name: total}
        return tuple(stages)

    return change


def with_targets(order: Tensor) -> Change:
    """Gradients where each row of the whole batch meets the target of another."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        targets = reordered([target for (_, target), _ in parts], order)
        return of([((x, target), size) for ((x, _), size), target in zip(parts, targets, strict=True)]).grads

    return change


def with_rolled_targets(by: int) -> Change:
    """Gradients where targets are moved along their second dimension."""

    def rolled(leaf: Any) -> Any:
        return leaf.roll(by, 1) if isinstance(leaf, Tensor) and leaf.ndim > 1 else leaf

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return of([((x, tree.tree_map(rolled, target)), size) for (x, target), size in parts]).grads

    return change


def of_rows(counts: Sequence[int], reduction: Reduction) -> Change:
    """Gradients in which each row of the whole batch counts so many times."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        rows = [cut(part, index, size)[0] for part, size in parts for index in range(size)]
        drawn = [(row, 1) for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        return _weighed(of(drawn).grads, len(drawn) / len(rows) if reduction == "mean" else 1)

    return change


def clipped_by_stage(most: float) -> Change:
    """Gradients of which each stage's are clipped by themselves."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return tuple(_clipped(stage, most) for stage in made.grads)

    return change


def clipped_by_leaf(most: float) -> Change:
    """Gradients of which each is clipped by itself."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return tree.tree_map(partial(_clipped, most=most), made.grads)

    return change


def clipped_before_sums(most: float) -> Change:
    """Gradients of which those of each microbatch are clipped before they are added up."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        each = [_weighed(_clipped(of([part]).grads, most), _share(parts, k)) for k, part in enumerate(parts)]
        return reduce(_plus, each)

    return change


def never_zeroed() -> Change:
    """Gradients to which those of all steps before are added."""
    before: list[Any] = []

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        before[:] = [made.grads if number == 0 else _plus(before[0], made.grads)]
        return before[0]

    return change


def _share(parts: Parts, k: int) -> float:
    return parts[k][1] / sum(size for _, size in parts)


def _weighed(grads: Any, by: float) -> Any:
    def weighed(leaf: Any) -> Any:
        return leaf if leaf is None else leaf * by

    return tree.tree_map(weighed, grads)


def _plus(one: Any, other: Any) -> Any:
    def added(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return tree.tree_map(added, one, other)


def _clipped(grads: Any, most: float) -> Any:
    """Gradients scaled to a norm of their own."""
    found = [leaf for leaf in tree.leaves(grads) if leaf is not None]
    return _weighed(grads, float(torch.clamp(most / (total_norm([found]) + 1e-6), max=1.0))) if found else grads


def clipped_by(most: float, norm_of: Callable[[Sequence[Any]], Tensor]) -> Change:
    """Gradients that are clipped by another norm of their leaves."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        norm = norm_of(tree.leaves(tuple(made.grads)))
        return _weighed(made.grads, float(torch.clamp(most / (norm + 1e-6), max=1.0)))

    return change


def clipped_where_it_is(most: float, places: Sequence[Mapping[int, Region | None]]) -> Change:
    """Gradients of which each rank clips what it has by the norm of that; of a copy that of the first rank is left."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        leaves, spec = tree.flatten(tuple(made.grads))
        now: list[Any] = [leaf if leaf is None else leaf.clone() for leaf in leaves]
        for own in reversed(places):
            there = [(at, place) for at, place in own.items() if leaves[at] is not None]
            clipped = _clipped([_part(leaves[at], place) for at, place in there], most)
            for (at, place), part in zip(there, clipped, strict=True):
                _part(now[at], place).copy_(part)
        return tree.unflatten(spec, now)

    return change


def _part(whole: Tensor, place: Region | None) -> Tensor:
    return whole if place is None else place.of(whole)


def norm_of_all(leaves: Sequence[Any], times: Callable[[int], float]) -> Tensor:
    """The norm of leaves, each of which counts so many times."""
    squares = [leaf.norm() ** 2 * times(at) for at, leaf in enumerate(leaves) if leaf is not None]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
