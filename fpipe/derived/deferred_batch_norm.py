"""Let batch norms update their running statistics once a step, with those of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from fpipe.model import Model, Stage, Turn, the_model
from fpipe.models.modules.modes import Norms
from fpipe.models.modules.stage_module import StageModule
from fpipe.torch_internals import is_batch_norm
from fpipe.torch_private.modules import has_torchs_forward, without_statistics


def deferred_batch_norm(model: Model) -> Model:
    """The model with batch norms that update their running statistics once a step, with those of the whole batch.

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
    return replace(the_model(model), stages=tuple(map(_deferred, model.stages)))


def _deferred(stage: Stage) -> Stage:
    run = stage.forward
    if not isinstance(run, StageModule):
        for norm in (name for name in getattr(run, "holds", ()) if name.endswith(".running_var")):
            raise ValueError(
                f"batch norm {norm.rpartition('.')[0]!r} is in the graph of a net, which updates its statistics after "
                "each microbatch; only those of a model of from_sequential can be deferred."
            )
        return stage
    norms = [(path, norm) for path, norm in run.norms if is_batch_norm(norm)]
    for path, norm in norms:
        if not has_torchs_forward(norm):
            raise ValueError(
                f"batch norm {path!r} ({type(norm).__name__}) has a forward of its own, which may read what it writes; "
                "only torch's own batch norms can be deferred."
            )
    return replace(stage, forward=_deferring(run, norms), asks=stage.asks | {"turn"}) if norms else stage


def _deferring(run: StageModule, norms: Norms) -> Any:
    """The function of a stage whose state has, from its first microbatch to its last, what the norms have gathered."""

    @wraps(run)
    def forward(params: Mapping[str, Tensor], x: Any, *, state: Mapping[str, Any], turn: Turn) -> Any:
        is_first, is_last = turn
        fresh: dict[str, list[Moments]] = {path: [] for path, _ in norms}
        with run.lock, ExitStack() as stack:
            for path, norm in norms:
                stack.enter_context(without_statistics(norm, partial(_note, fresh[path])))
            y, now = run(params, x, state={name: state[name] for name in run.holds})
        new: dict[str, Any] = {name: now[name] for name in state if name in now}
        for path, norm in norms:
            before: list[Moments] = [] if is_first else state[f"{path}.gathered"]
            count = max(len(before), len(fresh[path]))
            gathered = [merged(*before[call : call + 1], *fresh[path][call : call + 1]) for call in range(count)]
            if not is_last:
                new[f"{path}.gathered"] = gathered
            for moments in gathered if is_last else ():
                _commit(path, norm, new, moments)
        return y, new

    return forward


Moments = tuple[Tensor, Tensor, Tensor]
"""Rows, mean and sum of squared deviations of each channel."""


def _note(calls: list[Moments], x: Tensor) -> None:
    calls.append(statistics(x.detach()))


def _commit(path: str, norm: Any, state: dict[str, Any], moments: Moments) -> None:
    """Update the running statistics in a state by the moments of a whole batch."""
    rows, mean, squares = moments
    batches = state.get(f"{path}.num_batches_tracked")
    if batches is not None:
        batches = state[f"{path}.num_batches_tracked"] = batches + 1
    factor = norm.momentum
    if factor is None:
        factor = 0.0 if batches is None else 1.0 / batches.double()
    for name, fresh in (("running_mean", mean), ("running_var", squares / (rows - 1).clamp(min=1))):
        before = state[f"{path}.{name}"]
        state[f"{path}.{name}"] = (before.double() * (1 - factor) + fresh * factor).to(before.dtype)


def statistics(x: Tensor) -> Moments:
    """The moments of each channel of x, in float64: float32 loses them at a mean of 1e4."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    rows = x.numel() // x.shape[1]
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    return mean.new_full((), rows), mean, var * rows


def merged(*both: Moments) -> Moments:
    """The moments of one or two sets of rows as those of one (Chan, Golub and LeVeque 1979).

    >>> merged(statistics(torch.tensor([[1.0], [3.0]])), statistics(torch.tensor([[5.0]])))[1:]
    (tensor([3.], dtype=torch.float64), tensor([8.], dtype=torch.float64))
    """
    if len(both) == 1:
        return both[0]
    (n, mean, squares), (m, fresh, more) = both
    shift = fresh - mean
    return n + m, mean + shift * (m / (n + m)), squares + more + shift * shift * (n * m / (n + m))
