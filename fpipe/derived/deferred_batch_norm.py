"""Let batch norms update their running statistics once a step, by the statistics of the whole batch.

microbatch 0: moments -> state        1: merged with it        last: merged, then running_mean and running_var
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.tracing.running_statistics import Norms
from fpipe.model import Model, Stage, Turn
from fpipe.models.modules.stage_module import StageModule
from fpipe.torch_internals import is_batch_norm
from fpipe.torch_private.modules import has_torch_forward, without_statistics


def deferred_batch_norm(model: Model) -> Model:
    """Make a model whose batch norms update their running statistics once a step, as by the whole batch.

    In training a batch norm normalises by its microbatch, so outputs and gradients depend on how a batch is cut. Its
    running statistics need not: they are merged over the microbatches, in float64, as of a batch that is not cut.

    Args:
        model: made by `from_sequential`; it stays as it is.

    Returns:
        Another model for the same params and state. Without batch norms that track statistics it is the same.

    Raises:
        ValueError: a batch norm has a forward of its own, or is in a stage of `from_module`.

    Source: torchgpipe's DeferredBatchNorm (Kim et al. 2020, section 3.3), whose variance is the biased one.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> model, params, state = fpipe.from_sequential(net, stages=1, loss=torch.nn.functional.mse_loss)
    >>> model = fpipe.deferred_batch_norm(model)
    >>> step = fpipe.build(fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model)), model)
    >>> batch = torch.randn(8, 2), torch.randn(8, 3)
    >>> step(params, batch, state=state).state[0]["1.num_batches_tracked"]
    tensor(1)
    """
    return replace(model, stages=tuple(map(_with_deferred_norms, model.stages)))


def _with_deferred_norms(stage: Stage) -> Stage:
    run = stage.forward
    if not isinstance(run, StageModule):
        for norm in (name for name in getattr(run, "state_names", ()) if name.endswith(".running_var")):
            raise ValueError(
                f"batch norm {norm.rpartition('.')[0]!r} is in the graph of a net; only those of a model of "
                "from_sequential can be deferred."
            )
        return stage
    norms = [(path, norm) for path, norm in run.norms if is_batch_norm(norm)]
    for path, norm in norms:
        if not has_torch_forward(norm):
            raise ValueError(
                f"batch norm {path!r} ({type(norm).__name__}) has a forward of its own; only torch's batch norms can "
                "be deferred."
            )
    return replace(stage, forward=_defer_updates(run, norms), keywords=stage.keywords | {"turn"}) if norms else stage


def _defer_updates(run: StageModule, norms: Norms) -> Any:
    """Return a stage function that collects the moments of its norms' inputs and updates statistics at the end."""

    @wraps(run)
    def forward(params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Any], turn: Turn) -> Any:
        is_first, is_last = turn
        moments_by_norm: dict[str, list[Moments]] = {path: [] for path, _ in norms}
        with run.lock, ExitStack() as stack:
            for path, norm in norms:
                stack.enter_context(without_statistics(norm, partial(_record_moments, moments_by_norm[path])))
            y, state_after = run(params, x, state={name: state[name] for name in run.state_names})
        new_state: dict[str, Any] = {name: state_after[name] for name in state if name in state_after}
        for path, norm in norms:
            # Between microbatches the state has one more value for each norm, `PATH.gathered`: the moments so far, one
            # list item for each call of the norm in a forward, in order.
            earlier_moments: list[Moments] = [] if is_first else state[f"{path}.gathered"]
            count = max(len(earlier_moments), len(moments_by_norm[path]))
            slices = [slice(call, call + 1) for call in range(count)]
            merged_moments = [merge_moments(*earlier_moments[k], *moments_by_norm[path][k]) for k in slices]
            if not is_last:
                new_state[f"{path}.gathered"] = merged_moments
            for moments in merged_moments if is_last else ():
                _update_statistics(path, norm, new_state, moments)
        return y, new_state

    return forward


Moments = tuple[Tensor, Tensor, Tensor]
"""Rows, mean and sum of squared deviations of each channel."""


def _record_moments(moments_of_calls: list[Moments], x: Tensor) -> None:
    moments_of_calls.append(moments_of(x.detach()))


def _update_statistics(path: str, norm: Any, state: dict[str, Any], moments: Moments) -> None:
    """Update the running statistics in a state by the moments of a whole batch, with the formula of torch."""
    rows, mean, squares = moments
    num_batches = state.get(f"{path}.num_batches_tracked")
    if num_batches is not None:
        num_batches = state[f"{path}.num_batches_tracked"] = num_batches + 1
    # momentum=None is the average of all batches so far: new = old * (1 - 1/n) + batch / n.
    factor = norm.momentum
    if factor is None:
        factor = 0.0 if num_batches is None else 1.0 / num_batches.double()
    # Like torch's own, running_var is the unbiased variance.
    for name, batch_statistic in (("running_mean", mean), ("running_var", squares / (rows - 1).clamp(min=1))):
        old_statistic = state[f"{path}.{name}"]
        new_statistic = old_statistic.double() * (1 - factor) + batch_statistic * factor
        state[f"{path}.{name}"] = new_statistic.to(old_statistic.dtype)


def moments_of(x: Tensor) -> Moments:
    """Return the moments of each channel (dim 1) of x, in float64: float32 loses them at a mean of 1e4."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    rows = x.numel() // x.shape[1]
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    return mean.new_full((), rows), mean, var * rows


def merge_moments(*moments: Moments) -> Moments:
    """Merge the moments of one or two sets of rows (Chan, Golub and LeVeque 1979).

    >>> merge_moments(moments_of(torch.tensor([[1.0], [3.0]])), moments_of(torch.tensor([[5.0]])))[1:]
    (tensor([3.], dtype=torch.float64), tensor([8.], dtype=torch.float64))
    """
    # d = mean_b - mean_a,  n = n_a + n_b:    mean = mean_a + d n_b / n,    M = M_a + M_b + d^2 n_a n_b / n
    if len(moments) == 1:
        return moments[0]
    (rows_a, mean_a, squares_a), (rows_b, mean_b, squares_b) = moments
    shift = mean_b - mean_a
    return (
        rows_a + rows_b,
        mean_a + shift * (rows_b / (rows_a + rows_b)),
        squares_a + squares_b + shift * shift * (rows_a * rows_b / (rows_a + rows_b)),
    )
