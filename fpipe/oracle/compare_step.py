"""Judge what another pipeline, or a loop of one's own, made of one or several training steps.

{"0.weight": w}  after two steps        --> compare_step -->        a Report, or the mistake by its name
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.limits import whole
from fpipe.meaning.optimizers.optimizer_state import (
    Rate,
    check_groups,
    check_optimizer_state,
    initial_states,
    names_of,
    rates_of,
    words_of,
)
from fpipe.meaning.optimizers.rules import numbers_of
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.params_and_state import check_all_state, check_batch
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model, the_model
from fpipe.models.parameters.params import join_params
from fpipe.oracle.after_steps import GRADIENT, AfterSteps, shaken
from fpipe.oracle.compare_grads import by_name, numbered_leaves
from fpipe.oracle.gradient_changes import Parts
from fpipe.oracle.rank_pieces import Pieces, Region, put_together
from fpipe.oracle.step_mistakes import Loop, clipped_by_parts
from fpipe.transforms.update import words_of_update
from fpipe.verification.report import (
    Close,
    GradientMismatch,
    Report,
    in_words,
    is_comparable,
    is_mean_to_rounding,
    listed,
    wide,
)


def compare_step(
    model: Model,
    params: Sequence[Any],
    batches: tuple[Any, Any] | list[tuple[Any, Any]],
    after: Any,
    *,
    rule: str | type[Any],
    lr: Rate | Sequence[Rate],
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
        lr: the learning rate, or that of each step; or a dict of it and of other numbers of the rule, as a step takes.
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
        A `Report` with a leaf for each parameter, and a note where parameters alone do not tell of gradients: an
        optimizer that divides by their size hides it.

    Raises:
        ValueError: a name too many or too few, a parameter of another shape; what `update` and `reference` refuse.
        GradientMismatch: a parameter that is another one, with the mistake, if one explains all of them; it "could be"
            one where these parameters tell too little to be sure.

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
    found, pieces = _by_leaf(the_model(model), params, after)
    check_all_state(model, state, "compare_step")
    each = _batches(batches)
    _check_named(opt, grads, opt_after)
    whole("microbatches", microbatches)
    words = words_of(words_of_update(rule, clip, groups, settings))
    if all(stage.names is not None for stage in model.stages):
        check_groups(words, [name for stage in params for name in names_of(tree.flatten(stage)[1])])
    if opt is not None:
        check_optimizer_state(words, params, opt)
    numbers = [numbers_of(rate) for rate in rates_of(lr, len(each), words)]
    same = {word: one for word, one in numbers[0].items() if all(other.get(word) == one for other in numbers)}
    settled = {word: one for word, one in same.items() if word != "lr"}
    words = words._replace(settings=(*words.settings, *settled.items()))
    steps = [[cut(batch, index, microbatches) for index in range(microbatches)] for batch in each]
    loop = Loop(
        model=model,
        params=params,
        opt=initial_states(words, params) if opt is None else opt,
        state=state,
        steps=steps,
        words=words,
        rates=[{word: one for word, one in of.items() if word not in settled} for of in numbers],
        plain=_Plain(model, params, state, steps),
        keys=_values_by_step(key, len(each), "key"),
        places=_places(pieces, found),
    )
    expected = _run(loop, batches)
    judged = AfterSteps(found, loop, expected, close)
    apart = [*pieces.apart] if pieces is not None else []
    told = [*_differing_copies(judged, apart), *_wrong_values(judged, grads or {}, opt_after or {})]
    told += [*_wrong_series("loss", loss, expected.loss), *_wrong_series("norm", norm, expected.norm or ())]
    report = judged.report
    if not judged.wrong and not told:
        return report if grads or opt_after else replace(report, notes=(*report.notes, *judged.untold(norm)))
    raise GradientMismatch("\n".join(told if apart else [*judged.message(bool(grads)), *told]), report)


_SEVERAL = "of several steps hand in a list, [batch, ..], and not a tuple"


def _batches(batches: Any) -> list[Any]:
    """The batch of each step."""
    each: list[Any] = batches if isinstance(batches, list) else [batches]
    if not each:
        raise ValueError("batches is the batch (inputs, target) of the step, or a list with that of each; found none.")
    if isinstance(batches, tuple) and len(batches) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"a batch is a pair (inputs, target), found a tuple of {len(batches)}; {_SEVERAL}.")  # pyright: ignore[reportUnknownArgumentType]
    for batch in each:
        check_batch(batch)
    return each


def _run(loop: Loop, batches: Any) -> Result:
    """The loop's result; two pairs in a tuple may be one batch of two inputs and two targets, or were to be a list."""
    try:
        return loop.run()
    except Exception as error:
        pairs = isinstance(batches, tuple) and all(isinstance(one, tuple) for one in batches)  # pyright: ignore[reportUnknownVariableType]
        if not pairs:
            raise
        raise ValueError(
            f"one batch of these inputs and these targets, {len(batches[0])} and {len(batches[1])}, ends in "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; {_SEVERAL}."
        ) from error


def _check_named(opt: Any, grads: Any, opt_after: Any) -> None:
    """A TypeError for gradients or optimizer state of another shape."""
    if opt is not None and not isinstance(opt, list | tuple):
        raise TypeError(f"opt is what optimizer_state makes, one tree a stage; found {type(opt).__name__}.")
    ranks: list[Any] = [*grads] if isinstance(grads, list | tuple) else [grads or {}]
    if not all(isinstance(one, Mapping) and all(g is not None for g in one.values()) for one in ranks):
        raise TypeError('grads is a dict of tensors by name, {"0.weight": p.grad}, or a list with that of each rank.')
    states: Any = opt_after or {}
    if not isinstance(states, Mapping) or not all(isinstance(one, Mapping) for one in states.values()):
        raise TypeError(
            'opt_after is by name, {"0.weight": {"exp_avg": .., "step": ..}}, as {name: optimizer.state[p] for name, p '
            "in net.named_parameters()} is; an optimizer's state_dict() has numbers for names."
        )


class _Plain:
    """Gradients of some microbatches, as a mean over their rows. Those at the first parameters, which all mistakes
    begin with, are computed once, while few numbers are kept."""

    def __init__(self, model: Model, params: Sequence[Any], state: Any, steps: Sequence[Parts]) -> None:
        self.model, self.params, self.state = model, params, state
        self.parts = {id(part): part for step in steps for part, _ in step}
        self.most = _KEPT // (1 + sum(leaf.numel() for leaf in tree.leaves(tuple(params)) if isinstance(leaf, Tensor)))
        self.known = dict[Any, Result]()

    def __call__(
        self, read: Sequence[Any], parts: Parts, state: Any = None, key: int | None = None, see: Any = None
    ) -> Result:
        """Gradients for these parameters."""
        first = see is None and state is self.state and all(map(operator.is_, read, self.params))
        known = first and all(id(part) in self.parts for part, _ in parts)
        named = (key, *(id(part) for part, _ in parts)) if known else None
        if named in self.known:
            return self.known[named]
        made = over_parts(self.model, read, parts, state=state, key=key, see=see, zeros=False)
        if named is not None and len(self.known) < self.most:
            self.known[named] = made
        return made


_KEPT = 2**26


def _places(pieces: Pieces | None, found: Mapping[int, tuple[str, Tensor]]) -> list[dict[int, Region | None]]:
    """Where in the whole each rank has its part of each leaf."""
    ranks = [] if pieces is None else pieces.places
    return [{at: one[name] for at, (name, _) in found.items() if name in one} for one in ranks]


def _by_leaf(model: Model, params: Sequence[Any], after: Any) -> tuple[dict[int, tuple[str, Tensor]], Pieces | None]:
    """The parameters after the steps by the number of their leaf, with their names; and the pieces that ranks have."""
    pieces: Pieces | None = None
    leaves, numbered = numbered_leaves(model, params)
    places = by_name(numbered)
    if isinstance(after, tuple | list) and _by_ranks(model, after):  # pyright: ignore[reportUnknownArgumentType]
        pieces = put_together(after, {name: leaves[at].shape for name, at in places.items()})  # pyright: ignore[reportUnknownArgumentType]
        after = pieces.whole
    elif isinstance(after, tuple | list):
        after = join_params(model, [*after])  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(after, Mapping):
        raise ValueError(
            "after is a dict by name, such as {name: p for name, p in net.named_parameters()}, or one tree for each "
            f"stage; found {type(after).__name__}."
        )
    own = by_name(after)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, at in places.items():
        leaf = own.get(name)
        if at in found or leaf is None:
            continue
        leaf = leaf.full_tensor() if is_sharded(leaf) else leaf
        before = leaves[at]
        alike = is_comparable(leaf) and (leaf.is_complex(), leaf.layout) == (before.is_complex(), before.layout)
        if not alike and in_words(leaf) != in_words(before):
            raise ValueError(f"{name!r} is {in_words(leaf)} after the steps, and {in_words(before)} before.")
        if leaf.shape != before.shape:
            raise ValueError(f"{name!r} has the shape {[*leaf.shape]} after the steps, and {[*before.shape]} before.")
        found[at] = name, leaf.detach().to(before.device)
    missing = next((name for name, at in places.items() if at not in found), None)
    if missing is not None:
        raise ValueError(f"there is no {missing!r} after the steps; found {listed([*own]) or 'nothing'}.")
    return found, pieces


def _by_ranks(model: Model, after: Sequence[Any]) -> bool:
    """Whether these are dicts by the names of a net, of a stage or a rank each."""
    flat = all(isinstance(one, Mapping) and all(isinstance(name, str) for name in one) for one in after)
    return flat and all(stage.names is not None for stage in model.stages)


def _values_by_step(values: Any, steps: int, word: str) -> list[Any]:
    """The value of each step, from one for all steps or a list.

    Raises:
        TypeError: no numbers.
        ValueError: not as many as steps.
    """
    by_step: list[Any] = [*values] if isinstance(values, list | tuple) else [values] * steps
    wrong = next((value for value in by_step if not isinstance(value, int | float | Tensor | None)), None)
    if wrong is not None:
        raise TypeError(f"{word} is one number, or a list with that of each step; found {wrong!r}.")
    if len(by_step) != steps:
        raise ValueError(f"{word} is one number, or a list of {steps}, one for each step; found {len(by_step)}.")
    return by_step


def _differing_copies(judged: AfterSteps, names: Sequence[str]) -> list[str]:
    """Describe parameters of which ranks had copies before the steps, and have different ones after them."""
    if not names:
        return []
    for words, loop in clipped_by_parts(judged.loop):
        if not judged.wrong_beside(loop, loop.run()):
            return [f"Ranks have copies that differ, such as {names[0]}: {words}."]
    words = "Ranks have copies that differ: gradients of these are not added over replicas or tensor-parallel ranks"
    norms = ", or each rank clips by a norm of its own" * (judged.loop.words.clip is not None)
    return [f"{words}{norms}: {listed(names)}."]


def _not_added(name: str, ranks: Sequence[Tensor], right: Tensor) -> str:
    """Describe a gradient of which each rank has an addend of a sum, or of a mean, that is not added up."""
    many, total = len(ranks), torch.stack([wide(one) for one in ranks]).sum(0)
    close = Close(_NEAR, _NEAR * float(wide(right).abs().max()))
    times = next((k for k in range(1, many + 1) if many % k == 0 and close(total / k, wide(right))), None)
    if times is None:
        return f"The gradient of {name} is another one on each of {many} ranks that are to have copies."
    have = "have the mean" if times == many else f"add up to {times} times" if times > 1 else "add up to"
    return f"The gradient of {name} is not added over ranks: those of {many} {have} the right one."


_NEAR = 1e-4
"""How near a sum over ranks is to the gradient that it explains."""


def _wrong_values(
    judged: AfterSteps,
    grads: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Describe gradients and optimizer state that differ from the loop's."""
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


def _wrong_series(word: str, told: Any, expected: Any) -> list[str]:
    """Describe the first loss or norm of another pipeline that differs from the loop's."""
    for step, (one, right) in enumerate(zip(_values_by_step(told, len(expected), word), expected, strict=True)):
        if told is not None and not is_mean_to_rounding(torch.as_tensor(one, dtype=torch.float32), right.float()):
            times = f": {float(one) / float(right):.4g} x" if right else ""
            return [f"The {word} of step {step} is {float(one):g}, and not {float(right):g}{times}."]
    return []
