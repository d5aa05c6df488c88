"""Hold parameters that another pipeline's steps have left beside those of a loop, and find the mistake between them.

found, and a loop of plain autograd        --> message -->        the mistake whose loop comes nearest
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.single_device.result import Result
from fpipe.oracle.gradient_changes import StepGradients, scaled
from fpipe.oracle.step_mistakes import Loop, mistakes
from fpipe.verification.report import Close, Leaf, Report, is_finite, largest, listed, wide

_SPREAD = 10.0
"""How much further than a small change of the gradients moves a parameter it may be."""

_STILL = 0.01
"""Parameters that move this share of their way otherwise are where they were to be."""

_AS_FAR = 0.5
"""A number that has moved the other way, by its way give or take this share, has turned."""

_BITS, _NEARER = 32.0, 16.0
"""How many bits parameters have to tell of a mistake, and how much nearer to it they have to be, for it to be sure:
some hundred are tried, and in a small net other mistakes than these turn the same signs."""

GRADIENT = "the gradient of "
"""Names of gradients begin so."""


@dataclass(frozen=True)
class AfterSteps:
    """Parameters from elsewhere beside those of a loop, and by how much they may differ.

    Attributes:
        found: by the number of their leaf, with their names.
        loop, expected: what should have trained them, and its result.
        close: the tolerance, if there is one.
    """

    found: Mapping[int, tuple[str, Tensor]]
    loop: Loop
    expected: Result
    close: Close | None

    @property
    def wrong(self) -> list[int]:
        """The numbers of the leaves that are others."""
        return self.wrong_beside(self.loop, self.expected)

    def wrong_beside(self, loop: Loop, expected: Result) -> list[int]:
        """The numbers of the leaves that are others than those of a loop."""
        right = tree.leaves(expected.params)
        odd = [k for k in self.found if not self.same(self.found[k][1], right[k])]
        if not odd or self.close is not None:
            return odd
        moved = tree.leaves(shaken(loop).run().params)
        return [k for k in odd if not self.near(self.found[k][1], right[k], moved[k])]

    def values_of(self, result: Result) -> dict[str, Tensor]:
        """The gradients of the last step and the optimizer's state after it, by what messages call them."""
        names = {at: name for at, (name, _) in self.found.items()}
        grads = tree.leaves(result.grads[-1])
        opt: Any = result.opt
        states: Any = tree.flatten(tuple(self.loop.params))[1].flatten_up_to(opt)
        found = {GRADIENT + name: grads[at] for at, name in names.items() if grads[at] is not None}
        return found | {f"{word} of {name}": leaf for at, name in names.items() for word, leaf in states[at].items()}

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two agree, bit by bit or within the tolerance."""
        return (self.close or Close())(one.to(other.dtype), other)

    def near(self, one: Tensor, right: Tensor, moved: Tensor) -> bool:
        """Whether one is as near to what is right as small changes of the gradients may move it."""
        error, spread = (float((wide(a) - wide(right)).norm()) for a in (one, moved))
        ulps = torch.finfo(right.dtype).eps * float(wide(right).norm())
        return is_finite(one) and error <= _SPREAD * spread + 4 * ulps

    @property
    def report(self) -> Report:
        """The report for a reader, without what the parameters do not tell."""
        right, leaves = tree.leaves(self.expected.params), list[Leaf]()
        for at, (name, leaf) in self.found.items():
            bitwise = leaf.dtype == right[at].dtype and Close()(leaf, right[at])
            leaves.append(Leaf(name, bitwise, 0.0 if bitwise else largest(leaf, right[at])))
        steps = len(self.loop.steps)
        return Report(tuple(leaves), notes=(f"Compared after {steps} training step{'s' * (steps > 1)}.",))

    def message(self, told: bool) -> list[str]:
        """Which mistake explains the parameters that are others; `told`: gradients are compared, too."""
        wrong = self.wrong
        if not wrong:
            return []
        names = listed([self.found[at][0] for at in wrong])
        of = f"{len(wrong)} of {len(self.found)} parameters are not those of plain autograd and {self.loop.words.by}."
        odd = [self.found[at][0] for at in wrong if not is_finite(self.found[at][1])]
        if odd:
            return [of, f"NaN or infinite numbers in {listed(odd)}."]
        before = tree.leaves(tuple(self.loop.params))
        still = [self.found[at][0] for at in wrong if torch.equal(self.found[at][1], before[at])]
        if still:
            return [of, f"{len(still)} of them are as they were: no update reached them.", f"  {listed(still)}"]
        ways = [way for way in (self._nearest_mistake(), self._other_rate(told)) if way]
        sure = [words for words, made in ways if self._is_evident(made)]
        if sure or not ways:
            best = ", or ".join(sure) or "no mistake that is known explains them"
        else:
            best = f"it could be that {ways[0][0]}, but these parameters tell too little to be sure"
        return [of, f"{best[0].upper()}{best[1:]}.", *([] if sure or told else self.untold()), f"  {names}"]

    def untold(self, norm: Any = None) -> list[str]:
        """A sentence about gradients that these parameters do not tell, nor the norm, where there are such."""
        loop, words = self.loop, self.loop.words
        until = next((at for at, one in enumerate(loop.rates, 1) if one["lr"] is None or one["lr"] > 0), 0)
        if not until:
            return []
        first = replace(loop, steps=loop.steps[:until], rates=loop.rates[:until], keys=loop.keys[:until])
        by, moved = f"{words.by}{' with this clip' * (words.clip is not None)}", self._moved(first.run())
        if len(loop.steps) == 1 and self._is_still(replace(first, change=_resized), moved):
            return [
                f"One step of {by} tells the signs of gradients and hardly their sizes: a loss that is scaled or "
                "smoothed, or rows that weigh otherwise, may look right. Hand in grads=, or several steps with norm=."
            ]
        if norm is None and self._is_still(first.changed(scaled, by=2.0), moved):
            return [
                f"Steps of {by} do not tell how large gradients are: a loss that is scaled looks right. Hand in norm=, "
                "or grads=."
            ]
        return []

    def _moved(self, made: Result) -> Tensor:
        """How far each number of the parameters that are compared has moved from where it was."""
        before, after = (tree.leaves(tuple(some)) for some in (self.loop.params, made.params))
        return torch.cat([(wide(after[at]) - wide(before[at])).flatten().cpu() for at in self.found])

    def _is_still(self, loop: Loop, moved: Tensor) -> bool:
        """Whether a loop moves the parameters as far as they were to move."""
        return bool((self._moved(loop.run()) - moved).norm() <= _STILL * moved.norm())

    def _is_evident(self, made: Result) -> bool:
        """Whether a result is so much nearer than the right one that it is no chance: a number tells as many bits as it
        is nearer, but one alone where it has moved the other way as far, as by the sign of its gradient."""
        each = self.loop.params, self.expected.params, made.params
        before, right, other = (tree.leaves(tuple(params)) for params in each)
        bits, off, left = 0.0, 0.0, 0.0
        for at, (_, leaf) in self.found.items():
            start, found, was, now = (wide(one).to(leaf.device) for one in (before[at], leaf, right[at], other[at]))
            least = torch.finfo(right[at].dtype).eps * was.abs() + torch.finfo(was.dtype).tiny
            told = (((found - was).abs() + least) / ((found - now).abs() + least)).log2()
            turned = ((found - start) / (was - start) + 1).abs() < _AS_FAR
            bits += float(torch.where(turned, told.clamp(max=1.0), told).sum())
            off, left = off + float((found - was).norm()), left + float((found - now).norm())
        return bits >= _BITS and left * _NEARER <= off

    def _nearest_mistake(self) -> tuple[str, Result] | None:
        """The mistake that makes these parameters and its result, of several the one that comes nearest. A loop is
        shaken only if none that comes nearer explains them: that is to run it once more."""
        tried = list[tuple[float, str, Loop]]()
        for words, loop in mistakes(self.loop):
            made = tree.leaves(loop.run().params)
            error = sum(float((wide(leaf) - wide(made[at])).norm()) for at, (_, leaf) in self.found.items())
            tried.append((error, words, loop))
            if error == 0.0:
                break
        near = sorted((one for one in tried if isfinite(one[0])), key=itemgetter(0))
        return self._explained((words, loop) for _, words, loop in near)

    def _explained(self, ways: Iterable[tuple[str, Loop]]) -> tuple[str, Result] | None:
        """The first of some mistakes that makes these parameters, with its result."""
        each = ((words, loop, loop.run()) for words, loop in ways)
        return next(((words, made) for words, loop, made in each if not self.wrong_beside(loop, made)), None)

    def _other_rate(self, told: bool) -> tuple[str, Result] | None:
        """The learning rate that makes these parameters, by how far the largest leaf has moved."""
        words = self.loop.words
        rates = [rate for rate in (one["lr"] for one in self.loop.rates) if rate is not None]
        at = max(self.found, key=lambda one: self.found[one][1].numel())
        before, right = (wide(tree.leaves(tuple(made))[at]) for made in (self.loop.params, self.expected.params))
        way, moved = (right - before).flatten(), (wide(self.found[at][1]) - before).flatten()
        times = float(torch.vdot(way, moved).real / torch.vdot(way, way).real) if way.any() else 0.0
        if len(rates) < len(self.loop.rates) or not isfinite(times) or times <= 0:
            return None
        others = [float(f"{rate * times:.3g}") for rate in rates]
        loop = replace(self.loop, rates=[one | {"lr": lr} for one, lr in zip(self.loop.rates, others, strict=True)])
        found, said = (listed([f"{rate:g}" for rate in dict.fromkeys(some)]) for some in (others, rates))
        sentence = f"the learning rate is {found}, not {said}"
        if not told and words.by == "SGD" and words.clip is None and "weight_decay" not in dict(words.settings):
            sentence += f", or gradients are {times:.3g} times as large"
        return None if others == rates else self._explained([(sentence, loop)])


def _resized(step: StepGradients) -> Any:
    """Gradients of which each number has another size, and the sign that it had."""
    generator = torch.Generator().manual_seed(step.number)

    def resized(grad: Any) -> Any:
        return grad if grad is None else grad * (torch.rand(grad.shape, generator=generator) + 0.5).to(grad)

    return tree.tree_map(resized, step.grads)


def shaken(loop: Loop) -> Loop:
    """A loop whose gradients are moved by rounding, as another order of additions may; where rounding is all that a
    leaf's gradient is, as of the bias of an attention's keys, each of its numbers has the other sign."""

    def change(step: StepGradients) -> Any:
        grads = step.grads if loop.change is None else loop.change(step)
        generator = torch.Generator().manual_seed(step.number)
        largest = max((_size(grad) for grad in tree.leaves(grads) if grad is not None and grad.numel()), default=0.0)

        def moved(grad: Any) -> Any:
            if grad is None or not grad.numel():
                return grad
            now, size, eps = wide(grad), _size(grad), torch.finfo(grad.dtype).eps
            if 0 < size < eps * largest:
                return (eps * largest * torch.where(now == 0, torch.ones_like(now), -now.sgn())).to(grad.dtype)
            noise = torch.randn(grad.shape, generator=generator, dtype=torch.float64).to(grad.device)
            return (now + noise * size * eps * _EPSILONS).to(grad.dtype)

        return tree.tree_map(moved, grads)

    return replace(loop, change=change)


def _size(grad: Tensor) -> float:
    """The root of the mean square of its numbers."""
    return float(wide(grad).norm()) / grad.numel() ** 0.5


_EPSILONS = 4.0
"""By how many epsilons of its size a gradient is moved."""
