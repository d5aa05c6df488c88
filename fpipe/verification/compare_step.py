"""Judge what another pipeline, or a loop of one's own, made of one or several training steps.

{"0.weight": w}  after two steps        --> compare_step -->        a Report, or the mistake by its name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.purity.sharded import is_sharded
from fpipe.limits import whole
from fpipe.model import Model, check_params, the_model
from fpipe.models.parameters.params import join_params
from fpipe.optimizers.op_words import words_of
from fpipe.optimizers.state import initial_states
from fpipe.single_device.batches import check_batch
from fpipe.single_device.microbatch import cut
from fpipe.single_device.reference import check_all_state, over_parts
from fpipe.single_device.result import Result
from fpipe.transforms.update import words_of_update
from fpipe.verification.compare_grads import dotted
from fpipe.verification.rank_pieces import put_together
from fpipe.verification.report import Close, GradientMismatch, Leaf, Report, is_finite, largest, listed, wide
from fpipe.verification.rounding import is_mean_to_rounding
from fpipe.verification.step_mistakes import Loop, Parts, mistakes

_SPREAD = 10.0
"""How much further than a small change of the gradients moves a parameter it may be."""


def compare_step(
    model: Model,
    params: Sequence[Any],
    batches: tuple[Any, Any] | list[tuple[Any, Any]],
    after: Any,
    *,
    rule: str | type[Any],
    lr: float | Sequence[float],
    clip: float | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    opt: Sequence[Any] | None = None,
    norm: float | Tensor | Sequence[Any] | None = None,
    loss: float | Tensor | Sequence[Any] | None = None,
    grads: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    opt_after: Mapping[str, Mapping[str, Any]] | None = None,
    microbatches: int = 1,
    state: Sequence[Any] | None = None,
    key: int | Sequence[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **settings: Any,
) -> Report:
    """Compare parameters after training steps made elsewhere with those of plain autograd and torch.optim, and name the
    mistake that explains them.

    Args:
        model, params, state, key: as for `reference`, before the first step.
        batches: the whole batch of the step, of all replicas; or a list with that of each step.
        after: the parameters after the last step, by the names of the state_dict (one name of a tied one is enough,
            and buffers may be among them), or one tree for each stage. DTensors are put together. Of ranks that have a
            part each a list of such dicts: pieces along one dimension are put together in the order of the ranks, and
            copies have to be equal: otherwise their gradients are not added over these ranks.
        rule, clip, groups, settings: the update that was meant, as for `update`.
        lr: the learning rate, or that of each step.
        opt: the optimizer's state before the first step, as `optimizer_state` makes it; that of the first by default.
        norm, loss: what the other pipeline told of them, of each step; compared too, where given.
        grads: the gradients of the last step by name, before they are clipped, or a dict for each rank; compared too,
            where given.
        opt_after: the optimizer's state after the last step by name, `{"0.weight": {"exp_avg": .., "step": ..}}`;
            compared too, where given.
        microbatches: how many equal parts each batch was cut into, over all replicas: so mistakes in adding them up are
            told apart.
        rtol, atol: relative and absolute tolerance. Without either a parameter may be as far away as small changes of
            the gradients move it, which is little but where an optimizer divides by them.

    Returns:
        A `Report` with a leaf for each parameter.

    Raises:
        ValueError: a name too many or too few, a parameter of another shape; what `update` and `reference` refuse.
        GradientMismatch: a parameter that is another one, with the mistake, if one explains all of them.

    >>> import fpipe, torch
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> before = tuple({name: leaf.clone() for name, leaf in stage.items()} for stage in params)
    >>> batch = (torch.randn(8, 3), torch.randn(8, 1))
    >>> optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    >>> torch.nn.functional.mse_loss(net(batch[0]), batch[1]).backward()
    >>> optimizer.step()
    >>> after = dict(net.named_parameters())
    >>> fpipe.compare_step(model, before, batch, after, rule="AdamW", lr=0.01, weight_decay=0.1)
    Traceback (most recent call last):
    fpipe.verification.report.GradientMismatch: 4 of 4 parameters are not those of plain autograd and AdamW.
    There is no weight decay.
      0.weight, 0.bias, 2.weight, 2.bias
    """
    close = None if rtol is None and atol is None else Close(rtol, atol)
    found, apart = _by_leaf(the_model(model), params, after)
    check_all_state(model, state, "compare_step")
    each: list[Any] = batches if isinstance(batches, list) else [batches]
    for batch in each:
        check_batch(batch)
    whole("microbatches", microbatches)
    words = words_of(words_of_update(rule, clip, groups, settings))
    loop = Loop(
        model=model,
        params=params,
        opt=initial_states(words, params) if opt is None else opt,
        state=state,
        steps=[[cut(batch, index, microbatches) for index in range(microbatches)] for batch in each],
        words=words,
        rates=_one_a_step(lr, len(each), "lr"),
        plain=partial(_plain, model),
        keys=_one_a_step(key, len(each), "key"),
    )
    expected = loop.run()
    judged = _AfterSteps(found, params, loop, expected, close)
    told = _differ_by_rank(apart) + _beside(judged, grads or {}, opt_after or {})
    told += [*_told("loss", loss, expected.loss, microbatches), *_told("norm", norm, expected.norm, microbatches)]
    report = judged.report
    if not judged.wrong and not told:
        return report
    raise GradientMismatch("\n".join(told if apart else [*judged.message(), *told]), report)


def _one_a_step(given: Any, steps: int, word: str) -> list[Any]:
    found = [*given] if isinstance(given, list | tuple) else [given] * steps
    if len(found) != steps:
        raise ValueError(f"{word} is one number, or a list of {steps}, one for each step; found {len(found)}.")
    return found


def _plain(
    model: Model, read: Sequence[Any], parts: Parts, state: Any = None, key: int | None = None, see: Any = None
) -> Result:
    """Gradients of some microbatches, as a mean over their rows."""
    return over_parts(model, read, parts, state=state, key=key, see=see, zeros=False)


def _by_leaf(model: Model, params: Sequence[Any], after: Any) -> tuple[dict[int, tuple[str, Tensor]], list[str]]:
    """The parameters after the steps by the number of their leaf, with their names; and names of those of which ranks
    have copies that differ."""
    apart: Mapping[str, Any] = {}
    leaves, containers = tree.flatten(tuple(check_params(model, params)))
    numbered = join_params(model, tree.unflatten(containers, range(len(leaves))))
    if isinstance(after, tuple | list) and _by_ranks(model, after):  # pyright: ignore[reportUnknownArgumentType]
        shapes = {dotted(place): leaves[at].shape for place, at in tree.paths(numbered)}
        after, apart = put_together(after, shapes)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(after, tuple | list):
        after = join_params(model, [*after])  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(after, Mapping):
        raise ValueError(
            "after is a dict by name, such as {name: p for name, p in net.named_parameters()}, or one tree for each "
            f"stage; found {type(after).__name__}."
        )
    places = {dotted(place): at for place, at in tree.paths(numbered)}
    own: dict[str, Any] = {dotted(place): leaf for place, leaf in tree.paths(after)}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, at in places.items():
        leaf = own.get(name)
        if at in found or leaf is None:
            continue
        leaf = leaf.full_tensor() if is_sharded(leaf) else leaf
        if not isinstance(leaf, Tensor) or leaf.shape != leaves[at].shape:
            is_now = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"{name!r} has the shape {is_now} after the steps, and {[*leaves[at].shape]} before.")
        found[at] = name, leaf.detach().to(leaves[at].device)
    missing = next((name for name, at in places.items() if at not in found), None)
    if missing is not None:
        raise ValueError(f"there is no {missing!r} after the steps; found {listed([*own]) or 'nothing'}.")
    return found, [*apart]


def _by_ranks(model: Model, after: Sequence[Any]) -> bool:
    """Whether these are dicts by the names of a net, of a stage or a rank each."""
    flat = all(isinstance(one, Mapping) and all(isinstance(name, str) for name in one) for one in after)
    return flat and all(stage.names is not None for stage in model.stages)


def _differ_by_rank(names: Sequence[str]) -> list[str]:
    """A sentence about parameters that were copies before the steps."""
    words = "Ranks have copies that differ: gradients of these are not added over replicas or tensor-parallel ranks"
    return [f"{words}: {listed(names)}."] if names else []


def _not_added(name: str, ranks: Sequence[Tensor], right: Tensor) -> str:
    """A sentence about a gradient that ranks have each a part of."""
    total = torch.stack([wide(one) for one in ranks]).sum(0)
    ways = (("add up to", "tensor-parallel ranks", total), ("have the mean", "replicas", total / len(ranks)))
    for way, over, made in ways:
        if Close(_NEAR, _NEAR * float(wide(right).abs().max()))(made, wide(right)):
            return f"The gradient of {name} is not added over {over}: those of {len(ranks)} ranks {way} the right one."
    return f"The gradient of {name} is another one on each of {len(ranks)} ranks that are to have copies."


_NEAR = 1e-4
"""How near a sum over ranks is to the gradient that it explains."""


def _beside(
    judged: _AfterSteps,
    grads: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Sentences about gradients and optimizer state that are not those of the loop."""
    right, said = judged.values_of(judged.expected), list[str]()
    if not isinstance(grads, Mapping):
        shapes = {name.removeprefix(_GRADIENT): leaf.shape for name, leaf in right.items()}
        grads, apart = put_together(grads, shapes)
        for name, ranks in apart.items():
            said.append(_not_added(name, ranks, right[_GRADIENT + name]))
        grads = {name: leaf for name, leaf in grads.items() if name not in apart}
    given = {_GRADIENT + name: leaf for name, leaf in grads.items()}
    given |= {f"{word} of {name}": leaf for name, state in states.items() for word, leaf in state.items()}
    unknown = next((what for what in given if what not in right), None)
    if unknown is not None:
        raise ValueError(f"there is nothing to compare {unknown} with; there is {listed([*right])}.")
    found = {what: _tensor(leaf) for what, leaf in given.items()}
    for what, leaf in found.items():
        if leaf.shape != right[what].shape:
            raise ValueError(f"{what} has the shape {[*leaf.shape]}, and is to have {[*right[what].shape]}.")
    odd = [what for what, leaf in found.items() if not judged.same(leaf, right[what])]
    if odd and judged.close is None:
        moved = judged.values_of(_shaken(judged.loop).run())
        odd = [what for what in odd if not judged.near(found[what], right[what], moved[what])]
    said += [f"{len(odd)} of {len(given)} values beside the parameters are others: {listed(odd)}."] if odd else []
    return said


_GRADIENT = "the gradient of "


def _tensor(leaf: Any) -> Tensor:
    return torch.as_tensor(leaf.full_tensor() if is_sharded(leaf) else leaf).detach()


@dataclass(frozen=True)
class _AfterSteps:
    """Parameters from elsewhere beside those of a loop, and by how much they may differ."""

    found: Mapping[int, tuple[str, Tensor]]
    before: Sequence[Any]
    loop: Loop
    expected: Result
    close: Close | None

    @property
    def wrong(self) -> list[int]:
        """The numbers of the leaves that are others."""
        return self.wrong_beside(self.loop, self.expected)

    def wrong_beside(self, loop: Loop, expected: Result, among: Sequence[int] | None = None) -> list[int]:
        right = tree.leaves(expected.params)
        at = [*self.found] if among is None else among
        odd = [k for k in at if not self.same(self.found[k][1], right[k])]
        if not odd or self.close is not None:
            return odd
        moved = tree.leaves(_shaken(loop).run().params)
        return [k for k in odd if not self.near(self.found[k][1], right[k], moved[k])]

    def values_of(self, result: Result) -> dict[str, Tensor]:
        """The gradients of the last step and the optimizer's state after it, by what messages call them."""
        names = {at: name for at, (name, _) in self.found.items()}
        grads = tree.leaves(result.grads[-1])
        opt: Any = result.opt
        states: Any = tree.flatten(tuple(self.before))[1].flatten_up_to(opt)
        found = {_GRADIENT + name: grads[at] for at, name in names.items() if grads[at] is not None}
        return found | {f"{word} of {name}": leaf for at, name in names.items() for word, leaf in states[at].items()}

    def same(self, one: Tensor, other: Any) -> bool:
        return not isinstance(other, Tensor) or (self.close or Close())(one.to(other.dtype), other)

    def near(self, one: Tensor, right: Tensor, moved: Tensor) -> bool:
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

    def message(self) -> list[str]:
        """Which mistake explains the parameters that are others."""
        wrong = self.wrong
        if not wrong:
            return []
        names = listed([self.found[at][0] for at in wrong])
        of = f"{len(wrong)} of {len(self.found)} parameters are not those of plain autograd and {self.loop.words.by}."
        before = tree.leaves(tuple(self.before))
        still = [at for at in wrong if torch.equal(self.found[at][1], before[at])]
        if still:
            names = listed([self.found[at][0] for at in still])
            return [of, f"{len(still)} of them are as they were: no update reached them.", f"  {names}"]
        best = self._nearest_mistake() or "no mistake that is known explains them"
        return [of, f"{best[0].upper()}{best[1:]}.", f"  {names}"]

    def _nearest_mistake(self) -> str | None:
        """The mistake that makes these parameters, of several the one that comes nearest. A loop is
        shaken only if none that comes nearer explains them: that is to run it once more."""
        tried = list[tuple[float, str, Loop]]()
        for words, loop in mistakes(self.loop):
            tried.append((self._error(loop.run()), words, loop))
            if tried[-1][0] == 0.0:
                break
        near = sorted((one for one in tried if isfinite(one[0])), key=itemgetter(0))
        return next((words for _, words, loop in near if not self.wrong_beside(loop, loop.run())), None)

    def _error(self, made: Result) -> float:
        """How far away the parameters are that a loop makes: after few steps several mistakes may look alike."""
        right = tree.leaves(made.params)
        pairs = ((leaf, right[at]) for at, (_, leaf) in self.found.items() if isinstance(right[at], Tensor))
        return sum(float((wide(one) - wide(other)).norm()) for one, other in pairs)


def _shaken(loop: Loop) -> Loop:
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


def _told(word: str, told: Any, expected: Any, microbatches: int) -> list[str]:
    """Sentences about a loss or norm that another pipeline told."""
    if told is None:
        return []
    found = [torch.as_tensor(one) for one in _one_a_step(told, len(expected), word)]
    for step, (one, right) in enumerate(zip(found, expected, strict=True)):
        if is_mean_to_rounding(one.to(torch.float32), right.to(torch.float32)):
            continue
        ratio = float(one) / float(right) if float(right) else float("inf")
        scales = {k: f"{k} x" for k in (2, 4, 8, microbatches)} | {1 / k: f"1/{k} x" for k in (2, 4, 8, microbatches)}
        roots = {k**0.5: f"counts everything {k} times" for k in (2, 4, 8)} if word == "norm" else {}
        words = next((said for scale, said in (scales | roots).items() if abs(ratio / scale - 1) < 1e-4), "")
        return [f"The {word} of step {step} is {float(one):g}, and not {float(right):g}{': ' * bool(words)}{words}."]
    return []
