"""Let batch norms update their running statistics once a step, with those of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from fpipe.model import Model, Stage, the_model
from fpipe.models.modules.batch_norm import Norms, Notes, count_batch, refuse_other_channels, updated
from fpipe.models.modules.stage_module import StageModule
from fpipe.torch_internals import is_batch_norm
from fpipe.torch_private.modules import has_torchs_forward


def deferred_batch_norm(model: Model) -> Model:
    """The model with batch norms that update their running statistics once a step, with those of the whole batch.

    In training a batch norm normalises by its microbatch, so outputs and gradients depend on how a batch is cut. Its
    running statistics need not: they are merged over the microbatches, in float64, as of a batch that is not cut.

    Args:
        model: made by `from_sequential`; it stays as it is.

    Returns:
        Another model for the same params and state. Without batch norms that track statistics it is the same.

    Raises:
        ValueError: a batch norm shares its stage with a module that reads the buffers that it mutates, or is in a stage
            of `from_module`.

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
        for norm in (name for name in getattr(run, "writes", ()) if name.endswith(".running_var")):
            raise ValueError(
                f"batch norm {norm.rpartition('.')[0]!r} is in the graph of a net, which updates its statistics after "
                "each microbatch; only those of a model of from_sequential can be deferred."
            )
        return stage
    for path, owner, _ in (place for place in run.held if is_batch_norm(place[1])):
        norm = path.rpartition(".")[0]
        other = next((path for path, owner, _ in run.held if not is_batch_norm(owner)), None)
        if other is None:
            who = "another module or a hook that asks it" if has_torchs_forward(owner) else "a forward of its own"
            raise ValueError(
                f"batch norm {norm!r} ({type(owner).__name__}) has {who}, which may read what it writes; only "
                "torch's own batch norms that nobody asks can be deferred."
            )
        raise ValueError(
            f"stage {run.number} has the batch norm {norm!r} beside {other!r}, a buffer that its forward reads and "
            "writes: it takes the norm along, microbatch by microbatch. Choose sizes= that keep them apart."
        )
    if not any(is_batch_norm(module) for _, module in run.norms):
        return stage
    return replace(stage, update=partial(_update, run), counts=True)


def _update(run: StageModule, state: Mapping[str, Any], seen: Any, *, index: int, count: int) -> dict[str, Any]:
    """The module state after microbatch `index` of `count`."""
    return run.update(state, seen, partial(_updated_at_the_end, index=index, count=count))


def _updated_at_the_end(
    norms: Norms, state: Mapping[str, Any], notes: Notes, *, index: int, count: int
) -> dict[str, Any]:
    """The running statistics: those of all microbatches are merged, and used at the last of them."""
    deferred = [is_batch_norm(norm) for _, norm in norms]
    now = [not one for one in deferred]
    made = updated([*compress(norms, now)], state, [*compress(notes, now)])
    for (path, module), calls in compress(zip(norms, notes, strict=True), deferred):
        for call, x in enumerate(calls):
            name = f"{path}.gathered.{call}"
            found = statistics(x) if index == 0 else merged(made.pop(name), statistics(x))
            if index < count - 1:
                made[name] = found
                continue
            rows, mean, squares = found
            refuse_other_channels(path, (made[f"{path}.running_mean"], made[f"{path}.running_var"]), len(mean))
            factor = count_batch(path, module, made)
            for buffer, fresh in (("running_mean", mean), ("running_var", squares / max(rows - 1, 1))):
                before = made[f"{path}.{buffer}"]
                made[f"{path}.{buffer}"] = (before.double() * (1 - factor) + fresh * factor).to(before.dtype)
    return made


def statistics(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Rows, mean and sum of squared deviations of each channel, in float64: float32 loses them at a mean of 1e4."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    rows = x.numel() // x.shape[1]
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    return rows, mean, var * rows


def merged(one: tuple[int, Tensor, Tensor], other: tuple[int, Tensor, Tensor]) -> tuple[int, Tensor, Tensor]:
    """The statistics of two sets of rows as those of one (Chan, Golub and LeVeque 1979).

    >>> merged(statistics(torch.tensor([[1.0], [3.0]])), statistics(torch.tensor([[5.0]])))
    (3, tensor([3.], dtype=torch.float64), tensor([8.], dtype=torch.float64))
    """
    (n, mean, squares), (m, fresh, more) = one, other
    apart = fresh - mean
    return n + m, mean + apart * (m / (n + m)), squares + more + apart * apart * (n * m / (n + m))
