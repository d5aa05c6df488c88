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
from fpipe.oracle.after_steps import GRADIENT, AfterSteps, shaken
from fpipe.oracle.gradient_changes import Parts
from fpipe.oracle.named_leaves import params_by_leaf, put_together, without_wrappers
from fpipe.oracle.step_mistakes import Loop, clipped_by_parts
from fpipe.transforms.update import words_of_update
from fpipe.verification.report import (
    Close,
    GradientMismatch,
    Report,
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
    named, pieces = params_by_leaf(the_model(model), params, after)
    check_all_state(model, state, "compare_step")
    batch_by_step = _batch_by_step(batches)
    _check_by_name(opt, grads, opt_after)
    whole("microbatches", microbatches)
    words = words_of(words_of_update(rule, clip, groups, settings))
    if all(stage.names is not None for stage in model.stages):
        check_groups(words, [name for stage in params for name in names_of(tree.flatten(stage)[1])])
    if opt is not None:
        check_optimizer_state(words, params, opt)
    numbers = [numbers_of(rate) for rate in rates_of(lr, len(batch_by_step), words)]
    constant = {word: value for word, value in numbers[0].items() if all(step.get(word) == value for step in numbers)}
    constant.pop("lr", None)
    words = words._replace(settings=(*words.settings, *constant.items()))
    steps = [[cut(batch, index, microbatches) for index in range(microbatches)] for batch in batch_by_step]
    ranks = [] if pieces is None else pieces.regions
    loop = Loop(
        model=model,
        params=params,
        opt=initial_states(words, params) if opt is None else opt,
        state=state,
        steps=steps,
        words=words,
        rates=[{word: value for word, value in step.items() if word not in constant} for step in numbers],
        gradients=_Gradients(model, params, state, steps),
        keys=_values_by_step(key, len(steps), "key"),
        regions=[{k: regions[name] for k, (name, _) in named.items() if name in regions} for regions in ranks],
    )
    expected = _run(loop, batches)
    compared = AfterSteps(named, loop, expected, close)
    differing = [*pieces.differing] if pieces is not None else []
    messages = [*_differing_copies(compared, differing), *_wrong_values(compared, grads or {}, opt_after or {})]
    messages += [*_wrong_series("loss", loss, expected.loss), *_wrong_series("norm", norm, expected.norm or ())]
    report = compared.report
    if not compared.wrong and not messages:
        return report if grads or opt_after else replace(report, notes=(*report.notes, *compared.hidden_sizes(norm)))
    raise GradientMismatch("\n".join(messages if differing else [*compared.message(bool(grads)), *messages]), report)


_SEVERAL = "of several steps hand in a list, [batch, ..], and not a tuple"


def _batch_by_step(batches: Any) -> list[Any]:
    by_step: list[Any] = batches if isinstance(batches, list) else [batches]
    if not by_step:
        raise ValueError("batches is the batch (inputs, target) of the step, or a list with that of each; found none.")
    if isinstance(batches, tuple) and len(batches) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"a batch is a pair (inputs, target), found a tuple of {len(batches)}; {_SEVERAL}.")  # pyright: ignore[reportUnknownArgumentType]
    for batch in by_step:
        check_batch(batch)
    return by_step


def _run(loop: Loop, batches: Any) -> Result:
    """Run the loop; two pairs in a tuple may be one batch of two inputs and two targets, or were to be a list."""
    try:
        return loop.run()
    except Exception as error:
        pairs = isinstance(batches, tuple) and all(isinstance(pair, tuple) for pair in batches)  # pyright: ignore[reportUnknownVariableType]
        if not pairs:
            raise
        raise ValueError(
            f"one batch of these inputs and these targets, {len(batches[0])} and {len(batches[1])}, ends in "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; {_SEVERAL}."
        ) from error


def _check_by_name(opt: Any, grads: Any, opt_after: Any) -> None:
    """Raise TypeError for gradients or optimizer state that are not by name."""
    if opt is not None and not isinstance(opt, list | tuple):
        raise TypeError(f"opt is what optimizer_state makes, one tree a stage; found {type(opt).__name__}.")
    ranks: list[Any] = [*grads] if isinstance(grads, list | tuple) else [grads or {}]
    if not all(isinstance(named, Mapping) and all(grad is not None for grad in named.values()) for named in ranks):
        raise TypeError('grads is a dict of tensors by name, {"0.weight": p.grad}, or a list with that of each rank.')
    states: Any = opt_after or {}
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise TypeError(
            'opt_after is by name, {"0.weight": {"exp_avg": .., "step": ..}}, as {name: optimizer.state[p] for name, p '
            "in net.named_parameters()} is; an optimizer's state_dict() has numbers for names."
        )


class _Gradients:
    """Gradients of some microbatches, as a mean over their rows.

    All mistakes begin with the first parameters: gradients at these are computed once, while few numbers are kept.
    """

    def __init__(self, model: Model, params: Sequence[Any], state: Any, steps: Sequence[Parts]) -> None:
        self.model, self.params, self.state = model, params, state
        self.parts = {id(part): part for step in steps for part, _ in step}  # alive, so that an id names one part
        numbers = sum(leaf.numel() for leaf in tree.leaves(tuple(params)) if isinstance(leaf, Tensor))
        self.most_results = _MOST_NUMBERS_KEPT // (1 + numbers)
        self.results = dict[Any, Result]()

    def __call__(
        self, read: Sequence[Any], parts: Parts, state: Any = None, key: int | None = None, see: Any = None
    ) -> Result:
        is_first = see is None and state is self.state and all(map(operator.is_, read, self.params))
        is_known = is_first and all(id(part) in self.parts for part, _ in parts)
        name = (key, *(id(part) for part, _ in parts)) if is_known else None
        if name in self.results:
            return self.results[name]
        result = over_parts(self.model, read, parts, state=state, key=key, see=see)
        if name is not None and len(self.results) < self.most_results:
            self.results[name] = result
        return result


_MOST_NUMBERS_KEPT = 2**26


def _values_by_step(values: Any, steps: int, word: str) -> list[Any]:
    """Return the value of each step, from one for all steps or a list.

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


def _differing_copies(compared: AfterSteps, names: Sequence[str]) -> list[str]:
    """Describe parameters of which ranks had copies before the steps, and have different ones after them."""
    if not names:
        return []
    for words, loop in clipped_by_parts(compared.loop):
        if not compared.wrong_beside(loop, loop.run()):
            return [f"Ranks have copies that differ, such as {names[0]}: {words}."]
    words = "Ranks have copies that differ: gradients of these are not added over replicas or tensor-parallel ranks"
    norms = ", or each rank clips by a norm of its own" * (compared.loop.words.clip is not None)
    return [f"{words}{norms}: {listed(names)}."]


def _not_added(name: str, ranks: Sequence[Tensor], right: Tensor) -> str:
    """Describe a gradient of which each rank has an addend of a sum, or of a mean, that is not added up."""
    count, total = len(ranks), torch.stack([wide(leaf) for leaf in ranks]).sum(0)
    close = Close(_NEAR, _NEAR * float(wide(right).abs().max()))
    times = next((k for k in range(1, count + 1) if count % k == 0 and close(total / k, wide(right))), None)
    if times is None:
        return f"The gradient of {name} is another one on each of {count} ranks that are to have copies."
    have = "have the mean" if times == count else f"add up to {times} times" if times > 1 else "add up to"
    return f"The gradient of {name} is not added over ranks: those of {count} {have} the right one."


_NEAR = 1e-4
"""How near a sum over ranks is to the gradient that it explains."""


def _wrong_values(
    compared: AfterSteps,
    grads: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Describe gradients and optimizer state that differ from the loop's."""
    right, messages = compared.values_of(compared.expected), list[str]()
    names = [name for name, _ in compared.named.values()]
    states = without_wrappers(states, names)
    grads = without_wrappers(grads, names) if isinstance(grads, Mapping) else [*grads]
    if not isinstance(grads, Mapping):
        grads = [without_wrappers(rank, names) for rank in grads]
        shapes = {name.removeprefix(GRADIENT): leaf.shape for name, leaf in right.items()}
        _refuse_unknown([GRADIENT + name for named in grads for name in named], right)
        pieces = put_together(grads, shapes)
        for name, ranks in pieces.differing.items():
            messages.append(_not_added(name, ranks, right[GRADIENT + name]))
        grads = {name: leaf for name, leaf in pieces.whole.items() if name not in pieces.differing}
    values = {GRADIENT + name: leaf for name, leaf in grads.items()}
    values |= {f"{word} of {name}": leaf for name, state in states.items() for word, leaf in state.items()}
    _refuse_unknown([*values], right)
    for what, leaf in values.items():
        values[what] = torch.as_tensor(leaf.full_tensor() if is_sharded(leaf) else leaf).detach()
        if values[what].shape != right[what].shape:
            raise ValueError(f"{what} has the shape {[*leaf.shape]}, and is to have {[*right[what].shape]}.")
    wrong = [what for what, leaf in values.items() if not compared.same(leaf, right[what])]
    if wrong and compared.close is None:
        moved = compared.values_of(shaken(compared.loop).run())
        wrong = [what for what in wrong if not compared.near(values[what], right[what], moved[what])]
    if wrong:
        messages.append(f"{len(wrong)} of {len(values)} values beside the parameters are others: {listed(wrong)}.")
    return messages


def _refuse_unknown(names: Sequence[str], right: Mapping[str, Tensor]) -> None:
    unknown = next((name for name in names if name not in right), None)
    if unknown is not None:
        raise ValueError(f"there is nothing to compare {unknown} with; there is {listed([*right])}.")


def _wrong_series(word: str, series: Any, expected: Any) -> list[str]:
    """Describe the first loss or norm of another pipeline that differs from the loop's."""
    values = _values_by_step(series, len(expected), word)
    for step, (value, right) in enumerate(zip(values, expected, strict=True)):
        if value is not None and not is_mean_to_rounding(torch.as_tensor(value, dtype=torch.float32), right.float()):
            times = f": {float(value) / float(right):.4g} x" if right else ""
            return [f"The {word} of step {step} is {float(value):g}, and not {float(right):g}{times}."]
    return []
