"""Compare the result of training steps of another pipeline or a hand-written loop with plain autograd.

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
from fpipe.limits import check_whole_number
from fpipe.meaning.optimizers.optimizer_state import (
    Rate,
    check_groups,
    check_optimizer_state,
    initial_states,
    names_of_leaves,
    rates_by_step,
    update_settings,
)
from fpipe.meaning.optimizers.rules import as_number_by_name
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.microbatch_sums import sum_over_microbatches
from fpipe.meaning.single_device.params_and_state import check_all_state, check_batch
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model, require_model
from fpipe.oracle.after_steps import GRADIENT, ParamsAfterSteps, with_rounding_noise
from fpipe.oracle.gradient_changes import Parts
from fpipe.oracle.named_leaves import join_ranks, params_by_leaf, strip_wrapper_names
from fpipe.oracle.step_mistakes import Loop, loops_clipped_by_rank
from fpipe.transforms.update import update_options
from fpipe.verification.report import Close, GradientMismatch, Report, list_names, means_agree_to_rounding, to_double


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
    """Compare parameters after another pipeline's training steps with plain autograd and torch.optim.

    If they differ, name the mistake that explains them.

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
    # 1. Check what was handed in, and bring it into the order of leaves and steps.
    close = None if rtol is None and atol is None else Close(rtol, atol)
    param_by_leaf, pieces = params_by_leaf(require_model(model), params, after)
    check_all_state(model, state, "compare_step")
    batch_by_step = _batch_by_step(batches)
    _check_by_name(opt, grads, opt_after)
    check_whole_number("microbatches", microbatches)
    update = update_settings(update_options(rule, clip, groups, settings))
    if all(stage.names is not None for stage in model.stages):
        check_groups(update, [name for stage in params for name in names_of_leaves(tree.flatten(stage)[1])])
    if opt is not None:
        check_optimizer_state(update, params, opt)
    settings_by_step = [as_number_by_name(rate) for rate in rates_by_step(lr, len(batch_by_step), update)]
    constant_settings = {
        setting_name: value
        for setting_name, value in settings_by_step[0].items()
        if all(step.get(setting_name) == value for step in settings_by_step)
    }
    constant_settings.pop("lr", None)
    update = update._replace(settings=(*update.settings, *constant_settings.items()))
    # 2. Run the reference loop. Settings that no step changes are part of the rule, so that mistakes can change them.
    steps = [[cut(batch, index, microbatches) for index in range(microbatches)] for batch in batch_by_step]
    ranks = [] if pieces is None else pieces.regions
    loop = Loop(
        model=model,
        params=params,
        opt=initial_states(update, params) if opt is None else opt,
        state=state,
        steps=steps,
        update=update,
        rates=[
            {setting_name: value for setting_name, value in step.items() if setting_name not in constant_settings}
            for step in settings_by_step
        ],
        gradients=_Gradients(model, params, state, steps),
        keys=_values_by_step(key, len(steps), "key"),
        regions=[
            {leaf_index: regions[name] for leaf_index, (name, _) in param_by_leaf.items() if name in regions}
            for regions in ranks
        ],
    )
    expected = _run_or_explain(loop, batches)
    compared = ParamsAfterSteps(param_by_leaf, loop, expected, close)
    # 3. Compare. Copies that differ between ranks come first: then the parameters themselves tell nothing.
    differing = [*pieces.differing] if pieces is not None else []
    messages = [
        *_describe_differing_copies(compared, differing),
        *_describe_wrong_values(compared, grads or {}, opt_after or {}),
    ]
    messages += [
        *_describe_wrong_series("loss", loss, expected.loss),
        *_describe_wrong_series("norm", norm, expected.norm or ()),
    ]
    report = compared.report
    if not compared.wrong_leaves and not messages:
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


def _run_or_explain(loop: Loop, batches: Any) -> Result:
    """Run the loop; if it fails on a tuple of two pairs, say that these may have been meant as a list of steps."""
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
    if opt is not None and not isinstance(opt, list | tuple):
        raise TypeError(f"opt is what optimizer_state makes, one tree a stage; found {type(opt).__name__}.")
    ranks: list[Any] = [*grads] if isinstance(grads, list | tuple) else [grads or {}]
    if not all(isinstance(named, Mapping) and all(grad is not None for grad in named.values()) for named in ranks):
        raise TypeError('grads is a dict of tensors by name, {"0.weight": p.grad}, or a list with that of each rank.')
    states: Any = opt_after or {}
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise TypeError(
            'opt_after is by name, {"0.weight": {"exp_avg": .., "step": ..}}; an optimizer\'s state_dict() has numbers '
            "for names."
        )


class _Gradients:
    """Computes gradients of some microbatches, as a mean over their rows.

    The loops of all mistakes start at the same parameters, so gradients at these are cached, up to a number of numbers.
    """

    def __init__(self, model: Model, params: Sequence[Any], state: Any, steps: Sequence[Parts]) -> None:
        self.model, self.params, self.state = model, params, state
        # Keeps the parts alive, so that an id names one part.
        self.parts = {id(part): part for step in steps for part, _ in step}
        numbers = sum(leaf.numel() for leaf in tree.leaves(tuple(params)) if isinstance(leaf, Tensor))
        self.most_results = _MAX_CACHED_NUMBERS // (1 + numbers)
        self.results = dict[Any, Result]()

    def __call__(
        self, params: Sequence[Any], parts: Parts, state: Any = None, key: int | None = None, observe: Any = None
    ) -> Result:
        # Only without an observer and at the first parameters and state is the result that of another loop, too.
        is_first = observe is None and state is self.state and all(map(operator.is_, params, self.params))
        is_known = is_first and all(id(part) in self.parts for part, _ in parts)
        name = (key, *(id(part) for part, _ in parts)) if is_known else None
        if name in self.results:
            return self.results[name]
        result = sum_over_microbatches(self.model, params, parts, state=state, key=key, observe=observe)
        if name is not None and len(self.results) < self.most_results:
            self.results[name] = result
        return result


_MAX_CACHED_NUMBERS = 2**26


def _values_by_step(values: Any, steps: int, argument: str) -> list[Any]:
    """Return the value for each step, from a list of as many or from one value for all, or raise."""
    by_step: list[Any] = [*values] if isinstance(values, list | tuple) else [values] * steps
    wrong = next((value for value in by_step if not isinstance(value, int | float | Tensor | None)), None)
    if wrong is not None:
        raise TypeError(f"{argument} is one number, or a list with that of each step; found {wrong!r}.")
    if len(by_step) != steps:
        raise ValueError(f"{argument} is one number, or a list of {steps}, one for each step; found {len(by_step)}.")
    return by_step


def _describe_differing_copies(compared: ParamsAfterSteps, names: Sequence[str]) -> list[str]:
    """Explain why copies of a parameter that were equal on all ranks differ after the steps."""
    if not names:
        return []
    for sentence, loop in loops_clipped_by_rank(compared.loop):
        if not compared.leaves_that_differ(loop, loop.run()):
            return [f"Ranks have copies that differ, such as {names[0]}: {sentence}."]
    sentence = "Ranks have copies that differ: gradients of these are not added over replicas or tensor-parallel ranks"
    norms = ", or each rank clips by a norm of its own" * (compared.loop.update.clip is not None)
    return [f"{sentence}{norms}: {list_names(names)}."]


def _describe_unreduced_grad(name: str, ranks: Sequence[Tensor], right: Tensor) -> str:
    """Describe a gradient that differs between ranks, because it was not summed or averaged over them."""
    count, total = len(ranks), torch.stack([to_double(leaf) for leaf in ranks]).sum(0)
    # If the sum over the ranks, divided by a divisor of their number, is the right gradient, each rank has an addend.
    close = Close(_SUM_TOLERANCE, _SUM_TOLERANCE * float(to_double(right).abs().max()))
    times = next((k for k in range(1, count + 1) if count % k == 0 and close(total / k, to_double(right))), None)
    if times is None:
        return f"The gradient of {name} is another one on each of {count} ranks that are to have copies."
    have = "have the mean" if times == count else f"add up to {times} times" if times > 1 else "add up to"
    return f"The gradient of {name} is not added over ranks: those of {count} {have} the right one."


_SUM_TOLERANCE = 1e-4
"""How near a sum over ranks has to be to the gradient that it explains, relatively."""


def _describe_wrong_values(
    compared: ParamsAfterSteps,
    grads: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Describe gradients and optimizer state that differ from the reference loop's."""
    right, messages = compared.grads_and_state_of(compared.expected), list[str]()
    names = [name for name, _ in compared.param_by_leaf.values()]
    states = strip_wrapper_names(states, names)
    grads = strip_wrapper_names(grads, names) if isinstance(grads, Mapping) else [*grads]
    if not isinstance(grads, Mapping):
        grads = [strip_wrapper_names(rank, names) for rank in grads]
        shapes = {name.removeprefix(GRADIENT): leaf.shape for name, leaf in right.items()}
        _refuse_unknown([GRADIENT + name for named in grads for name in named], right)
        pieces = join_ranks(grads, shapes)
        for name, ranks in pieces.differing.items():
            messages.append(_describe_unreduced_grad(name, ranks, right[GRADIENT + name]))
        grads = {name: leaf for name, leaf in pieces.tensors.items() if name not in pieces.differing}
    values = {GRADIENT + name: leaf for name, leaf in grads.items()}
    values |= {f"{state_key} of {name}": leaf for name, state in states.items() for state_key, leaf in state.items()}
    _refuse_unknown([*values], right)
    for value_name, leaf in values.items():
        values[value_name] = torch.as_tensor(leaf.full_tensor() if is_sharded(leaf) else leaf).detach()
        if values[value_name].shape != right[value_name].shape:
            raise ValueError(
                f"{value_name} has the shape {[*leaf.shape]}, and is to have {[*right[value_name].shape]}."
            )
    wrong = [value_name for value_name, leaf in values.items() if not compared.agree(leaf, right[value_name])]
    # Without a tolerance: as far away as rounding noise on the gradients moves them is right.
    if wrong and compared.close is None:
        moved_values = compared.grads_and_state_of(with_rounding_noise(compared.loop).run())
        wrong = [
            value_name
            for value_name in wrong
            if not compared.are_near(values[value_name], right[value_name], moved_values[value_name])
        ]
    if wrong:
        messages.append(f"{len(wrong)} of {len(values)} values beside the parameters are others: {list_names(wrong)}.")
    return messages


def _refuse_unknown(names: Sequence[str], right: Mapping[str, Tensor]) -> None:
    unknown = next((name for name in names if name not in right), None)
    if unknown is not None:
        raise ValueError(f"there is nothing to compare {unknown} with; there is {list_names([*right])}.")


def _describe_wrong_series(quantity: str, series: Any, expected: Any) -> list[str]:
    """Describe the first loss or norm of another pipeline that differs from the reference loop's."""
    values = _values_by_step(series, len(expected), quantity)
    for step, (value, right) in enumerate(zip(values, expected, strict=True)):
        if value is not None and not means_agree_to_rounding(
            torch.as_tensor(value, dtype=torch.float32), right.float()
        ):
            times = f": {float(value) / float(right):.4g} x" if right else ""
            return [f"The {quantity} of step {step} is {float(value):g}, and not {float(right):g}{times}."]
    return []
