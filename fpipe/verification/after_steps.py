"""Hold parameters that another pipeline's steps have left beside those of a loop, and find the mistake between them.

found, and a loop of plain autograd        --> message -->        the mistake whose loop comes nearest
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.single_device.result import Result
from fpipe.verification.gradient_changes import Parts
from fpipe.verification.odd_rows import odd_rows
from fpipe.verification.report import Close, Leaf, Report, is_finite, largest, listed, wide
from fpipe.verification.step_mistakes import Loop, mistakes

_SPREAD = 10.0
"""How much further than a small change of the gradients moves a parameter it may be."""

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

    def same(self, one: Tensor, other: Any) -> bool:
        """Whether two agree, bit by bit or within the tolerance."""
        return not isinstance(other, Tensor) or (self.close or Close())(one.to(other.dtype), other)

    def near(self, one: Tensor, right: Tensor, moved: Tensor) -> bool:
        """Whether one is as near to what is right as small changes of the gradients may move it."""
        error, spread = (float((wide(a) - wide(right)).norm()) for a in (one, moved))
        ulps = torch.finfo(right.dtype).eps * float(wide(right).norm())
        return is_finite(one) and error <= _SPREAD * spread + 4 * ulps

    @property
    def report(self) -> Report:
        """The report for a reader."""
        right, leaves = tree.leaves(self.expected.params), list[Leaf]()
        for at, (name, leaf) in self.found.items():
            if isinstance(right[at], Tensor):
                bitwise = leaf.dtype == right[at].dtype and Close()(leaf, right[at])
                leaves.append(Leaf(name, bitwise, 0.0 if bitwise else largest(leaf, right[at])))
        steps = len(self.loop.steps)
        return Report(tuple(leaves), notes=(f"Compared after {steps} training step{'s' * (steps > 1)}.",))

    def message(self, grads: Mapping[int, Tensor]) -> list[str]:
        """Which mistake explains the parameters that are others; some of the gradients may be known."""
        wrong = self.wrong
        if not wrong:
            return []
        names = listed([self.found[at][0] for at in wrong])
        of = f"{len(wrong)} of {len(self.found)} parameters are not those of plain autograd and {self.loop.words.by}."
        before = tree.leaves(tuple(self.loop.params))
        still = [at for at in wrong if torch.equal(self.found[at][1], before[at])]
        if still:
            names = listed([self.found[at][0] for at in still])
            return [of, f"{len(still)} of them are as they were: no update reached them.", f"  {names}"]
        ways = [way for way in (self._nearest_mistake(), self._other_rate()) if way]
        best = ", or ".join(ways) or self._odd_rows(grads) or "no mistake that is known explains them"
        return [of, f"{best[0].upper()}{best[1:]}.", f"  {names}"]

    def _nearest_mistake(self) -> str | None:
        """The mistake that makes these parameters, of several the one that comes nearest. A loop is shaken only if none
        that comes nearer explains them: that is to run it once more."""
        tried = list[tuple[float, str, Loop]]()
        for words, loop in mistakes(self.loop):
            tried.append((self._error(loop.run()), words, loop))
            if tried[-1][0] == 0.0:
                break
        near = sorted((one for one in tried if isfinite(one[0])), key=itemgetter(0))
        return next((words for _, words, loop in near if not self.wrong_beside(loop, loop.run())), None)

    def _other_rate(self) -> str | None:
        """The learning rate that makes these parameters, by how far the largest leaf has moved."""
        rates = [float(rate) for rate in self.loop.rates if rate is not None]
        at = max(self.found, key=lambda one: self.found[one][1].numel())
        before, right = (wide(tree.leaves(tuple(made))[at]) for made in (self.loop.params, self.expected.params))
        way, moved = (right - before).flatten(), (wide(self.found[at][1]) - before).flatten()
        times = float(torch.vdot(way, moved).real / torch.vdot(way, way).real) if way.any() else 0.0
        if len(rates) < len(self.loop.rates) or not isfinite(times) or times <= 0:
            return None
        others = [float(f"{rate * times:.3g}") for rate in rates]
        loop = replace(self.loop, rates=others)
        if others == rates or self.wrong_beside(loop, loop.run()):
            return None
        found, said = (listed([f"{rate:g}" for rate in dict.fromkeys(some)]) for some in (others, rates))
        return f"the learning rate is {found}, not {said}"

    def _odd_rows(self, grads: Mapping[int, Tensor]) -> str | None:
        """Rows that count otherwise, or met the targets of others, in gradients that are known, or that a step of plain
        descent tells."""
        loop, words = self.loop, self.loop.words
        if len(loop.steps) > 1:
            return None
        settings, rate = dict(words.settings), loop.rates[0]
        plain = {*settings} <= {"weight_decay", "momentum"} and not any(
            leaf.any() for leaf in tree.leaves(tuple(loop.opt))
        )
        if not grads and words.by == "SGD" and rate and words.clip is None and plain:
            before, decay = tree.leaves(tuple(loop.params)), settings.get("weight_decay", 0.0)
            moved = {at: (wide(before[at]) - wide(leaf)) / rate for at, (_, leaf) in self.found.items()}
            grads = {at: grad - decay * wide(before[at]) for at, grad in moved.items() if grad.any()}
        ways = odd_rows(loop, grads) if grads else ()
        return next((words for words, loop in ways if not self.wrong_beside(loop, loop.run())), None)

    def _error(self, made: Result) -> float:
        """How far away the parameters are that a loop makes: after few steps several mistakes may look alike."""
        right = tree.leaves(made.params)
        pairs = ((leaf, right[at]) for at, (_, leaf) in self.found.items() if isinstance(right[at], Tensor))
        return sum(float((wide(one) - wide(other)).norm()) for one, other in pairs)


def shaken(loop: Loop) -> Loop:
    """A loop whose gradients are moved by rounding, as another order of additions may."""

    def change(number: int, parts: Parts, made: Result, of: Any) -> Any:
        grads = made.grads if loop.change is None else loop.change(number, parts, made, of)
        generator = torch.Generator().manual_seed(number)

        def moved(grad: Any) -> Any:
            if grad is None or not grad.numel():
                return grad
            noise = torch.randn(grad.shape, generator=generator, dtype=torch.float64).to(grad.device)
            size = float(wide(grad).norm()) / grad.numel() ** 0.5
            return (wide(grad) + noise * size * torch.finfo(grad.dtype).eps * _EPSILONS).to(grad.dtype)

        return tree.tree_map(moved, grads)

    return replace(loop, change=change)


_EPSILONS = 4.0
"""By how many epsilons of its size a gradient is moved."""
