"""Judge what another pipeline tells of its steps beside the parameters: losses, norms, gradients, optimizer state.

loss 4.2, norm 1.3, {"0.weight": p.grad}        -->        sentences about those that are not the loop's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.purity.sharded import is_sharded
from fpipe.oracle.after_steps import GRADIENT, AfterSteps, shaken
from fpipe.oracle.rank_pieces import put_together
from fpipe.oracle.step_mistakes import clipped_by_parts
from fpipe.verification.report import Close, listed, wide
from fpipe.verification.rounding import is_mean_to_rounding


def one_a_step(given: Any, steps: int, word: str) -> list[Any]:
    """Values of each step, given for each or once for all.

    Raises:
        TypeError: no numbers.
        ValueError: not as many as steps.
    """
    found: list[Any] = [*given] if isinstance(given, list | tuple) else [given] * steps
    odd = next((one for one in found if not isinstance(one, int | float | Tensor | None)), None)
    if odd is not None:
        raise TypeError(f"{word} is one number, or a list with that of each step; found {odd!r}.")
    if len(found) != steps:
        raise ValueError(f"{word} is one number, or a list of {steps}, one for each step; found {len(found)}.")
    return found


def differ_by_rank(judged: AfterSteps, names: Sequence[str]) -> list[str]:
    """A sentence about parameters that were copies before the steps."""
    if not names:
        return []
    for words, loop in clipped_by_parts(judged.loop):
        if not judged.wrong_beside(loop, loop.run()):
            return [f"Ranks have copies that differ, such as {names[0]}: {words}."]
    words = "Ranks have copies that differ: gradients of these are not added over replicas or tensor-parallel ranks"
    norms = ", or each rank clips by a norm of its own" * (judged.loop.words.clip is not None)
    return [f"{words}{norms}: {listed(names)}."]


def _not_added(name: str, ranks: Sequence[Tensor], right: Tensor) -> str:
    """A sentence about a gradient of which ranks have parts of a sum, or of a mean, that nobody adds up."""
    many, total = len(ranks), torch.stack([wide(one) for one in ranks]).sum(0)
    close = Close(_NEAR, _NEAR * float(wide(right).abs().max()))
    times = next((k for k in range(1, many + 1) if many % k == 0 and close(total / k, wide(right))), None)
    if times is None:
        return f"The gradient of {name} is another one on each of {many} ranks that are to have copies."
    have = "have the mean" if times == many else f"add up to {times} times" if times > 1 else "add up to"
    return f"The gradient of {name} is not added over ranks: those of {many} {have} the right one."


_NEAR = 1e-4
"""How near a sum over ranks is to the gradient that it explains."""


def beside(
    judged: AfterSteps,
    grads: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Sentences about gradients and optimizer state that are not the loop's."""
    right, said = judged.values_of(judged.expected), list[str]()
    if not isinstance(grads, Mapping):
        shapes = {name.removeprefix(GRADIENT): leaf.shape for name, leaf in right.items()}
        _refuse_unknown([GRADIENT + name for one in grads for name in one], right)
        pieces = put_together(grads, shapes)
        for name, ranks in pieces.apart.items():
            said.append(_not_added(name, ranks, right[GRADIENT + name]))
        grads = {name: leaf for name, leaf in pieces.whole.items() if name not in pieces.apart}
    given = {GRADIENT + name: leaf for name, leaf in grads.items()}
    given |= {f"{word} of {name}": leaf for name, state in states.items() for word, leaf in state.items()}
    _refuse_unknown([*given], right)
    found = {
        what: torch.as_tensor(leaf.full_tensor() if is_sharded(leaf) else leaf).detach() for what, leaf in given.items()
    }
    for what, leaf in found.items():
        if leaf.shape != right[what].shape:
            raise ValueError(f"{what} has the shape {[*leaf.shape]}, and is to have {[*right[what].shape]}.")
    odd = [what for what, leaf in found.items() if not judged.same(leaf, right[what])]
    if odd and judged.close is None:
        moved = judged.values_of(shaken(judged.loop).run())
        odd = [what for what in odd if not judged.near(found[what], right[what], moved[what])]
    return said + [f"{len(odd)} of {len(given)} values beside the parameters are others: {listed(odd)}."] * bool(odd)


def _refuse_unknown(given: Sequence[str], right: Mapping[str, Tensor]) -> None:
    unknown = next((what for what in given if what not in right), None)
    if unknown is not None:
        raise ValueError(f"there is nothing to compare {unknown} with; there is {listed([*right])}.")


def told_of(word: str, told: Any, expected: Any) -> list[str]:
    """A sentence about the first loss or norm that another pipeline told and that is not the loop's."""
    for step, (one, right) in enumerate(zip(one_a_step(told, len(expected), word), expected, strict=True)):
        if told is not None and not is_mean_to_rounding(torch.as_tensor(one, dtype=torch.float32), right.float()):
            times = f": {float(one) / float(right):.4g} x" if right else ""
            return [f"The {word} of step {step} is {float(one):g}, and not {float(right):g}{times}."]
    return []
