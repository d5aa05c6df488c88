"""Compare the parameters after training steps of another pipeline or loop with plain autograd and torch.optim.

{"0.weight": w}  after two steps        --> compare_step -->        a RunReport, or the mistake by its name

The last step becomes a record, as `record_run` writes one, and the phases of `compare_run` judge it. What nobody hands
in is the reference's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from fpipe.meaning.optimizers.rules import (
    as_number_by_name,
)
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.single_device.microbatch import cut
from fpipe.meaning.single_device.params_and_state import check_all_state, check_batch
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model, require_loss
from fpipe.oracle.compare_grads import compare_grads
from fpipe.oracle.named_leaves import join_ranks, params_by_leaf, strip_wrapper_names
from fpipe.oracle.recorded_step import ReferenceNames
from fpipe.oracle.run_clip import judge_norm
from fpipe.oracle.run_phases import add_fault
from fpipe.oracle.run_report import Findings, RunReport, report_of
from fpipe.oracle.run_update import judge_update
from fpipe.oracle.step_training import Training, record_step
from fpipe.transforms.update import update_options
from fpipe.verification.report import Close, GradientMismatch, means_agree_to_rounding


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
) -> RunReport:
    """Compare parameters after another pipeline's training steps with plain autograd and torch.optim.

    The phases of the last step are judged as `compare_run` judges a recorded one: gradients, norm, update, copies.

    Args:
        model, params, state, key: as for `reference`, before the first step.
        batches: the whole batch of the step, of all replicas; or a list with that of each step.
        after: the parameters after the last step, by the names of the state_dict (one name of a tied one is enough,
            and buffers may be among them), or one tree for each stage. DTensors are put together. Of ranks that have a
            part each a list of such dicts: pieces along one dimension are put together in the order of the ranks, and
            copies have to be equal.
        rule, clip, groups, settings: the update that was meant, as for `update`.
        lr: the learning rate, or that of each step; or a dict of it and of other numbers of the rule, as a step takes.
        opt: the optimizer's state before the first step, as `optimizer_state` makes it; that of the first by default.
        norm, loss: the other pipeline's norm and loss of each step; compared too.
        grads: the gradients of the last step by name, before they are clipped, or a dict for each rank; judged as
            `compare_grads` does, and the update is then judged with them.
        opt_after: the optimizer's state after the last step by name, `{"0.weight": {"exp_avg": .., "step": ..}}`;
            compared too.
        microbatches: how many equal parts each batch was cut into, over all replicas.
        rtol, atol: relative and absolute tolerance. Without either a parameter may be as far away as small changes of
            the gradients move it, which is little but where an optimizer divides by them.

    Returns:
        A `Report` with a leaf for each parameter, whose `.where`, `.phase` and `.mistake` are None.

    Raises:
        ValueError: a name too many or too few, a parameter of another shape; what `update` and `reference` refuse.
        GradientMismatch: a parameter that is another one, with the phase, and the mistake if one explains it.

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
    fpipe.verification.report.GradientMismatch: 0.weight, update of step 0: there is no weight decay.
    The gradients are the reference's: hand in grads=, or record the run with fpipe.record_run.
    """
    # 1. Check what was handed in, and bring it into the order of leaves and steps.
    param_by_leaf, pieces = params_by_leaf(model, params, after)
    require_loss(model, "there are no gradients to update by")
    check_all_state(model, state, "compare_step")
    batch_by_step = _batch_by_step(batches)
    _check_by_name(opt, grads, opt_after)
    check_whole_number("microbatches", microbatches)
    update = update_settings(update_options(rule, clip, groups, settings))
    if all(stage.names is not None for stage in model.stages):
        check_groups(update, [name for stage in params for name in names_of_leaves(tree.flatten(stage)[1])])
    if opt is not None:
        check_optimizer_state(update, params, opt)
    count, last_step = len(batch_by_step), len(batch_by_step) - 1
    training = Training(
        model=model,
        update=update,
        steps=[[cut(batch, index, microbatches) for index in range(microbatches)] for batch in batch_by_step],
        rates=[as_number_by_name(rate) for rate in rates_by_step(lr, count, update)],
        keys=_values_by_step(key, count, "key"),
        params=params,
        opt=initial_states(update, params) if opt is None else opt,
        state=state,
    )
    expected = _run_or_explain(training, batches)
    findings = Findings(close=None if rtol is None and atol is None else Close(rtol, atol))
    # 2. Losses, and norms of all steps but the last, whose norm is a phase.
    norms = _values_by_step(norm, count, "norm")
    for phase, values, right in (
        ("loss", _values_by_step(loss, count, "loss"), expected.loss),
        ("norm", norms[:-1], expected.norm),
    ):
        for step, (value, right_value) in enumerate(zip(values, right or (), strict=False)):
            if value is not None and not _is_near(value, right_value):
                times = f": {float(value) / float(right_value):.4g} x" * bool(right_value)
                mistake = f"it is {float(value):.6g}, not {float(right_value):.6g}{times}"
                add_fault(findings, f"the {phase}", phase, mistake, step)
    # 3. The gradients of the last step, and copies on several ranks.
    whole_grads = _join_grads(grads, training.reference_names, findings, last_step)
    if whole_grads:
        start = training.start
        compare_grads(
            model,
            start.params or params,
            batch_by_step[-1],
            whole_grads,
            state=start.state,
            key=training.keys[-1],
            microbatches=microbatches,
            rtol=rtol,
            atol=atol,
        )
    mistake = "ranks have copies that differ: its gradient is not added over them, or each clips by a norm of its own"
    for name in pieces.differing if pieces is not None else ():
        add_fault(findings, name, "replicas", mistake, last_step)
    # 4. The update, given the gradients. Where copies differ, the first rank's tell nothing.
    if not findings.faults:
        rank = record_step(training, dict(param_by_leaf.values()), whole_grads, norms[-1], opt_after or {})
        judge_norm([rank], findings)
        judge_update(rank, None, findings, training.limit_of)
    findings.notes[f"Compared after {count} training step{'s' * (count > 1)}."] = None
    if not whole_grads:
        findings.notes[_UNSEEN_GRADS] = None
    try:
        return report_of(findings)
    except GradientMismatch as error:
        hint = "" if whole_grads or error.report is None else f"\n{_UNSEEN_GRADS}"
        raise GradientMismatch(f"{error}{hint}", error.report) from None


_UNSEEN_GRADS = "The gradients are the reference's: hand in grads=, or record the run with fpipe.record_run."


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


def _run_or_explain(training: Training, batches: Any) -> Result:
    """Run the training; if it fails on a tuple of two pairs, say that these may have been meant as a list of steps."""
    try:
        return training.all_steps
    except Exception as error:
        pairs = isinstance(batches, tuple) and all(isinstance(pair, tuple) for pair in batches)  # pyright: ignore[reportUnknownVariableType]
        if not pairs:
            raise
        raise ValueError(
            f"one batch of these inputs and these targets, {len(batches[0])} and {len(batches[1])}, ends in "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; {_SEVERAL}."
        ) from error


def _check_by_name(opt: Any, grads: Any, opt_after: Any) -> None:
    ranks: list[Any] = [*grads] if isinstance(grads, list | tuple) else [grads or {}]
    if not all(isinstance(named, Mapping) and all(grad is not None for grad in named.values()) for named in ranks):
        raise TypeError('grads is a dict of tensors by name, {"0.weight": p.grad}, or a list with that of each rank.')
    states: Any = opt_after or {}
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise TypeError(
            'opt_after is by name, {"0.weight": {"exp_avg": .., "step": ..}}; an optimizer\'s state_dict() has numbers '
            "for names."
        )


def _values_by_step(values: Any, steps: int, argument: str) -> list[Any]:
    """Return the value for each step, from a list of as many or from one value for all, or raise."""
    by_step: list[Any] = [*values] if isinstance(values, list | tuple) else [values] * steps
    wrong = next((value for value in by_step if not isinstance(value, int | float | Tensor | None)), None)
    if wrong is not None:
        raise TypeError(f"{argument} is one number, or a list with that of each step; found {wrong!r}.")
    if len(by_step) != steps:
        raise ValueError(f"{argument} is one number, or a list of {steps}, one for each step; found {len(by_step)}.")
    return by_step


def _is_near(value: Any, right: Tensor) -> bool:
    return means_agree_to_rounding(torch.as_tensor(value, dtype=torch.float32), right.float())


def _join_grads(grads: Any, names: ReferenceNames, findings: Findings, step: int) -> dict[str, Tensor]:
    """Return gradients by name, joined from the parts of ranks; {} and a fault if copies of ranks differ."""
    ranks: list[Any] = [*grads] if isinstance(grads, list | tuple) else [grads or {}]
    # DTensors of one process are whole on each rank; plain pieces are joined below.
    whole_ranks = [
        {name: leaf.full_tensor() if is_sharded(leaf) else leaf for name, leaf in rank.items()} for rank in ranks
    ]
    named = [strip_wrapper_names(rank, names.first_name) for rank in whole_ranks]
    if not isinstance(grads, list | tuple):
        return named[0]
    shapes = {name: names.params[first_name].shape for name, first_name in names.first_name.items()}
    pieces = join_ranks(named, shapes)
    for name in pieces.differing:
        mistake = "it is not added over ranks: their gradients differ"
        add_fault(findings, name, "reduction", mistake, step)
    return {} if pieces.differing else pieces.tensors
