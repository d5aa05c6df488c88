"""Compare parameters after the steps of another pipeline with a reference loop, and name the mistake.

parameters, and a loop of plain autograd        --> message -->        the mistake whose loop comes nearest

Each known mistake is a loop of its own. A mistake explains the parameters if its loop ends as near to them as rounding
allows, which is measured: run the loop once more, with noise of the size of rounding on its gradients.
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
from fpipe.oracle.gradient_changes import StepGradients, scale
from fpipe.oracle.step_mistakes import Loop, list_mistakes
from fpipe.oracle.verdict import nearest_plain_scale
from fpipe.verification.report import Close, Leaf, Report, is_finite, largest_difference, list_names, to_double

# How much further a parameter may be from a loop's than rounding noise on the gradients moves it.
_SPREAD_FACTOR = 10.0

# Parameters whose movement changes by less than this share count as unchanged.
_UNCHANGED_SHARE = 0.01

# A number has turned if it has moved the other way as far as it should have moved, give or take this share.
_TURN_TOLERANCE = 0.5

# The evidence that a mistake needs: so many bits over all numbers, and an error that is so many times smaller than that
# of the right loop. Some hundred mistakes are tried, and in a small net unknown mistakes flip the same signs by chance.
_MIN_BITS, _MIN_NEARER = 32.0, 16.0

# How many times larger than a clip a norm has to be for the clip to change anything.
_MIN_CLIPPED_RATIO = 1.01

# Rounds of the search for a factor. Over several steps parameters do not move in proportion to it, so it is iterated.
_SOLVER_ROUNDS = 6

# The rounding noise on a gradient, in machine epsilons of its size.
_NOISE_EPSILONS = 4.0

GRADIENT = "the gradient of "
"""The prefix of names of gradients."""


@dataclass(frozen=True)
class ParamsAfterSteps:
    """Parameters from elsewhere, the reference loop that should have trained them, and the tolerance.

    Attributes:
        param_by_leaf: name and tensor of each parameter by the number of its leaf.
        loop, expected: the reference loop and its result.
        close: the tolerance; None for what rounding of the gradients allows.
    """

    param_by_leaf: Mapping[int, tuple[str, Tensor]]
    loop: Loop
    expected: Result
    close: Close | None

    @cached_property
    def wrong_leaves(self) -> list[int]:
        """The numbers of the leaves that differ from the reference."""
        return self.leaves_that_differ(self.loop, self.expected)

    def leaves_that_differ(self, loop: Loop, expected: Result) -> list[int]:
        """Return the numbers of the leaves that differ from the result of a loop."""
        right = tree.leaves(expected.params)
        wrong = [index for index, (_, leaf) in self.param_by_leaf.items() if not self.agree(leaf, right[index])]
        # The limits cost a run of the loop with noise, so they are computed only where something differs bitwise.
        if not wrong or self.close is not None:
            return wrong
        errors, limits = self._errors(expected), self._limits(loop, expected)
        return [index for index in wrong if not errors[index] <= limits[index]]

    def _limits(self, loop: Loop, result: Result) -> dict[int, float]:
        """Return how far rounding may take each parameter from the result of a loop."""
        right, moved = tree.leaves(result.params), tree.leaves(with_rounding_noise(loop).run().params)
        return {index: _limit(right[index], moved[index]) for index in self.param_by_leaf}

    def grads_and_state_of(self, result: Result) -> dict[str, Tensor]:
        """Return the gradients of the last step and the optimizer's state after it, by their names in messages."""
        grads, opt = tree.leaves(result.grads[-1]), result.opt
        states: Any = tree.flatten(tuple(self.loop.params))[1].flatten_up_to(opt)  # pyright: ignore[reportArgumentType]
        values = {GRADIENT + name: grads[i] for i, (name, _) in self.param_by_leaf.items() if grads[i] is not None}
        return values | {
            f"{key} of {name}": x for index, (name, _) in self.param_by_leaf.items() for key, x in states[index].items()
        }

    def agree(self, value: Tensor, right: Tensor) -> bool:
        """Whether two tensors agree, bitwise or within the tolerance."""
        return (self.close or Close())(value.to(right.dtype), right)

    def are_near(self, value: Tensor, right: Tensor, moved: Tensor) -> bool:
        """Whether a value is within reach of the right one, by how far noise on the gradients has `moved` that."""
        return float((to_double(value) - to_double(right)).norm()) <= _limit(right, moved)

    @property
    def report(self) -> Report:
        """The report on the parameters, without the notes of `hidden_sizes`."""
        right, leaves = tree.leaves(self.expected.params), list[Leaf]()
        for index, (name, leaf) in self.param_by_leaf.items():
            bitwise = leaf.dtype == right[index].dtype and Close()(leaf, right[index])
            leaves.append(Leaf(name, bitwise, 0.0 if bitwise else largest_difference(leaf, right[index])))
        steps = len(self.loop.steps)
        return Report(tuple(leaves), notes=(f"Compared after {steps} training step{'s' * (steps > 1)}.",))

    def message(self, has_grads: bool) -> list[str]:
        """Return the lines that name the mistake behind the parameters that differ; none if they are right."""
        wrong = [self.param_by_leaf[index] for index in self.wrong_leaves]
        if not wrong:
            return []
        count, rule = len(self.param_by_leaf), self.loop.update.rule
        summary = f"{len(wrong)} of {count} parameters are not those of plain autograd and {rule}."
        # Two causes need no search: numbers that are not finite, and parameters that no update reached.
        not_finite = [name for name, leaf in wrong if not is_finite(leaf)]
        if not_finite:
            return [summary, f"NaN or infinite numbers in {list_names(not_finite)}."]
        start_leaves = tree.leaves(tuple(self.loop.params))
        unmoved = [
            self.param_by_leaf[index][0]
            for index in self.wrong_leaves
            if torch.equal(self.param_by_leaf[index][1], start_leaves[index])
        ]
        if unmoved:
            return [
                summary,
                f"{len(unmoved)} of them are as they were: no update reached them.",
                f"  {list_names(unmoved)}",
            ]
        explanations, result = self._explanations(has_grads)
        is_sure = result is None or self._is_evident(result)
        if not explanations:
            explanation = "no mistake that is known explains them"
        elif is_sure:
            explanation = ", or ".join(explanations)
        else:
            explanation = f"it could be that {explanations[0]}, but these parameters tell too little to be sure"
        notes = [] if (explanations and is_sure) or has_grads else self.hidden_sizes()
        return [
            summary,
            f"{explanation[0].upper()}{explanation[1:]}.",
            *notes,
            f"  {list_names([name for name, _ in wrong])}",
        ]

    def hidden_sizes(self, norm: Any = None) -> list[str]:
        """Return a note if neither the parameters nor the norm show how large the gradients are.

        It is found by experiment: give the gradients other sizes, and look whether the parameters still move as far.
        """
        loop, update = self.loop, self.loop.update
        # Up to the first step that moves anything: with a warm-up, the learning rates of the steps before it are 0.
        count = next((i for i, rates in enumerate(loop.rates, 1) if rates["lr"] is None or rates["lr"] > 0), 0)
        if not count:
            return []
        short_loop = replace(loop, steps=loop.steps[:count], rates=loop.rates[:count], keys=loop.keys[:count])
        subject = f"{update.rule}{' with this clip' * (update.clip is not None)}"
        moved = self._movement(short_loop.run())
        if len(loop.steps) == 1 and self._has_movement(replace(short_loop, change=_resize_grads), moved):
            return [
                f"One step of {subject} tells the signs of gradients and hardly their sizes: a loss that is scaled or "
                "smoothed, or rows that weigh otherwise, may look right. Hand in grads=, or several steps with norm=."
            ]
        if norm is None and self._has_movement(short_loop.changed(scale, factor=2.0), moved):
            return [
                f"Steps of {subject} do not tell how large gradients are: a loss that is scaled looks right. Hand in "
                "norm=, or grads=."
            ]
        return []

    def _movement(self, result: Result) -> Tensor:
        old_leaves, new_leaves = (tree.leaves(tuple(params)) for params in (self.loop.params, result.params))
        movements = [(to_double(new_leaves[i]) - to_double(old_leaves[i])).flatten().cpu() for i in self.param_by_leaf]
        return torch.cat(movements)

    def _has_movement(self, loop: Loop, movement: Tensor) -> bool:
        return bool((self._movement(loop.run()) - movement).norm() <= _UNCHANGED_SHARE * movement.norm())

    def _is_evident(self, result: Result) -> bool:
        """Whether a mistake's result is so much nearer than the reference that this is no chance.

        A number gives as many bits of evidence as its error shrinks by factors of two. A number that has moved as far
        the other way, as by the sign of its gradient, gives only one: half of all numbers do by chance.
        """
        params_by_source = self.loop.params, self.expected.params, result.params
        start_leaves, right_leaves, mistaken_leaves = (tree.leaves(tuple(params)) for params in params_by_source)
        bits, error, other_error = 0.0, 0.0, 0.0
        for index, (_, leaf) in self.param_by_leaf.items():
            start, actual, right, mistaken = (
                to_double(x).to(leaf.device)
                for x in (start_leaves[index], leaf, right_leaves[index], mistaken_leaves[index])
            )
            # The spacing of floating-point numbers there, so that an exact agreement counts a finite number of bits.
            spacing = torch.finfo(right_leaves[index].dtype).eps * right.abs() + torch.finfo(right.dtype).tiny
            nearer = (((actual - right).abs() + spacing) / ((actual - mistaken).abs() + spacing)).log2()
            turned = ((actual - start) / (right - start) + 1).abs() < _TURN_TOLERANCE
            bits += float(torch.where(turned, nearer.clamp(max=1.0), nearer).sum())
            error, other_error = error + float((actual - right).norm()), other_error + float((actual - mistaken).norm())
        return bits >= _MIN_BITS and other_error * _MIN_NEARER <= error

    def _explanations(self, has_grads: bool) -> tuple[list[str], Result | None]:
        """Return all mistakes that explain these parameters, and the result of the nearest one.

        If some give every bit, they alone are returned, and later groups of mistakes are not tried. The limits of a
        loop cost another run of it, so they are computed only for loops that come nearest.
        """
        trials = list[tuple[float, dict[int, float], str, Loop]]()
        # 1. Run each mistake's loop, and measure how far it ends from these parameters.
        for number, group in enumerate(list_mistakes(self.loop)):
            for sentence, loop in chain(group, self._rescalings(has_grads) if number == 0 else ()):
                errors = self._errors(loop.run())
                trials.append((sum(errors.values()), errors, sentence, loop))
            if any(error == 0.0 for error, _, _, _ in trials):
                break
        # 2. From the nearest on: the first loop within its limits explains them, and so do all that are as near.
        for _, _, _, loop in sorted((row for row in trials if isfinite(row[0])), key=itemgetter(0)):
            result = loop.run()
            if not self.leaves_that_differ(loop, result):
                errors = self._errors(result)
                limits = errors if self.close or not any(errors.values()) else self._limits(loop, result)
                explanations = (
                    sentence
                    for _, errors, sentence, _ in trials
                    if all(errors[index] <= limits[index] for index in errors)
                )
                return [*dict.fromkeys(explanations)], result
        return [], None

    def _errors(self, result: Result) -> dict[int, float]:
        """Return the distance of each parameter from a result, as the norm of the difference."""
        right = tree.leaves(result.params)
        return {
            index: float((to_double(leaf) - to_double(right[index])).norm())
            for index, (_, leaf) in self.param_by_leaf.items()
        }

    def _rescalings(self, has_grads: bool) -> Iterator[tuple[str, Loop]]:
        """Yield loops with the learning rate, the gradient scale and the clip that come nearest to these parameters."""
        loop, update, clip = self.loop, self.loop.update, self.loop.update.clip
        rates = [numbers["lr"] for numbers in loop.rates]

        def at_rates(times: float) -> Loop:
            scaled_rates = [lr if lr is None else float(f"{lr * times:.6g}") for lr in rates]
            return replace(
                loop, rates=[numbers | {"lr": lr} for numbers, lr in zip(loop.rates, scaled_rates, strict=True)]
            )

        if None not in rates and (times := self._solve(at_rates)):
            found_rates = [numbers["lr"] for numbers in at_rates(times).rates]
            found_text, meant_text = (
                list_names([f"{lr:.3g}" for lr in dict.fromkeys(values)]) for values in (found_rates, rates)
            )
            if found_text != meant_text:
                yield f"the learning rate is {found_text}, not {meant_text}", at_rates(times)
        unclipped = loop.with_clip(None)
        # SGD moves by lr * gradient, so a scaled gradient shows. Compared gradients show it themselves.
        shows_sizes = update.rule == "SGD" and not has_grads
        if shows_sizes and (times := self._solve(lambda times: unclipped.changed(scale, factor=times))):
            yield f"gradients are {times:.3g} times as large", loop.changed(scale, factor=times)
        if clip is not None and (times := self._solve(lambda times: loop.with_clip(clip * times))):
            clipped = loop.with_clip(clip * times)
            if any(float(norm) > _MIN_CLIPPED_RATIO * clip * times for norm in clipped.run().norm or ()):
                yield f"gradients are clipped to {clip * times:.3g}, not {clip:.3g}", clipped

    def _solve(self, loop_at: Callable[[float], Loop]) -> float | None:
        """Return the factor, a plain one or of three digits, whose loop moves the largest leaf as far as it has moved.

        Each round multiplies the factor by <loop movement, movement> / <loop movement, loop movement>, the
        least-squares ratio of the two movements.
        """
        index = max(self.param_by_leaf, key=lambda index: self.param_by_leaf[index][1].numel())
        start = to_double(tree.leaves(tuple(self.loop.params))[index])
        movement, factor = (to_double(self.param_by_leaf[index][1]) - start).flatten(), 1.0
        for _ in range(_SOLVER_ROUNDS):
            loop_movement = (to_double(tree.leaves(loop_at(factor).run().params)[index]) - start).flatten()
            if not loop_movement.any():
                return None
            ratio = float(torch.vdot(loop_movement, movement).real / torch.vdot(loop_movement, loop_movement).real)
            if not 0 < ratio < inf:
                return None
            factor *= ratio
        nearest = min(nearest_plain_scale(factor), float(f"{factor:.3g}"), key=lambda value: abs(value - factor))
        return None if nearest == 1.0 else nearest


def _limit(right: Tensor, moved: Tensor) -> float:
    """Return how far a value may be from the right one, which noise on the gradients has `moved`."""
    spread, size = float((to_double(moved) - to_double(right)).norm()), float(to_double(right).norm())
    return _SPREAD_FACTOR * spread + 4 * torch.finfo(right.dtype).eps * size


def _resize_grads(step: StepGradients) -> Any:
    """Multiply each number of the gradients by a random factor from 0.5 to 1.5, so that its sign stays."""
    generator = torch.Generator().manual_seed(step.step_index)

    def resize(grad: Any) -> Any:
        return grad if grad is None else grad * (torch.rand(grad.shape, generator=generator) + 0.5).to(grad)

    return tree.tree_map(resize, step.grads)


def with_rounding_noise(loop: Loop) -> Loop:
    """Return a loop with noise of the size of rounding on its gradients, as another order of additions makes.

    If the gradient of a leaf is nothing but rounding, as of the bias of an attention's keys, each number gets the other
    sign: an optimizer that divides by the size of gradients then moves it the other way.
    """

    def change(step: StepGradients) -> Any:
        grads = step.grads if loop.change is None else loop.change(step)
        generator = torch.Generator().manual_seed(step.step_index)
        max_size = max((_size(grad) for grad in tree.leaves(grads) if grad is not None and grad.numel()), default=0.0)

        def move(grad: Any) -> Any:
            if grad is None or not grad.numel():
                return grad
            numbers, size, eps = to_double(grad), _size(grad), torch.finfo(grad.dtype).eps
            # Below the rounding error of the largest gradient, a gradient is nothing but rounding.
            if 0 < size < eps * max_size:
                signs = torch.where(numbers == 0, torch.ones_like(numbers), -numbers.sgn())
                return (eps * max_size * signs).to(grad.dtype)
            noise = torch.randn(grad.shape, generator=generator, dtype=torch.float64).to(grad.device)
            return (numbers + noise * size * eps * _NOISE_EPSILONS).to(grad.dtype)

        return tree.tree_map(move, grads)

    return replace(loop, change=change)


def _size(grad: Tensor) -> float:
    """Return the root mean square of a gradient."""
    return float(to_double(grad).norm()) / grad.numel() ** 0.5
