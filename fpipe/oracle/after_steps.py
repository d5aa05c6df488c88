"""Compare parameters that another pipeline's steps have left with those of a loop, and find the mistake between them.

parameters, and a loop of plain autograd        --> message -->        the mistake whose loop comes nearest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import inf, isfinite
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.single_device.result import Result
from fpipe.oracle.gradient_changes import StepGradients, scaled
from fpipe.oracle.step_mistakes import Loop, mistakes
from fpipe.oracle.verdict import plainest
from fpipe.verification.report import Close, Leaf, Report, is_finite, largest, listed, wide

_SPREAD = 10.0
"""How much further than a small change of the gradients moves a parameter it may be."""

_STILL = 0.01
"""Parameters whose way changes by less than this share are taken for unchanged."""

_AS_FAR = 0.5
"""A number that has moved the other way, by its way give or take this share, has turned."""

_BITS, _NEARER = 32.0, 16.0
"""How many bits parameters have to tell of a mistake, and how much nearer to it they have to be, for it to be sure:
some hundred are tried, and in a small net other mistakes than these turn the same signs."""

_REACHED = 1.01
"""How much larger than a clip a norm is that it changes."""

_ROUNDS = 6
"""How often a factor is improved that is found by how far parameters have moved: over steps they do not move in line
with it."""

_EPSILONS = 4.0
"""By how many epsilons of its size a gradient is moved."""

GRADIENT = "the gradient of "
"""Names of gradients begin so."""


@dataclass(frozen=True)
class AfterSteps:
    """Parameters from elsewhere beside those of a loop, and by how much they may differ.

    Attributes:
        named: name and tensor of each parameter by the number of its leaf.
        loop, expected: what should have trained them, and its result.
        close: the tolerance, if there is one.
    """

    named: Mapping[int, tuple[str, Tensor]]
    loop: Loop
    expected: Result
    close: Close | None

    @cached_property
    def wrong(self) -> list[int]:
        """The numbers of the leaves that differ."""
        return self.wrong_beside(self.loop, self.expected)

    def wrong_beside(self, loop: Loop, expected: Result) -> list[int]:
        """Return the numbers of the leaves that differ from those of a loop."""
        right = tree.leaves(expected.params)
        wrong = [k for k, (_, leaf) in self.named.items() if not self.same(leaf, right[k])]
        if not wrong or self.close is not None:
            return wrong
        errors, limits = self._errors(expected), self._limits(loop, expected)
        return [k for k in wrong if not errors[k] <= limits[k]]

    def _limits(self, loop: Loop, result: Result) -> dict[int, float]:
        """Return how far each parameter may be from a loop's."""
        right, moved = tree.leaves(result.params), tree.leaves(shaken(loop).run().params)
        return {k: _limit(right[k], moved[k]) for k in self.named}

    def values_of(self, result: Result) -> dict[str, Tensor]:
        """Return the gradients of the last step and the optimizer's state after it, by what messages call them."""
        grads, opt = tree.leaves(result.grads[-1]), result.opt
        states: Any = tree.flatten(tuple(self.loop.params))[1].flatten_up_to(opt)  # pyright: ignore[reportArgumentType]
        values = {GRADIENT + name: grads[k] for k, (name, _) in self.named.items() if grads[k] is not None}
        return values | {f"{word} of {name}": x for k, (name, _) in self.named.items() for word, x in states[k].items()}

    def same(self, value: Tensor, right: Tensor) -> bool:
        """Whether two agree, bit by bit or within the tolerance."""
        return (self.close or Close())(value.to(right.dtype), right)

    def near(self, value: Tensor, right: Tensor, moved: Tensor) -> bool:
        """Whether a value is as near to the right one as small changes of the gradients may move it."""
        return float((wide(value) - wide(right)).norm()) <= _limit(right, moved)

    @property
    def report(self) -> Report:
        """The report, without what the parameters do not tell."""
        right, leaves = tree.leaves(self.expected.params), list[Leaf]()
        for k, (name, leaf) in self.named.items():
            bitwise = leaf.dtype == right[k].dtype and Close()(leaf, right[k])
            leaves.append(Leaf(name, bitwise, 0.0 if bitwise else largest(leaf, right[k])))
        steps = len(self.loop.steps)
        return Report(tuple(leaves), notes=(f"Compared after {steps} training step{'s' * (steps > 1)}.",))

    def message(self, has_grads: bool) -> list[str]:
        """Say which mistake explains the parameters that differ; `has_grads`: gradients are compared, too."""
        wrong = [self.named[k] for k in self.wrong]
        if not wrong:
            return []
        first = (
            f"{len(wrong)} of {len(self.named)} parameters are not those of plain autograd and {self.loop.words.by}."
        )
        not_finite = [name for name, leaf in wrong if not is_finite(leaf)]
        if not_finite:
            return [first, f"NaN or infinite numbers in {listed(not_finite)}."]
        before = tree.leaves(tuple(self.loop.params))
        still = [self.named[k][0] for k in self.wrong if torch.equal(self.named[k][1], before[k])]
        if still:
            return [first, f"{len(still)} of them are as they were: no update reached them.", f"  {listed(still)}"]
        explanations, result = self._explanations(has_grads)
        is_sure = result is None or self._is_evident(result)
        if not explanations:
            best = "no mistake that is known explains them"
        elif is_sure:
            best = ", or ".join(explanations)
        else:
            best = f"it could be that {explanations[0]}, but these parameters tell too little to be sure"
        notes = [] if (explanations and is_sure) or has_grads else self.hidden_sizes()
        return [first, f"{best[0].upper()}{best[1:]}.", *notes, f"  {listed([name for name, _ in wrong])}"]

    def hidden_sizes(self, norm: Any = None) -> list[str]:
        """Say that neither these parameters nor the norm tell how large gradients are, where that is so."""
        loop, words = self.loop, self.loop.words
        until = next((k for k, rates in enumerate(loop.rates, 1) if rates["lr"] is None or rates["lr"] > 0), 0)
        if not until:
            return []
        first = replace(loop, steps=loop.steps[:until], rates=loop.rates[:until], keys=loop.keys[:until])
        by, moved = f"{words.by}{' with this clip' * (words.clip is not None)}", self._way(first.run())
        if len(loop.steps) == 1 and self._moves_alike(replace(first, change=_resized), moved):
            return [
                f"One step of {by} tells the signs of gradients and hardly their sizes: a loss that is scaled or "
                "smoothed, or rows that weigh otherwise, may look right. Hand in grads=, or several steps with norm=."
            ]
        if norm is None and self._moves_alike(first.changed(scaled, by=2.0), moved):
            return [
                f"Steps of {by} do not tell how large gradients are: a loss that is scaled looks right. Hand in norm=, "
                "or grads=."
            ]
        return []

    def _way(self, result: Result) -> Tensor:
        """Return how far each number of the parameters that are compared has moved."""
        before, after = (tree.leaves(tuple(params)) for params in (self.loop.params, result.params))
        return torch.cat([(wide(after[k]) - wide(before[k])).flatten().cpu() for k in self.named])

    def _moves_alike(self, loop: Loop, way: Tensor) -> bool:
        return bool((self._way(loop.run()) - way).norm() <= _STILL * way.norm())

    def _is_evident(self, result: Result) -> bool:
        """Whether a result is so much nearer than the right one that it is no chance.

        A number tells as many bits as it is nearer, but one alone where it has moved the other way as far, as by the
        sign of its gradient.
        """
        each = self.loop.params, self.expected.params, result.params
        starts, rights, others = (tree.leaves(tuple(params)) for params in each)
        bits, error, rest = 0.0, 0.0, 0.0
        for k, (_, leaf) in self.named.items():
            start, found, right, other = (wide(x).to(leaf.device) for x in (starts[k], leaf, rights[k], others[k]))
            least = torch.finfo(rights[k].dtype).eps * right.abs() + torch.finfo(right.dtype).tiny
            nearer = (((found - right).abs() + least) / ((found - other).abs() + least)).log2()
            turned = ((found - start) / (right - start) + 1).abs() < _AS_FAR
            bits += float(torch.where(turned, nearer.clamp(max=1.0), nearer).sum())
            error, rest = error + float((found - right).norm()), rest + float((found - other).norm())
        return bits >= _BITS and rest * _NEARER <= error

    def _explanations(self, has_grads: bool) -> tuple[list[str], Result | None]:
        """Return all mistakes that make these parameters, and the result of the one that comes nearest.

        Where some make every bit, they alone, and groups of mistakes behind theirs are not tried. A loop is shaken,
        which is to run it once more, only if none that comes nearer explains the parameters.
        """
        tried = list[tuple[float, dict[int, float], str, Loop]]()
        for number, group in enumerate(mistakes(self.loop)):
            for words, loop in chain(group, self._rescalings(has_grads) if number == 0 else ()):
                errors = self._errors(loop.run())
                tried.append((sum(errors.values()), errors, words, loop))
            if any(error == 0.0 for error, _, _, _ in tried):
                break
        for _, _, _, loop in sorted((row for row in tried if isfinite(row[0])), key=itemgetter(0)):
            result = loop.run()
            if not self.wrong_beside(loop, result):
                errors = self._errors(result)
                limits = errors if self.close or not any(errors.values()) else self._limits(loop, result)
                named = (words for _, errors, words, _ in tried if all(errors[k] <= limits[k] for k in errors))
                return [*dict.fromkeys(named)], result
        return [], None

    def _errors(self, result: Result) -> dict[int, float]:
        """Return the norm of each parameter's distance from that of a result."""
        right = tree.leaves(result.params)
        return {k: float((wide(leaf) - wide(right[k])).norm()) for k, (_, leaf) in self.named.items()}

    def _rescalings(self, has_grads: bool) -> Iterator[tuple[str, Loop]]:
        """Yield the learning rate, the size of gradients and the clip that come nearest to these parameters."""
        loop, words, clip = self.loop, self.loop.words, self.loop.words.clip
        rates = [numbers["lr"] for numbers in loop.rates]

        def at_rates(times: float) -> Loop:
            others = [lr if lr is None else float(f"{lr * times:.6g}") for lr in rates]
            return replace(loop, rates=[numbers | {"lr": lr} for numbers, lr in zip(loop.rates, others, strict=True)])

        if None not in rates and (times := self._solve(at_rates)):
            others = [numbers["lr"] for numbers in at_rates(times).rates]
            other, meant = (listed([f"{lr:.3g}" for lr in dict.fromkeys(values)]) for values in (others, rates))
            if other != meant:
                yield f"the learning rate is {other}, not {meant}", at_rates(times)
        unclipped = loop.with_clip(None)
        is_told = words.by == "SGD" and not has_grads
        if is_told and (times := self._solve(lambda times: unclipped.changed(scaled, by=times))):
            yield f"gradients are {times:.3g} times as large", loop.changed(scaled, by=times)
        if clip is not None and (times := self._solve(lambda times: loop.with_clip(clip * times))):
            clipped = loop.with_clip(clip * times)
            if any(float(norm) > _REACHED * clip * times for norm in clipped.run().norm or ()):
                yield f"gradients are clipped to {clip * times:.3g}, not {clip:.3g}", clipped

    def _solve(self, at: Callable[[float], Loop]) -> float | None:
        """Return the factor, plain or of three digits, whose loop moves the largest leaf as far as it has moved."""
        k = max(self.named, key=lambda k: self.named[k][1].numel())
        before = wide(tree.leaves(tuple(self.loop.params))[k])
        moved, times = (wide(self.named[k][1]) - before).flatten(), 1.0
        for _ in range(_ROUNDS):
            way = (wide(tree.leaves(at(times).run().params)[k]) - before).flatten()
            ratio = float(torch.vdot(way, moved).real / torch.vdot(way, way).real) if way.any() else 0.0
            if not 0 < ratio < inf:
                return None
            times *= ratio
        nearest = min(plainest(times), float(f"{times:.3g}"), key=lambda value: abs(value - times))
        return None if nearest == 1.0 else nearest


def _limit(right: Tensor, moved: Tensor) -> float:
    """Return how far a value may be from the right one, which a small change of the gradients has moved."""
    spread, size = float((wide(moved) - wide(right)).norm()), float(wide(right).norm())
    return _SPREAD * spread + 4 * torch.finfo(right.dtype).eps * size


def _resized(step: StepGradients) -> Any:
    """Give each number of the gradients another size, and leave its sign."""
    generator = torch.Generator().manual_seed(step.number)

    def resize(grad: Any) -> Any:
        return grad if grad is None else grad * (torch.rand(grad.shape, generator=generator) + 0.5).to(grad)

    return tree.tree_map(resize, step.grads)


def shaken(loop: Loop) -> Loop:
    """Return a loop whose gradients are moved by rounding, as another order of additions may.

    Where a leaf's gradient is nothing but rounding, as of the bias of an attention's keys, each number has the other
    sign.
    """

    def change(step: StepGradients) -> Any:
        grads = step.grads if loop.change is None else loop.change(step)
        generator = torch.Generator().manual_seed(step.number)
        largest = max((_size(grad) for grad in tree.leaves(grads) if grad is not None and grad.numel()), default=0.0)

        def move(grad: Any) -> Any:
            if grad is None or not grad.numel():
                return grad
            numbers, size, eps = wide(grad), _size(grad), torch.finfo(grad.dtype).eps
            if 0 < size < eps * largest:
                signs = torch.where(numbers == 0, torch.ones_like(numbers), -numbers.sgn())
                return (eps * largest * signs).to(grad.dtype)
            noise = torch.randn(grad.shape, generator=generator, dtype=torch.float64).to(grad.device)
            return (numbers + noise * size * eps * _EPSILONS).to(grad.dtype)

        return tree.tree_map(move, grads)

    return replace(loop, change=change)


def _size(grad: Tensor) -> float:
    """Return the root of the mean square of its numbers."""
    return float(wide(grad).norm()) / grad.numel() ** 0.5
